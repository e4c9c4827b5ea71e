"""Quantized weights beside the 16-bit weights that they were made from. Needs nothing."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.source import open_source
from blockscale.formats.spec import MXFP4, NVFP4, NVFP4_BLOCK32, Format
from blockscale.inspection.checks.against_source import decibels
from blockscale.inspection.checks.layout import layout_faults, layout_notices
from blockscale.inspection.checks.scales import scale_faults
from blockscale.inspection.reading import read_folder

from .changed_folders import GOLDEN, base_of, copied, golden_names, written
from .layouts import Tensors, both, drawn, on_bytes, reading_of, source_of, stored, swap_nibbles, swizzle_scales

FORMATS = [NVFP4, MXFP4, NVFP4_BLOCK32]
LAYER = "model.layers.0.mlp.up_proj"

Change = Callable[[Tensors, str], object]


def found(
    parent: Path, weight: Tensor, change: Change | None = None, *, fmt: Format = NVFP4, source: Tensor | None = None
) -> list[Fault]:
    """Of one quantized weight, changed after it was stored, beside another than itself if one is given."""
    tensors = stored({LAYER: weight}, fmt)
    if change is not None:
        change(tensors, LAYER)
    beside = source_of(parent, {LAYER: weight if source is None else source})
    return list(layout_faults(reading_of(parent, tensors, fmt), beside))


def rules(faults: list[Fault]) -> set[str]:
    assert {fault.where for fault in faults} <= {LAYER}
    return {fault.rule for fault in faults}


# ---------------------------------------------------------------- good ones


@pytest.mark.parametrize("name", golden_names(quantized=True))
def test_the_peers_layouts_are_good(name: str) -> None:
    """One has norms folded into its weights, and one a scale of inputs beside them."""
    reading, source = read_folder(GOLDEN / name), open_source(GOLDEN / base_of(name))
    assert list(layout_faults(reading, source)) == []
    assert layout_notices(reading, source) == []


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("n", "k"), [(256, 2048), (4, 64), (16, 96), (300, 96), (128, 64)])
def test_what_was_just_quantized(tmp_path: Path, n: int, k: int, fmt: Format) -> None:
    assert found(tmp_path, drawn(n, k), fmt=fmt) == []


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss", "phi3", "qwen3_vl"])
def test_every_shape_of_model(family: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    from blockscale import api

    api.quantize(tiny_model(family), tmp_path / "q", "nvfp4-w4a16")
    reading, source = read_folder(tmp_path / "q"), open_source(tiny_model(family))
    assert list(layout_faults(reading, source)) == []
    assert layout_notices(reading, source) == []


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (swap_nibbles, {"swapped-nibbles"}),
        (swizzle_scales, {"swizzled-scales"}),
        (both, {"swapped-nibbles", "swizzled-scales"}),
    ],
)
def test_wrong_layouts(tmp_path: Path, change: Change, expected: set[str], fmt: Format, spread: float) -> None:
    """Of random weights too, with the source beside them."""
    assert rules(found(tmp_path, drawn(256, 2048, 1, spread), change, fmt=fmt)) == expected


@pytest.mark.parametrize(("n", "k"), [(64, 64), (16, 16), (300, 80), (17, 4096)])
def test_swapped_nibbles_of_any_shape(tmp_path: Path, n: int, k: int) -> None:
    assert rules(found(tmp_path, drawn(n, k), swap_nibbles)) == {"swapped-nibbles"}


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
def test_swapped_nibbles_of_a_stack(family: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from blockscale import api

    api.quantize(tiny_model(family), tmp_path / "q", "nvfp4-w4a16")
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    tensors[name] = (tensors[name] << 4) | (tensors[name] >> 4)
    save_file(tensors, file, {"format": "pt"})
    faults = list(layout_faults(read_folder(tmp_path / "q"), open_source(tiny_model(family))))
    assert [(fault.rule, fault.where) for fault in faults] == [("swapped-nibbles", name)]


def test_swapped_nibbles_below_a_scale_of_inputs(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj"
    folder = copied("modelopt_llama_nvfp4_awq_lite", tmp_path, lambda tensors: swap_nibbles(tensors, name))
    faults = list(layout_faults(read_folder(folder), open_source(GOLDEN / "base_llama")))
    assert [(fault.rule, fault.where) for fault in faults] == [("swapped-nibbles", name)]


def test_a_source_in_fp8_tiles(tmp_path: Path) -> None:
    weight = drawn(256, 256).to(torch.float8_e4m3fn)
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.weight_scale_inv": torch.full((2, 2), 0.5)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    source = open_source(written(tmp_path / "fp8", tensors, config))
    made = stored({LAYER: (weight.float() * 0.5).bfloat16()})
    assert list(layout_faults(reading_of(tmp_path, made), source)) == []
    swap_nibbles(made, LAYER)
    assert rules(list(layout_faults(reading_of(tmp_path, made), source))) == {"swapped-nibbles"}


# ---------------------------------------------------------------- what quantization may have been preceded by


@pytest.mark.parametrize("centre", [1.0, 0.2])
def test_columns_folded_into_a_norm(tmp_path: Path, centre: float) -> None:
    weight = drawn(256, 1024)
    factor = centre * (0.7 * torch.randn(1024, generator=torch.Generator().manual_seed(1))).exp()
    assert found(tmp_path, (weight.float() * factor).bfloat16(), source=weight) == []


def test_rows_folded_into_the_next_layer(tmp_path: Path) -> None:
    weight = drawn(256, 1024)
    factor = (0.7 * torch.randn(256, 1, generator=torch.Generator().manual_seed(1))).exp()
    assert found(tmp_path, (weight.float() * factor).bfloat16(), source=weight) == []
    changed = found(tmp_path, (weight.float() * factor).bfloat16(), swap_nibbles, source=weight)
    assert rules(changed) == {"swapped-nibbles"}


@pytest.mark.parametrize("is_folded", [False, True])
def test_one_factor_for_all(tmp_path: Path, is_folded: bool) -> None:
    """A wrong global scale, unless a norm of the layer changed with it."""
    weight, norm = drawn(256, 1024), "model.layers.0.post_attention_layernorm.weight"
    made = {**stored({LAYER: weight * 3}), norm: torch.full((1024,), 1 / 3 if is_folded else 1.0)}
    config = {f"{LAYER}.weight": weight, norm: torch.ones(1024)}
    source = open_source(written(tmp_path / "source", config, {}))
    faults = list(layout_faults(reading_of(tmp_path, made), source))
    assert rules(faults) == (set() if is_folded else {"differs-from-source"})
    assert is_folded or "3.0" in faults[0].message.split(": its values are")[1]


def test_some_training_afterwards(tmp_path: Path) -> None:
    weight = drawn(256, 1024)
    trained = weight + 0.2 * weight.std() * torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    assert found(tmp_path, trained.bfloat16(), source=weight) == []


# ---------------------------------------------------------------- other weights


def reverse(tensors: Tensors, name: str) -> None:
    tensors[f"{name}.weight_scale_2"] = tensors[f"{name}.weight_scale_2"].reciprocal()


def other_rows(tensors: Tensors, name: str) -> None:
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].flip(0)
    on_bytes(tensors, name, lambda scale: scale.flip(0))


def other_last_rows(tensors: Tensors, name: str) -> None:
    packed = tensors[f"{name}.weight"].clone()
    packed[-128:] = packed[-128:].flip(0)
    tensors[f"{name}.weight"] = packed


def no_codes(tensors: Tensors, name: str) -> None:
    tensors[f"{name}.weight"] = torch.zeros_like(tensors[f"{name}.weight"])


@pytest.mark.parametrize("change", [other_rows, other_last_rows, no_codes])
def test_other_values(tmp_path: Path, change: Change) -> None:
    assert rules(found(tmp_path, drawn(256, 1024, 0, 0), change)) == {"differs-from-source"}


def test_another_weight(tmp_path: Path) -> None:
    faults = found(tmp_path, drawn(256, 1024, 1), source=drawn(256, 1024, 2))
    assert rules(faults) == {"differs-from-source"}
    correlation = faults[0].message.split("correlation with the source is ")[1].split(",")[0]
    assert abs(float(correlation)) < 0.05


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    faults = found(tmp_path, drawn(256, 1024), source=drawn(1024, 256))
    assert rules(faults) == {"differs-from-source"}
    assert "[256, 1024], the source has [1024, 256]" in faults[0].message


@pytest.mark.parametrize("amax", [0.1, 1e4])
def test_reversed_global_scale(tmp_path: Path, amax: float) -> None:
    """Beside the source it shows, even of a weight too large to be told by its magnitude."""
    weight = drawn(256, 1024)
    weight = (weight.float() * amax / weight.float().abs().amax()).bfloat16()
    assert rules(found(tmp_path, weight, reverse)) == {"reversed-global-scale"}


def test_fp8_beside_its_source(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj"

    def flip(tensors: Tensors) -> None:
        weight = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = weight.view(torch.uint8).flip(1).contiguous().view(weight.dtype)

    for golden in ("modelopt_llama_fp8", "ct_llama_fp8_dynamic"):
        reading = read_folder(copied(golden, tmp_path, flip))
        faults = list(layout_faults(reading, open_source(GOLDEN / "base_llama")))
        assert [(fault.rule, fault.where) for fault in faults] == [("differs-from-source", name)]


# ---------------------------------------------------------------- what cannot be compared


def test_weights_of_zeros(tmp_path: Path) -> None:
    assert found(tmp_path, torch.zeros(128, 128)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_scales_of_other_rules(tmp_path: Path, value: float) -> None:
    def change(tensors: Tensors, name: str) -> None:
        tensors[f"{name}.weight_scale_2"].fill_(value)

    assert found(tmp_path, drawn(128, 128), change) == []


def test_a_nan_block_scale_hides_nothing(tmp_path: Path) -> None:
    def nan(tensors: Tensors, name: str) -> None:
        tensors[f"{name}.weight_scale"].view(torch.uint8)[3, 2] = 0x7F

    def nan_and_swapped(tensors: Tensors, name: str) -> None:
        nan(tensors, name)
        swap_nibbles(tensors, name)

    assert found(tmp_path, drawn(128, 1024), nan) == []
    assert rules(found(tmp_path, drawn(128, 1024), nan_and_swapped)) == {"swapped-nibbles"}


def test_names_that_the_source_lacks_are_counted(tmp_path: Path) -> None:
    weights = {f"model.layers.{i}.mlp.up_proj": drawn(256, 512, i) for i in range(3)}
    tensors = stored(weights)
    swizzle_scales(tensors, "model.layers.2.mlp.up_proj")
    reading = reading_of(tmp_path, tensors)
    source = source_of(tmp_path, {"model.layers.0.mlp.up_proj": weights["model.layers.0.mlp.up_proj"]})
    notice = layout_notices(reading, source)
    assert len(notice) == 1
    assert "2 of 3 linears were not compared" in notice[0]
    assert "first model.layers.1.mlp.up_proj" in notice[0]
    # they are still looked at by themselves
    assert [fault.where for fault in layout_faults(reading, source)] == ["model.layers.2.mlp.up_proj"]


def test_scales_that_do_not_fit_are_not_compared(tmp_path: Path) -> None:
    tensors = stored({LAYER: drawn(100, 512)})
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"][:50].clone()
    reading = reading_of(tmp_path, tensors)
    source = source_of(tmp_path, {LAYER: drawn(100, 512)})
    assert list(layout_faults(reading, source)) == []
    assert "1 of 1 linears were not compared" in layout_notices(reading, source)[0]


@pytest.mark.parametrize("role", ["weight", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (1, 1, 8), (3, 5)])
def test_tensors_of_any_shape(tmp_path: Path, role: str, shape: tuple[int, ...]) -> None:
    """Reading has named them; here they stop nothing and mean nothing."""
    tensors = stored({LAYER: drawn(128, 128)})
    dtype = tensors[f"{LAYER}.{role}"].dtype
    tensors[f"{LAYER}.{role}"] = torch.ones(shape).to(dtype)
    reading = reading_of(tmp_path, tensors)
    assert "format-mismatch" in {fault.rule for fault in reading.faults}
    assert list(layout_faults(reading, source_of(tmp_path, {LAYER: drawn(128, 128)}))) == []
    assert list(scale_faults(reading)) == []


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    reading = read_folder(GOLDEN / "modelopt_llama_nvfp4")
    calls: list[tuple[str, int, int]] = []
    list(layout_faults(reading, open_source(GOLDEN / "base_llama"), lambda *call: calls.append(call)))
    assert [done for _, done, _ in calls] == list(range(1, 15))
    assert {total for _, _, total in calls} == {14}


def test_decibels() -> None:
    assert decibels(0.01) == pytest.approx(20)
    assert decibels(0) == math.inf


# ---------------------------------------------------------------- farther than its like


def layers(count: int, change: Callable[[Tensors], object], parent: Path, leaf: str = "up_proj") -> list[Fault]:
    """Of a model with a linear a layer."""
    weights = {f"model.layers.{i}.mlp.{leaf}": drawn(64, 256, i, 0.0) for i in range(count)}
    tensors = stored(weights)
    change(tensors)
    return list(layout_faults(reading_of(parent, tensors), source_of(parent, weights)))


def other_scales(tensors: Tensors) -> None:
    """The next layer's block scales."""
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER.replace('.0.', '.1.')}.weight_scale"].clone()


def test_block_scales_of_another_layer(tmp_path: Path) -> None:
    (fault,) = layers(5, other_scales, tmp_path)
    assert (fault.rule, fault.where, fault.is_fatal) == ("far-from-source", LAYER, False)


def test_too_few_layers_tell_nothing(tmp_path: Path) -> None:
    assert layers(3, other_scales, tmp_path) == []


def test_layers_that_are_all_as_far_are_alike(tmp_path: Path) -> None:
    """Trained on, or pruned, after they were quantized."""

    def all_other(tensors: Tensors) -> None:
        scales = [name for name in tensors if name.endswith("weight_scale")]
        tensors.update(zip(scales, [tensors[name] for name in [*scales[1:], scales[0]]], strict=True))

    assert "far-from-source" not in {fault.rule for fault in layers(5, all_other, tmp_path)}


def test_a_layer_of_outliers_is_not_far(tmp_path: Path) -> None:
    weights = {f"model.layers.{i}.mlp.up_proj": drawn(64, 256, i, 0.0) for i in range(5)}
    weights[LAYER][::7, 3] *= 40
    assert list(layout_faults(reading_of(tmp_path, stored(weights)), source_of(tmp_path, weights))) == []
