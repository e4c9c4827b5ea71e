"""A checkpoint learned from its source: nearer to it, never further away, and otherwise the same."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import blockscale as bs
from blockscale.algorithms.divergence import score_tokens
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.shards import read_json
from blockscale.errors import CheckpointError, ModelError, OutputError
from blockscale.host.model import load_model
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.layerwise.capture import is_held_back
from blockscale.quantization.learning import batches, memory
from blockscale.quantization.learning import learn as learning_module
from blockscale.quantization.learning.learn import Learned, learn

from .models import quantized, windows

Find = Callable[[str], Path]
STEPS = 16


@pytest.fixture(scope="session")
def checkpoint(
    tiny_model: Find, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """(family, recipe, dialect) -> a quantized tiny model. Read only."""
    made: dict[tuple[str, ...], Path] = {}

    def make(family: str = "llama", recipe: str = "nvfp4", dialect: str = "modelopt") -> Path:
        key = (family, recipe, dialect)
        if key not in made:
            folder = tmp_path_factory.mktemp("learning")
            made[key] = quantized(tiny_model(family), folder, calibration_text, recipe, dialect=dialect)
        return made[key]

    return make


def learned(source: Path, path: Path, out: Path, steps: int = STEPS, data: CalibrationData | None = None) -> Learned:
    return learn(path, open_checkpoint(source), data or windows(), out, steps=steps)


def kl(source: Path, path: Path, data: CalibrationData) -> float:
    """On the held-back windows, as evaluation measures it."""
    ids = data.windows[[i for i in range(len(data.windows)) if is_held_back(i, len(data.windows))]]
    logits = [load_model(folder).logits(ids).flatten(0, 1) for folder in (path, source)]
    found = score_tokens(logits[0], ids.flatten(), logits[1]).kl
    assert found is not None
    return found.mean().item()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-w4a16-sweep"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_it_comes_nearer_and_says_how_near(
    recipe: str, dialect: str, checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path
) -> None:
    path, source, out = checkpoint("llama", recipe, dialect), tiny_model("llama"), tmp_path / "out"
    result = learned(source, path, out)
    found = result.learning
    assert 0 < found.best_step <= found.steps == STEPS
    assert found.kl_after < 0.97 * found.kl_before
    assert found.kl_before == pytest.approx(kl(source, path, windows()), rel=1e-5)
    assert found.kl_after == pytest.approx(kl(source, out, windows()), rel=1e-5)
    assert 0 < found.num_codes_changed < found.num_codes / 4
    assert not [f for f in bs.lint(out, source=source).findings if f.severity != "info"]


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_other_architectures(family: str, checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path) -> None:
    path, out = checkpoint(family), tmp_path / "out"
    found = learned(tiny_model(family), path, out).learning
    assert found.kl_after < found.kl_before
    assert found.kl_after == pytest.approx(kl(tiny_model(family), out, windows()), rel=1e-5)
    assert not [f for f in bs.lint(out).findings if f.severity != "info"]


def test_all_but_codes_scales_and_gains_is_as_it_was(
    checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path
) -> None:
    path, out = checkpoint(), tmp_path / "out"
    result = learned(tiny_model("llama"), path, out)
    before, after = load_file(path / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after)
    changed = {n for n in before if not same_bytes(before[n], after[n])}
    assert all(name.endswith(("_proj.weight", "_proj.weight_scale", "norm.weight")) for name in changed)
    assert len([name for name in changed if name.endswith("norm.weight")]) == result.learning.num_gains_changed > 0
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    assert read_json(out / "config.json") == read_json(path / "config.json")
    assert {f.name for f in path.iterdir()} == {f.name for f in out.iterdir()}
    assert result.num_bytes == (out / "model.safetensors").stat().st_size


def test_the_record_tells_of_it(checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path) -> None:
    path, out = checkpoint(), tmp_path / "out"
    result = learned(tiny_model("llama"), path, out)
    before, after = read_json(path / "blockscale.json"), read_json(out / "blockscale.json")
    assert after["learning"] == asdict(result.learning)
    assert after["recipe"] == before["recipe"]
    assert after["calibration"] == before["calibration"]
    report = bs.evaluate(out, tiny_model("llama"), text=["pt-evaluation"], max_tokens=64, window=32)
    measured = {layer.name: layer.sqnr_db for layer in report.layers}
    for name, layer in after["layers"].items():
        # the record's is against the source's weight with its scales found again, which so small a matrix bends a bit
        assert layer["sqnr_db"] == pytest.approx(measured[name], abs=1.0)


def test_steps_that_lead_astray_are_not_taken(
    checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_module, "_LR", 5.0)
    monkeypatch.setattr(learning_module, "_GAIN_LR", 5.0)
    path, out = checkpoint(), tmp_path / "out"
    found = learned(tiny_model("llama"), path, out).learning
    assert (found.best_step, found.num_codes_changed, found.num_gains_changed) == (0, 0, 0)
    assert found.kl_after == found.kl_before
    assert (out / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_the_same_bytes_every_time(checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path) -> None:
    path, source, data = checkpoint(), open_checkpoint(tiny_model("llama")), windows(64)
    for out, seed in (("first", 0), ("again", 0), ("other", 7)):
        learn(path, source, data, tmp_path / out, steps=4, seed=seed)
    first, again, other = ((tmp_path / o / "model.safetensors").read_bytes() for o in ("first", "again", "other"))
    assert first == again
    assert first != other, "the seed draws the order of the batches"


def test_smoothed_weights_start_where_they_lay(
    checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path
) -> None:
    """AWQ has multiplied rows and columns, and the norms before them."""
    path, out = checkpoint("llama", "nvfp4-awq"), tmp_path / "out"
    result = learned(tiny_model("llama"), path, out)
    assert result.learning.kl_after < result.learning.kl_before
    assert len(result.sqnr_db) == len(open_checkpoint(path).quantized.linears)  # type: ignore[union-attr]
    assert min(result.sqnr_db.values()) > 15, "dB: no other weight is as near"


def test_linears_that_the_source_does_not_have_start_at_their_codes(
    checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path
) -> None:
    """Of another model of the same shapes: there is nothing to find, and the model learns all the same."""
    path, out = checkpoint("llama", "nvfp4-w4a16"), tmp_path / "out"
    other = tiny_model("llama3")
    result = learn(path, open_checkpoint(other), windows(), out, steps=4)
    assert result.learning.kl_after <= result.learning.kl_before


def test_what_stays_in_another_format_stays(tiny_model: Find, calibration_text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        "name: mixed\nweight: nvfp4\nactivation: nvfp4\nrules:\n"
        '  - {match: "*.down_proj", weight: fp8, activation: fp8}\n'
    )
    path = quantized(tiny_model("llama"), tmp_path, calibration_text, str(recipe))
    result = learned(tiny_model("llama"), path, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "out"))
    assert result.learning.kl_after < result.learning.kl_before
    assert not any("down_proj" in name for name in result.sqnr_db)
    for name in before:
        if "down_proj" in name:
            assert same_bytes(before[name], after[name])


@pytest.mark.parametrize("num", [1, 2, 3])
def test_few_windows(num: int, checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path) -> None:
    found = learned(tiny_model("llama"), checkpoint(), tmp_path / "out", 4, windows(num)).learning
    assert found.kl_after <= found.kl_before


def test_no_steps_copy(checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path) -> None:
    path = checkpoint()
    learned(tiny_model("llama"), path, tmp_path / "out", 0)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_layers_are_recomputed_where_memory_is_short(
    checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, source = checkpoint(), tiny_model("llama")
    learned(source, path, tmp_path / "ample", 4)
    monkeypatch.setattr(learning_module, "check_learnable", lambda *_: 0)
    learned(source, path, tmp_path / "short", 4)
    ample, short = ((tmp_path / o / "model.safetensors").read_bytes() for o in ("ample", "short"))
    assert ample == short


def test_too_little_memory_is_refused_before_anything_is_loaded(
    checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(learning_module, "load_model", None)
    with pytest.raises(ModelError, match=r"needs about \d.* on cpu, and 1\.\d+ MB are free"):
        learned(tiny_model("llama"), checkpoint(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_free_memory_is_what_the_system_says() -> None:
    free = memory.free_bytes("cpu")
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if Path("/proc/meminfo").exists() else []
    total = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal")), free)
    assert 0 < free <= total


def test_a_teacher_of_another_vocabulary_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from tiny_configs import auto_class, tiny_config

    config = tiny_config("llama")
    config.vocab_size = 160
    model = auto_class("llama").from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "larger")
    with pytest.raises(ModelError, match="teacher"):
        learned(tmp_path / "larger", checkpoint(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokens_that_the_model_does_not_know_are_refused(
    checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path
) -> None:
    data = replace(windows(), windows=windows().windows + 100)
    with pytest.raises(ModelError, match="tokenizer"):
        learned(tiny_model("llama"), checkpoint(), tmp_path / "out", data=data)


def test_a_source_that_gives_nan_is_named(checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model("llama"), broken)
    data = bytearray((broken / "model.safetensors").read_bytes())
    data[-200:] = b"\xff" * 200
    (broken / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="16-bit model gives NaN"):
        learned(broken, checkpoint(), tmp_path / "out")


def test_an_existing_output_and_an_unquantized_model_are_refused(
    checkpoint: Callable[..., Path], tiny_model: Find, tmp_path: Path
) -> None:
    source = tiny_model("llama")
    with pytest.raises(CheckpointError, match="no NVFP4 linear"):
        learned(source, source, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    with pytest.raises(OutputError, match="exists"):
        learned(source, checkpoint(), tmp_path / "out")


def test_batches_show_every_text_and_keep_the_judges_apart(tiny_model: Find) -> None:
    data = windows(40)
    made = batches.make_batches(data.windows, 8, load_model(tiny_model("llama")))
    seen = torch.cat([batch.ids for batch in made.train])
    held = torch.cat([batch.ids for batch in made.held])
    assert sorted(torch.cat((seen, held)).tolist()) == sorted(data.windows.tolist())
    assert torch.equal(held, data.windows[7::8])
    assert all(len(batch.ids) in (7, 8) for batch in made.train)
    places = [data.windows.tolist().index(row) for row in made.train[0].ids.tolist()]
    assert places == sorted(places)
    assert places[-1] - places[0] > 30, "a batch reaches from the first text to the last"


def test_a_large_vocabulary_makes_smaller_steps_and_fewer_judges(
    tiny_model: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batches.step_windows(512, {"vocab_size": 49_152}, "cpu") == 1
    assert batches.step_windows(512, {"vocab_size": 49_152}, "cuda") == 8
    assert batches.step_windows(512, {"text_config": {"vocab_size": 262_144}}, "cuda:1") == 4
    assert batches.step_windows(8192, {"vocab_size": 262_144}, "cpu") == 1
    monkeypatch.setattr(batches, "_MAX_LOGITS", 2 * 32 * 128)
    made = batches.make_batches(windows(40).windows, 1, load_model(tiny_model("llama")))
    assert len(made.held) == 2
