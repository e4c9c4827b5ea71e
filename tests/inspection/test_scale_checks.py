"""Faults of scales: each found on its layer and alone, and none on good checkpoints. Needs nothing."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockscale.checkpoint.faults import Fault
from blockscale.formats.spec import E4M3, ScaleType
from blockscale.inspection.census import Census, scale_value
from blockscale.inspection.checks.scales import headroom, scale_faults
from blockscale.inspection.reading import read_folder

from .changed_folders import copied, golden_names, written

NVFP4, CT = "modelopt_llama_nvfp4", "ct_llama_nvfp4"
FP8, FP8_ROWS, MXFP4 = "modelopt_llama_fp8", "ct_llama_fp8_dynamic", "ct_llama_mxfp4"
W4A8 = "modelopt_llama_w4a8_nvfp4_fp8"
AWQ, KV, CT_KV = "modelopt_llama_nvfp4_awq_lite", "modelopt_llama_nvfp4_fp8kv", "ct_llama_nvfp4_fp8kv"
ATTENTION, DOWN = "model.layers.1.self_attn", "model.layers.1.mlp.down_proj"

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]


def found(parent: Path, name: str, change: Change, *, quick: bool = False) -> list[Fault]:
    return list(scale_faults(read_folder(copied(name, parent, change)), quick=quick))


def named(faults: list[Fault]) -> list[tuple[str, str]]:
    return [(fault.rule, fault.where) for fault in faults]


def fill(name: str, value: float) -> Change:
    return lambda tensors: tensors.update({name: torch.full_like(tensors[name], value)})


def as_bytes(tensors: Tensors, name: str) -> Tensor:
    return tensors[name].view(torch.uint8)


# ---------------------------------------------------------------- good ones


@pytest.mark.parametrize("name", golden_names())
@pytest.mark.parametrize("quick", [False, True])
def test_the_peers_scales_are_good(name: str, quick: bool, golden_checkpoint: Callable[[str], Path]) -> None:
    assert named(list(scale_faults(read_folder(golden_checkpoint(name)), quick=quick))) == []


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-sweep", "nvfp4-w4a16", "mxfp4", "fp8"])
def test_our_scales_are_good(
    recipe: str, dialect: str, tiny_model: Callable[[str], Path], calibration_text: Path, tmp_path: Path
) -> None:
    from blockscale import api

    texts = [calibration_text] if recipe.startswith("nvfp4") and "w4a16" not in recipe else []
    api.quantize(
        tiny_model("llama"), tmp_path / "q", recipe, calibration=texts, max_calibration_tokens=256, dialect=dialect
    )
    assert named(list(scale_faults(read_folder(tmp_path / "q")))) == []


def test_block_scales_that_peers_give_to_blocks_of_zeros(tmp_path: Path) -> None:
    """1 (Model Optimizer), 0.125 (compressed-tensors), 2^-6 (torchao), 0 (others): over zeros all are right."""
    for i, byte in enumerate((0x38, 0x20, 0x08, 0x00)):

        def zeros(tensors: Tensors, byte: int = byte) -> None:
            tensors[f"{DOWN}.weight"].zero_()
            as_bytes(tensors, f"{DOWN}.weight_scale").fill_(byte)

        folder = tmp_path / str(i)
        folder.mkdir()
        assert named(found(folder, NVFP4, zeros)) == []


def test_negative_zeros_are_zeros(tmp_path: Path) -> None:
    """Model Optimizer's MXFP4 writes exact zeros as code 8, here over the smallest scale."""

    def zeros(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_packed"].fill_(0x88)
        as_bytes(tensors, f"{DOWN}.weight_scale").zero_()

    assert named(found(tmp_path, MXFP4, zeros)) == []


# ---------------------------------------------------------------- block scales


@pytest.mark.parametrize(("byte", "value"), [(0x7F, "0x7F"), (0xFF, "0xFF")])
def test_nan(tmp_path: Path, byte: int, value: str) -> None:
    faults = found(tmp_path, CT, lambda t: as_bytes(t, f"{DOWN}.weight_scale")[3, 5].fill_(byte))
    assert named(faults) == [("nan-block-scale", DOWN)]
    assert f"1 of 512 block scales are NaN (1 x {value}), first at [3, 5]" in faults[0].message


def test_nan_of_e8m0(tmp_path: Path) -> None:
    faults = found(tmp_path, MXFP4, lambda t: as_bytes(t, f"{DOWN}.weight_scale")[9, 1].fill_(255))
    assert named(faults) == [("nan-block-scale", DOWN)]
    assert "first at [9, 1]" in faults[0].message


@pytest.mark.parametrize("byte", [0x80, 0x81, 0xB8, 0xFE])
def test_sign_bit(tmp_path: Path, byte: int) -> None:
    faults = found(tmp_path, NVFP4, lambda t: as_bytes(t, f"{DOWN}.weight_scale")[2, 0].fill_(byte))
    assert named(faults) == [("negative-block-scale", DOWN)]
    assert "first at [2, 0]" in faults[0].message


def test_e8m0_has_no_sign(tmp_path: Path) -> None:
    assert named(found(tmp_path, MXFP4, lambda t: as_bytes(t, f"{DOWN}.weight_scale")[2, 0].fill_(0x81))) == []


@pytest.mark.parametrize("name", [NVFP4, CT, W4A8, MXFP4])
def test_zeros_over_codes(tmp_path: Path, name: str) -> None:
    faults = found(tmp_path, name, lambda t: as_bytes(t, f"{DOWN}.weight_scale")[20:].zero_())
    assert named(faults) == [("zero-block-scales", DOWN)]
    assert not faults[0].is_fatal


def test_a_few_zeros_over_codes(tmp_path: Path) -> None:
    """fouroversix lets the scales of tiny blocks underflow and saturates their codes."""
    assert named(found(tmp_path, NVFP4, lambda t: as_bytes(t, f"{DOWN}.weight_scale")[:8].zero_())) == []


@pytest.mark.parametrize(("name", "suffix"), [(NVFP4, "weight_scale_2"), (CT, "weight_global_scale")])
def test_one_level(tmp_path: Path, name: str, suffix: str) -> None:
    def one_level(tensors: Tensors) -> None:
        scale = tensors[f"{DOWN}.{suffix}"]
        multiplier = scale if suffix == "weight_scale_2" else 1 / scale
        block = (tensors[f"{DOWN}.weight_scale"].float() * multiplier).clamp(min=2.0**-9)
        tensors[f"{DOWN}.weight_scale"] = block.to(torch.float8_e4m3fn)
        tensors[f"{DOWN}.{suffix}"] = torch.ones_like(scale)

    faults = found(tmp_path, name, one_level)
    assert named(faults) == [("subnormal-block-scales", DOWN)]
    assert "100% of the block scales" in faults[0].message
    assert "32768 times as large as it need be" in faults[0].message


def subnormal(*, largest: int, codes: int, byte: int = 3) -> Change:
    """Most block scales subnormal, one as large as given, all codes the same."""

    def change(tensors: Tensors) -> None:
        scale = as_bytes(tensors, f"{DOWN}.weight_scale")
        scale.fill_(byte)
        scale[0, 0] = largest
        tensors[f"{DOWN}.weight"].fill_(codes)

    return change


def test_one_block_dwarfs_the_others(tmp_path: Path) -> None:
    faults = found(tmp_path, NVFP4, subnormal(largest=0x7E, codes=0x11))
    assert named(faults) == [("subnormal-block-scales", DOWN)]
    assert "the others have no room" in faults[0].message


def test_one_block_among_next_to_nothing(tmp_path: Path) -> None:
    """A pruned weight: the scales of its empty blocks are clamped to the smallest number."""
    assert named(found(tmp_path, NVFP4, subnormal(largest=0x7E, codes=0x00, byte=1))) == []


@given(st.lists(st.integers(0, 0x7E), min_size=1, max_size=20))
def test_headroom_is_the_largest_power_of_two(stored: list[int]) -> None:
    shift = headroom(Census(ScaleType.E4M3, tuple(stored.count(byte) for byte in range(256))))
    values = [scale_value(ScaleType.E4M3, byte) for byte in stored]
    assert math.frexp(shift)[0] == 0.5
    assert max(values) * shift <= E4M3.max
    assert max(values) * shift * 2 > E4M3.max or max(values) == 0


# ---------------------------------------------------------------- codes tell


def zero_as_nan(codes: int) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"].fill_(codes)
        as_bytes(tensors, f"{DOWN}.weight_scale").fill_(0xFF)
        tensors[f"{DOWN}.weight_scale_2"].zero_()

    return change


@pytest.mark.parametrize("codes", [0x77, 0xFF, 0x7F, 0x00, 0x88])
def test_zero_weight_as_nan(tmp_path: Path, codes: int) -> None:
    assert named(found(tmp_path, NVFP4, zero_as_nan(codes))) == [("zero-weight-as-nan", DOWN)]


@pytest.mark.parametrize("scale", [0x00, 0x38])
def test_zero_codes_below_a_global_scale_of_zero(tmp_path: Path, scale: int) -> None:
    def change(tensors: Tensors) -> None:
        zero_as_nan(0x00)(tensors)
        as_bytes(tensors, f"{DOWN}.weight_scale").fill_(scale)

    assert named(found(tmp_path, NVFP4, change)) == [("zero-weight-as-nan", DOWN)]


def test_codes_below_a_global_scale_of_zero_were_a_weight(tmp_path: Path) -> None:
    faults = found(tmp_path, NVFP4, lambda tensors: tensors[f"{DOWN}.weight_scale_2"].zero_())
    assert named(faults) == [("bad-global-scale", DOWN)]


def test_other_codes_below_nan_were_a_weight(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        zero_as_nan(0x77)(tensors)
        tensors[f"{DOWN}.weight"][5, 5] = 0x75

    assert named(found(tmp_path, NVFP4, change)) == [("bad-global-scale", DOWN), ("nan-block-scale", DOWN)]


def test_quick_reads_no_block_scales(tmp_path: Path) -> None:
    assert named(found(tmp_path, NVFP4, zero_as_nan(0x77), quick=True)) == [("bad-global-scale", DOWN)]


STACK = "model.layers.0.feed_forward.experts.down_proj"


def zeros_in_a_stack(parent: Path, change: Change) -> list[Fault]:
    """Model Optimizer's experts [E, K, N] with K = 64: of each expert, all scales but those of a quarter of K are 0."""
    generator = torch.Generator().manual_seed(2)
    scale = torch.full((2, 4, 48), 2.0).to(torch.float8_e4m3fn)
    scale.view(torch.uint8)[:, 1:] = 0
    tensors = {
        STACK: torch.randint(1, 8, (2, 32, 48), generator=generator, dtype=torch.uint8),
        f"{STACK}_weight_scale": scale,
        f"{STACK}_weight_scale_2": torch.tensor(1e-4),
    }
    change(tensors)
    settings = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16}
    return list(scale_faults(read_folder(written(parent / "stack", tensors, {"quantization_config": settings}))))


def test_zeros_over_codes_in_a_stack(tmp_path: Path) -> None:
    faults = zeros_in_a_stack(tmp_path, lambda tensors: None)
    assert named(faults) == [("zero-block-scales", STACK)]
    assert "288 of 384" in faults[0].message


def test_blocks_of_a_stack_run_along_its_middle(tmp_path: Path) -> None:
    """Eight bytes along K are a block: those whose scale is not zero are the only ones with codes."""
    assert zeros_in_a_stack(tmp_path, lambda tensors: tensors[STACK][:, 8:].zero_()) == []


# ---------------------------------------------------------------- scales that stand alone


@pytest.mark.parametrize("value", [0.0, -0.0, -1e-5, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "tensor", "where"),
    [
        (NVFP4, f"{DOWN}.weight_scale_2", DOWN),
        (NVFP4, f"{DOWN}.input_scale", DOWN),
        (CT, f"{DOWN}.weight_global_scale", DOWN),
        (CT, f"{DOWN}.input_global_scale", DOWN),
        (KV, f"{ATTENTION}.k_proj.k_scale", ATTENTION),
        (CT_KV, f"{ATTENTION}.v_scale", ATTENTION),
        (FP8, f"{DOWN}.weight_scale", DOWN),
    ],
)
def test_bad_values(tmp_path: Path, name: str, tensor: str, where: str, value: float) -> None:
    for quick in (True, False):
        parent = tmp_path / str(quick)
        parent.mkdir()
        assert named(found(parent, name, fill(tensor, value), quick=quick)) == [("bad-global-scale", where)]


def test_both_scales_of_a_layer_make_one_fault(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale_2"].fill_(math.nan)
        tensors[f"{DOWN}.input_scale"].fill_(0)

    faults = found(tmp_path, NVFP4, change)
    assert named(faults) == [("bad-global-scale", DOWN)]
    assert "global scale nan and input scale 0" in faults[0].message


@pytest.mark.parametrize("value", [1e-40, 1e-45, 2e38])
@pytest.mark.parametrize(
    ("name", "tensor"), [(NVFP4, "weight_scale_2"), (CT, "input_global_scale"), (FP8, "weight_scale")]
)
def test_denormal(tmp_path: Path, name: str, tensor: str, value: float) -> None:
    assert named(found(tmp_path, name, fill(f"{DOWN}.{tensor}", value))) == [("denormal-global-scale", DOWN)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_bad_scale_of_a_row(tmp_path: Path, value: float) -> None:
    faults = found(tmp_path, FP8_ROWS, lambda t: t[f"{DOWN}.weight_scale"][7].fill_(value))
    assert named(faults) == [("bad-global-scale", DOWN)]
    assert "at 7" in faults[0].message


def test_a_row_of_zeros_may_have_a_scale_of_zero(tmp_path: Path) -> None:
    assert named(found(tmp_path, FP8_ROWS, lambda t: t[f"{DOWN}.weight_scale"][7].zero_())) == []


def test_bad_pre_quant_scale(tmp_path: Path) -> None:
    module = f"{ATTENTION}.o_proj"
    faults = found(tmp_path, AWQ, lambda t: t[f"{module}.pre_quant_scale"][3].fill_(math.nan))
    assert named(faults) == [("bad-global-scale", module)]


def test_scales_of_sources(tmp_path: Path) -> None:
    """FP8 tiles and gpt-oss' MXFP4 are no dialect of this program, but have scales."""
    tiles = torch.ones(2, 2)
    tiles[1, 0] = math.nan
    fp8 = {"a.weight": torch.zeros(256, 256).to(torch.float8_e4m3fn), "a.weight_scale_inv": tiles}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert named(list(scale_faults(read_folder(written(tmp_path / "fp8", fp8, config))))) == [("bad-global-scale", "a")]
    scales = torch.full((2, 4, 2), 120, dtype=torch.uint8)
    scales[1, 2, 1] = 255
    mxfp4 = {"e.down_proj_blocks": torch.zeros(2, 4, 2, 16, dtype=torch.uint8), "e.down_proj_scales": scales}
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    faults = list(scale_faults(read_folder(written(tmp_path / "mxfp4", mxfp4, config))))
    assert named(faults) == [("nan-block-scale", "e.down_proj")]
    assert "first at [1, 2, 1]" in faults[0].message


def test_a_file_that_goes_away_is_a_fault(tmp_path: Path) -> None:
    reading = read_folder(copied(NVFP4, tmp_path))
    (tmp_path / NVFP4 / "model.safetensors").unlink()
    assert [fault.rule for fault in scale_faults(reading)] == ["unreadable-file"]


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    reading = read_folder(copied(NVFP4, tmp_path))
    calls: list[tuple[str, int, int]] = []
    list(scale_faults(reading, progress=lambda *call: calls.append(call)))
    assert len(calls) == 14
    assert calls[-1][1] == calls[-1][2]
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
