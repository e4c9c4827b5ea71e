"""Windows on which the model gives NaN or Inf: left out from there on, with a notice."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_configs import _SIZES, config_class
from torch import Tensor

from blockscale.checkpoint.output import PROGRESS_NAME
from blockscale.errors import ModelError
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.walk import advance
from blockscale.quantization.windows import Windows

from .test_calibrate import brute_force, run
from .test_walk import SHARING, begin

BAD = 5  # the token that does it
FIRST = r"the input of model\.layers\.1\.self_attn\.\w+_proj holds NaN or Inf"


def overflowing(folder: Path, family: str = "llama", factor: float = 3e38, **changes: object) -> Path:
    """A model of three layers or more whose second cannot stand the token BAD: it alone has a first channel, which the
    second layer's norm multiplies by `factor`, out of fp32's range."""
    import transformers

    torch.manual_seed(0)
    config = config_class(family)(**{**_SIZES, "num_hidden_layers": 3, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.normal_()
        embedding[:, 0] = 0
        embedding[BAD, 0] = 64
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")):
                parameter[0] = 0
        model.get_submodule("model.layers.1.input_layernorm").weight[0] = factor
    model.save_pretrained(folder)
    return folder


def windows(*bad: int, count: int = 20) -> CalibrationData:
    """Three batches; those windows have the token once."""
    ids = torch.randint(BAD + 1, 128, (count, 32), generator=torch.Generator().manual_seed(4))
    ids[list(bad), 7] = BAD
    return CalibrationData(ids, "digest")


def without(data: CalibrationData, *bad: int) -> CalibrationData:
    keep = [i for i in range(len(data.windows)) if i not in bad]
    return CalibrationData(data.windows[keep], data.digest)


@pytest.mark.parametrize("bad", [(2,), (0, 3, 9), (1, 16, 17, 18, 19), tuple(range(8, 16))])
def test_what_is_left_counts(bad: tuple[int, ...], tmp_path: Path) -> None:
    """Layers before the fault have seen all windows, those from there on the sound ones."""
    path, data = overflowing(tmp_path / "m"), windows(*bad)
    found = run(path, data, with_kv=True)
    everything, sound = brute_force(path, data), brute_force(path, without(data, *bad))
    assert set(found.input_amax) == set(sound)
    assert not all(math.isfinite(amax) for amax in everything.values())
    for name, amax in found.input_amax.items():
        expected = everything if ".layers.0." in name else sound
        assert amax == pytest.approx(expected[name], rel=1e-5), name
    assert found.num_tokens == 32 * (20 - len(bad))
    (notice,) = found.notices
    assert notice.startswith(
        f"{len(bad)} of 20 calibration windows are left out from where they gave NaN or Inf: first,"
    )
    assert "model.layers.1.self_attn" in notice
    reference = run(path, without(data, *bad), with_kv=True)
    for name in ("model.layers.1.self_attn", "model.layers.2.self_attn"):
        assert found.kv_amax[name] == pytest.approx(reference.kv_amax[name], rel=1e-5)


def test_more_than_half(tmp_path: Path) -> None:
    path = overflowing(tmp_path / "m")
    assert run(path, windows(*range(10))).num_tokens == 320
    with pytest.raises(ModelError, match=f"{FIRST} on the calibration text"):
        run(path, windows(*range(9, 20)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_embedding(value: float, tmp_path: Path) -> None:
    path, data = overflowing(tmp_path / "m"), windows(0, 19)
    change_embedding(path, value)
    found = run(path, data)
    assert found.input_amax == run(path, without(data, 0, 19)).input_amax
    (notice,) = found.notices
    assert notice.startswith("2 of 20 calibration windows")
    assert "the embedding" in notice


def change_embedding(path: Path, value: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_layers_that_share_keys_and_values(tmp_path: Path) -> None:
    """Of these too, the windows that are left are used."""
    path, data = overflowing(tmp_path / "m", "gemma4_text", **SHARING), windows(1, 9)
    found, sound = run(path, data), brute_force(path, without(data, 1, 9))
    assert len(found.notices) == 1
    for name, amax in found.input_amax.items():
        if ".layers." in name and ".layers.0." not in name:
            assert amax == pytest.approx(sound[name], rel=1e-5), name


def test_what_only_fp16_cannot_hold(tmp_path: Path) -> None:
    """On a GPU layers run in the checkpoint's own type."""
    path, data = overflowing(tmp_path / "m", factor=60_000.0), windows(1, 9)
    assert run(path, data).notices == ()
    with torch.no_grad():
        walk, states = begin(path, tmp_path / "work", Windows(data.windows), torch.float16)
        for index in range(3):
            walk = advance(walk, index, walk.load(index), states)
    assert dict(walk.windows.faults) == dict.fromkeys((1, 9), "the output of decoder layer 1 holds NaN or Inf")
    assert [states.read(3, batch).shape[0] for batch in range(3)] == [7, 7, 4]
    assert states.read(3, 0).dtype == torch.float16


class Stop(BaseException):
    """An interruption."""


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_resumed_run_leaves_the_same_out(after: int, tmp_path: Path) -> None:
    path, data, state = overflowing(tmp_path / "m"), windows(0, 3, 16, 17, 18, 19), tmp_path / "state"

    def stop(stage: str, done: int, total: int) -> None:
        if done == after:
            raise Stop

    with pytest.raises(Stop):
        run(path, data, with_kv=True, state_folder=state, progress=stop)
    assert len(json.loads((state / PROGRESS_NAME).read_text())["faults"]) == (0 if after == 1 else 6)
    seen: list[int] = []
    resumed = run(path, data, with_kv=True, state_folder=state, progress=lambda *a: seen.append(a[1]))
    assert seen == list(range(after + 1, 4))
    assert resumed == run(path, data, with_kv=True)


def test_experts(golden_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Their inputs do not tell which window a token is of."""
    import shutil

    from safetensors.torch import load_file, save_file

    path = tmp_path / "m"
    shutil.copytree(golden_checkpoint("base_qwen3moe"), path)
    tensors: dict[str, Tensor] = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][BAD, 0] = 64
    tensors["model.layers.0.self_attn.o_proj.weight"][0] = 0
    tensors["model.layers.0.post_attention_layernorm.weight"][0] = 3e38
    for name in tensors:
        if name.startswith("model.layers.0.mlp.gate."):
            tensors[name][:, 0] = 0  # the router
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    data = windows(3, 8)
    found, sound = run(path, data), run(path, without(data, 3, 8))
    left_out, *rest = found.notices
    assert left_out.startswith("2 of 20")
    assert tuple(rest) == sound.notices
    experts = {name: amax for name, amax in found.input_amax.items() if ".experts." in name}
    assert experts == pytest.approx({name: sound.input_amax[name] for name in experts}, rel=1e-5)
