"""Activation ranges against hooks in the whole model, and what happens where text does not reach."""

import gc
import json
import math
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockscale.checkpoint.output import PROGRESS_NAME
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import open_source
from blockscale.errors import ModelError, RecipeError
from blockscale.quantization import calibrate as calibrate_module
from blockscale.quantization import calls, walk
from blockscale.quantization.calibrate import calibrate
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.plan import PlannedLinear, make_plan
from blockscale.quantization.recipe import RECIPES, Recipe, Rule
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.windows import BATCH

Find = Callable[[str], Path]


def windows(count: int = 10, length: int = 32, vocabulary: int = 128) -> CalibrationData:
    """More than one batch, the last of them smaller."""
    ids = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(4))
    return CalibrationData(ids, "digest")


def planned(path: Path, recipe: Recipe = RECIPES["nvfp4"]) -> Mapping[str, PlannedLinear]:
    return make_plan(open_source(path), recipe).linears


def run(path: Path, data: CalibrationData | None = None, **options) -> ActivationStatistics:
    linears = options.pop("linears", None) or planned(path)
    return calibrate(
        open_checkpoint(path), data or windows(), linears, with_kv=options.pop("with_kv", False), **options
    )


def reference_model(path: Path) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def forward(model: nn.Module, data: CalibrationData) -> None:
    with torch.inference_mode():
        for batch in data.windows.split(BATCH):
            model(input_ids=batch, use_cache=False)


def brute_force(path: Path, data: CalibrationData) -> dict[str, float]:
    """Largest input of each linear, and of each expert's, by hooks in transformers' model."""
    model = reference_model(path)
    seen: dict[str, float] = {}

    def note(name: str, x: Tensor) -> None:
        if x.numel():
            seen[name] = max(seen.get(name, 0.0), x.abs().amax().item())

    def watch_experts(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            hidden, index = args[0], args[1]
            for expert in range(module.num_experts):
                x = hidden[(index == expert).any(-1)]
                gate, up = (x @ module.gate_up_proj[expert].T).chunk(2, -1)
                for leaf in ("gate_proj", "up_proj"):
                    note(f"{name}.{expert}.{leaf}", x)
                note(f"{name}.{expert}.down_proj", nn.functional.silu(gate) * up)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(watch_experts(name))
    forward(model, data)
    return seen


@pytest.mark.parametrize("name", ["base_llama", "base_qwen3moe"])
def test_input_amax_is_what_hooks_see(name: str, golden_checkpoint: Find) -> None:
    path, data = golden_checkpoint(name), windows(vocabulary=256)
    found = run(path, data)
    expected = brute_force(path, data)
    assert set(found.input_amax) == set(expected) == set(planned(path))
    assert found.input_amax == pytest.approx(expected, rel=1e-5)
    assert found.notices == ()
    assert found.num_tokens == 320


@pytest.mark.parametrize(
    "family", ["gemma3_text", "gemma4_text", "qwen2", "phi3", "deepseek_v3", "bamba", "jamba", "falcon_h1"]
)
def test_other_decoders(family: str, tiny_model: Find) -> None:
    """Masks of two kinds, linears before the layers, biases, fused projections, latent attention, shared experts,
    layers that answer with a tuple, state spaces."""
    path, data = tiny_model(family), windows()
    expected = {name: amax for name, amax in brute_force(path, data).items() if name in planned(path)}
    assert run(path, data).input_amax == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["base_llama", "base_qwen3moe"])
def test_kv_amax_is_what_the_cache_holds(name: str, golden_checkpoint: Find) -> None:
    """Keys after rotary embedding, before they are repeated for the query heads."""
    path, data = golden_checkpoint(name), windows(vocabulary=256)
    found = run(path, data, with_kv=True)
    model = reference_model(path)
    expected = {f"model.layers.{i}.self_attn": (0.0, 0.0) for i in range(2)}
    with torch.inference_mode():
        for batch in data.windows.split(BATCH):
            cache = model(input_ids=batch, use_cache=True).past_key_values
            for i, layer in enumerate(cache.layers):
                name = f"model.layers.{i}.self_attn"
                key, value = expected[name]
                expected[name] = (
                    max(key, layer.keys.abs().amax().item()),
                    max(value, layer.values.abs().amax().item()),
                )
    assert set(found.kv_amax) == set(expected)
    for name, pair in expected.items():
        assert found.kv_amax[name] == pytest.approx(pair, rel=1e-5)
    assert found.input_amax == pytest.approx(run(path, data).input_amax, rel=1e-6)
    assert not run(path, data).kv_amax


def test_one_layer_at_a_time(golden_checkpoint: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are filled as copies that go before the next one comes; the skeleton keeps nothing of them."""
    models, copies = [], []
    build, copy_module = calibrate_module.build_skeleton, walk.materialized_copy

    def remember(*args, **options):
        models.append(build(*args, **options))
        return models[-1]

    def copy_alone(model: nn.Module, weights, path: str) -> nn.Module:
        gc.collect()
        assert not [name for name, layer in copies if layer() is not None], "a layer is still held"
        assert not [module for module in embeddings if module() is not None], "the embedding is still held"
        assert all(p.is_meta for p in models[0].model.layers.parameters())
        layer = copy_module(model, weights, path)
        assert not any(p.is_meta for p in layer.parameters())
        copies.append((path, weakref.ref(layer)))
        return layer

    def copy_first(model: nn.Module, weights, path: str) -> nn.Module:
        """The first time to see in which form a layer answers; beside the embedding."""
        firsts.append(path)
        copied = copy_module(model, weights, path)
        embeddings.append(weakref.ref(copied))
        return copied

    firsts, embeddings = [], []
    monkeypatch.setattr(calibrate_module, "build_skeleton", remember)
    monkeypatch.setattr(walk, "materialized_copy", copy_alone)
    monkeypatch.setattr(calls, "materialized_copy", copy_first)
    run(golden_checkpoint("base_llama"), windows(vocabulary=256), with_kv=True)
    assert firsts == ["model.layers.0", "model"]
    assert [path for path, _ in copies] == ["model.layers.0", "model.layers.1"]
    (model,) = models
    layers = model.model.layers
    assert type(layers) is nn.ModuleList
    assert all(p.is_meta for p in layers.parameters())
    assert model.model.embed_tokens.weight.is_meta
    assert model.lm_head.weight.is_meta, "the head is not needed"
    assert not any(hasattr(m, "kv_transform") for m in layers.modules())


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


ONE_TOKEN = CalibrationData(torch.full((2, 32), 7), "one token")  # the router sends it to few experts


def test_experts_that_no_token_reaches(golden_checkpoint: Find) -> None:
    """They get their siblings' largest range, and the user is told which they are."""
    path = golden_checkpoint("base_qwen3moe")
    expected = brute_force(path, ONE_TOKEN)
    unseen = [m for m in planned(path) if m not in expected]
    assert unseen, "the token reaches every expert: choose another"
    found = run(path, ONE_TOKEN)
    assert set(found.input_amax) == set(planned(path))
    assert len(found.notices) == len(unseen)
    for module in unseen:
        prefix, leaf = module.split(".experts.")[0] + ".experts.", module.rpartition(".")[2]
        siblings = [v for m, v in expected.items() if m.startswith(prefix) and m.endswith(leaf)]
        assert found.input_amax[module] == pytest.approx(max(siblings), rel=1e-5)
        assert any(n.startswith(f"{module}: no calibration token reached it") for n in found.notices)


def test_activations_that_are_all_zero(golden_checkpoint: Find, tmp_path: Path) -> None:
    def silence(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].zero_()

    path = changed(golden_checkpoint("base_llama"), tmp_path / "m", silence)
    found = run(path, windows(vocabulary=256))
    assert found.input_amax["model.layers.0.mlp.down_proj"] == 0.0
    assert found.notices == ("model.layers.0.mlp.down_proj: its inputs were all zero; its input scale is 1",)


def test_experts_whose_inputs_are_all_zero(golden_checkpoint: Find, tmp_path: Path) -> None:
    """No range is left out, not even where an unseen expert has only silent siblings."""

    def silence(tensors: dict[str, Tensor]) -> None:
        for expert in range(4):
            tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"].zero_()

    path = changed(golden_checkpoint("base_qwen3moe"), tmp_path / "m", silence)
    found = run(path, ONE_TOKEN)
    assert any("no calibration token reached it" in notice for notice in found.notices)
    assert set(found.input_amax) == set(planned(path))
    assert [found.input_amax[f"model.layers.0.mlp.experts.{e}.down_proj"] for e in range(4)] == [0.0] * 4
    assert sum("layers.0.mlp.experts" in n and "down_proj" in n for n in found.notices) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ("model.embed_tokens.weight", r"the embedding, the input of decoder layer 0,"),
        ("model.layers.0.input_layernorm.weight", r"model\.layers\.0\.self_attn\.\w+_proj"),
        ("model.layers.1.mlp.up_proj.weight", r"model\.layers\.1\.mlp\.down_proj"),
        ("model.layers.1.mlp.down_proj.weight", "decoder layer 1"),
    ],
)
def test_activations_that_are_not_finite(
    tensor: str, where: str, bad: float, golden_checkpoint: Find, tmp_path: Path
) -> None:
    path = changed(golden_checkpoint("base_llama"), tmp_path / "m", lambda tensors: tensors[tensor].fill_(bad))
    linears = planned(golden_checkpoint("base_llama"))
    with pytest.raises(ModelError, match=rf"{where} holds NaN or Inf") as error:
        run(path, windows(vocabulary=256), linears=linears)
    assert "damaged" in error.value.hint


def test_only_what_needs_a_scale_is_filled_and_noticed(golden_checkpoint: Find, tmp_path: Path) -> None:
    def silence(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].zero_()

    path = changed(golden_checkpoint("base_llama"), tmp_path / "m", silence)
    recipe = Recipe("x", "nvfp4", "nvfp4", rules=(Rule("*.down_proj", "fp8-channel", "fp8-token"),))
    found = run(path, windows(vocabulary=256), linears=planned(path, recipe))
    assert found.notices == ()
    assert "model.layers.0.mlp.up_proj" in found.input_amax
    assert "model.layers.0.mlp.down_proj" not in found.input_amax


def test_a_head_cannot_be_calibrated(golden_checkpoint: Find) -> None:
    """Said before the layers are run, and with a way out."""
    path = golden_checkpoint("base_llama")
    recipe = Recipe("x", "nvfp4", "nvfp4", rules=(Rule("lm_head", "nvfp4", "nvfp4"),))
    with pytest.raises(RecipeError, match="lm_head: its input scale cannot be calibrated") as error:
        run(
            path,
            windows(vocabulary=256),
            linears=planned(path, recipe),
            progress=lambda *a: pytest.fail("a layer was run"),
        )
    assert "activation: null" in error.value.hint


class Stop(BaseException):
    """An interruption."""


def test_a_state_is_taken_up(golden_checkpoint: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data, state = golden_checkpoint("base_llama"), windows(vocabulary=256), tmp_path / "state"
    whole = run(path, data, with_kv=True)

    def stop_after_layer_0(stage: str, done: int, total: int) -> None:
        assert (stage, done, total) == ("calibrating", 1, 2)
        raise Stop

    with pytest.raises(Stop):
        run(path, data, with_kv=True, state_folder=state, progress=stop_after_layer_0)
    assert json.loads((state / PROGRESS_NAME).read_text())["next_layer"] == 1
    seen = []
    resumed = run(path, data, with_kv=True, state_folder=state, progress=lambda *a: seen.append(a[1]))
    assert seen == [2], "the first layer is not run again"
    assert resumed == whole
    assert [file.name for file in state.iterdir()] == [PROGRESS_NAME], "a finished state has no hidden states"
    monkeypatch.setattr(walk, "materialized_copy", lambda *a: pytest.fail("a layer was run again"))
    assert run(path, data, with_kv=True, state_folder=state) == whole


@pytest.mark.parametrize("loss", ["hidden states", "one batch", "half a file", "half a state"])
def test_a_state_that_lost_something_is_not(loss: str, golden_checkpoint: Find, tmp_path: Path) -> None:
    """Then the work is done again from the start."""
    path, data, state = golden_checkpoint("base_llama"), windows(vocabulary=256), tmp_path / "state"

    def stop(*_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        run(path, data, state_folder=state, progress=stop)
    file = state / "hidden" / "1" / "1"
    if loss == "hidden states":
        shutil.rmtree(state / "hidden")
    elif loss == "one batch":
        file.unlink()
    else:
        file = file if loss == "half a file" else state / PROGRESS_NAME
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    seen = []
    assert run(path, data, state_folder=state, progress=lambda *a: seen.append(a[1])) == run(path, data)
    assert seen == [1, 2]


def test_a_state_of_other_data_is_not(golden_checkpoint: Find, tmp_path: Path) -> None:
    path, state = golden_checkpoint("base_llama"), tmp_path / "state"
    run(path, windows(vocabulary=256), state_folder=state)
    other = CalibrationData(windows(3, vocabulary=256).windows, "other")
    assert run(path, other, state_folder=state) == run(path, other)
