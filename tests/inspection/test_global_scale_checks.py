"""Directions of second-level scales, and fused groups that disagree. Needs nothing."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockscale.checkpoint.faults import Fault
from blockscale.inspection.checks.global_scales import (
    FP8_WEIGHT,
    INPUT,
    WEIGHT,
    GlobalScale,
    odd_faults,
    reversed_scales,
)
from blockscale.inspection.checks.scales import scale_faults
from blockscale.inspection.reading import read_folder

from .changed_folders import copied

NVFP4, MOE, CT = "modelopt_llama_nvfp4", "modelopt_qwen3moe_nvfp4", "ct_llama_nvfp4"
FP8, MIXED = "modelopt_llama_fp8", "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv"
W4A8 = "modelopt_llama_w4a8_nvfp4_fp8"
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
DOWN, GATE_UP, QKV = f"{MLP}.down_proj", f"{MLP}.gate_proj+up_proj", f"{ATTENTION}.q_proj+k_proj+v_proj"

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]


def found(parent: Path, name: str, change: Change, *, quick: bool = False) -> list[Fault]:
    return list(scale_faults(read_folder(copied(name, parent, change)), quick=quick))


def named(faults: list[Fault]) -> set[tuple[str, str]]:
    return {(fault.rule, fault.where) for fault in faults}


def multiply(name: str, factor: float) -> Change:
    return lambda tensors: tensors.update({name: tensors[name] * factor})


def reverse(*names: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].reciprocal() for name in names})


def reverse_all(ending: str) -> Change:
    return lambda tensors: reverse(*(name for name in tensors if name.endswith(ending)))(tensors)


# ---------------------------------------------------------------- direction, in folders


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (NVFP4, "weight_scale_2"),
        (NVFP4, "input_scale"),
        (CT, "weight_global_scale"),
        (CT, "input_global_scale"),
        (W4A8, "weight_scale_2"),
        (FP8, "weight_scale"),
    ],
)
def test_one_scale_is_reversed(tmp_path: Path, name: str, tensor: str, quick: bool) -> None:
    faults = found(tmp_path, name, reverse(f"{DOWN}.{tensor}"), quick=quick)
    assert named(faults) == {("reversed-global-scale", DOWN)}
    assert not faults[0].is_fatal


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        (NVFP4, ".weight_scale_2"),
        (NVFP4, ".input_scale"),
        (CT, ".weight_global_scale"),
        (CT, ".input_global_scale"),
        (MOE, ".weight_scale_2"),
        (MOE, ".input_scale"),
        (W4A8, ".input_scale"),
        (FP8, ".input_scale"),
    ],
)
def test_all_scales_are_reversed(tmp_path: Path, name: str, ending: str) -> None:
    faults = found(tmp_path, name, reverse_all(ending))
    linears = read_folder(tmp_path / name).model.linears  # type: ignore[union-attr]
    assert named(faults) == {("reversed-global-scale", linear) for linear in linears}


def test_one_of_a_group_is_reversed(tmp_path: Path) -> None:
    """It is no mismatch of its group as well: once it is the right way round, they agree."""
    name = f"{ATTENTION}.k_proj"
    faults = found(tmp_path, NVFP4, reverse(f"{name}.weight_scale_2", f"{name}.input_scale"))
    assert named(faults) == {("reversed-global-scale", name)}
    assert faults[0].message.count("is the reciprocal of q_proj's") == 2


def test_a_scheme_of_one_level_is_not_reversed(tmp_path: Path) -> None:
    """A global scale of 10 speaks of weights up to 26880, but the block scales use little of their range."""

    def one_level(tensors: Tensors) -> None:
        block = tensors[f"{DOWN}.weight_scale"].float() * tensors[f"{DOWN}.weight_scale_2"]
        tensors[f"{DOWN}.weight_scale"] = block.clamp(min=2.0**-9).to(torch.float8_e4m3fn)
        tensors[f"{DOWN}.weight_scale_2"] = torch.tensor(10.0)

    assert named(found(tmp_path, NVFP4, one_level)) == {("subnormal-block-scales", DOWN)}


# ---------------------------------------------------------------- direction, by magnitude


def inputs(amaxes: list[float], unscaled_max: float = 2688.0) -> list[GlobalScale]:
    scales = [amax / unscaled_max for amax in amaxes]
    return [GlobalScale(f"layers.{i}.down_proj", INPUT, m, m, unscaled_max) for i, m in enumerate(scales)]


def is_reversed(scales: list[GlobalScale]) -> list[bool]:
    marked = reversed_scales(scales, lambda linear: None)
    return [scale in marked for scale in scales]


@given(st.floats(-8, 3).map(lambda e: 10.0**e), st.sampled_from([(2688.0, 2688.0), (1536.0, 2688.0), (448.0, 448.0)]))
def test_weights_of_any_size_stand_the_right_way(amax: float, ranges: tuple[float, float]) -> None:
    """Four over six divides by 1536, W4A8 by 448."""
    multiplier = amax / ranges[0]
    # a multiplier of 1536ths speaks of nearly twice the weight's size
    assert is_reversed([GlobalScale("down_proj", WEIGHT, multiplier, multiplier, ranges[1])]) == [False]


@given(st.floats(-8, 2).map(lambda e: 10.0**e), st.sampled_from([WEIGHT, FP8_WEIGHT]), st.sampled_from([2688.0, 448.0]))
def test_weights_of_any_size_stand_the_wrong_way(amax: float, kind: str, unscaled_max: float) -> None:
    multiplier = unscaled_max / amax
    assert is_reversed([GlobalScale("down_proj", kind, multiplier, multiplier, unscaled_max)]) == [True]


@given(st.lists(st.floats(-6, math.log10(2e5)).map(lambda e: 10.0**e), min_size=1, max_size=7))
def test_few_inputs_of_any_size(amaxes: list[float]) -> None:
    """Unless all of them are massive."""
    expected = len(amaxes) > 2 and min(amaxes) > 3e4
    assert any(is_reversed(inputs(amaxes))) == expected


@given(
    st.lists(st.floats(-2, 3).map(lambda e: 10.0**e), min_size=20, max_size=40),
    st.lists(st.floats(3, 5).map(lambda e: 10.0**e), max_size=15),
    st.sampled_from([2688.0, 448.0]),
)
def test_massive_activations_among_usual_ones(usual: list[float], massive: list[float], unscaled_max: float) -> None:
    assert not any(is_reversed(inputs(usual + massive, unscaled_max)))


@given(st.integers(1, 40))
def test_every_layer_has_massive_activations(count: int) -> None:
    assert not any(is_reversed(inputs([2e4] * count)))


@given(st.lists(st.floats(-2, 2).map(lambda e: 10.0**e), min_size=8, max_size=40))
def test_all_inputs_stand_the_wrong_way(amaxes: list[float]) -> None:
    assert all(is_reversed(inputs([2688.0**2 / amax for amax in amaxes])))


@given(st.lists(st.floats(0.1, 1.5).map(lambda e: 10.0**e), min_size=10, max_size=40), st.integers(0, 9))
def test_one_input_among_good_ones_may_stand_the_wrong_way(amaxes: list[float], which: int) -> None:
    """All within a factor of 30 of the median, as one that is to be told from a massive activation must be. Beyond a
    million none is taken for an activation."""
    amaxes[which] = 2688.0**2 / amaxes[which]
    is_sure = amaxes[which] > 1e6
    scales = inputs(amaxes)
    assert is_reversed(scales) == [is_sure and i == which for i in range(len(amaxes))]
    odd = [fault.where for fault in odd_faults(scales, reversed_scales(scales, lambda linear: None))]
    assert odd == ([] if is_sure else [scales[which].where])


@pytest.mark.parametrize(
    ("names", "is_told"),
    [
        (["self_attn.q_proj", "self_attn.k_proj"], True),
        (["mlp.experts.0.up_proj", "mlp.experts.1.gate_proj"], True),
        (["mlp.experts.0.down_proj", "mlp.experts.1.down_proj"], False),  # each has its own activations
        (["mlp.down_proj", "self_attn.o_proj"], False),
    ],
)
def test_what_sees_the_same_input_tells(names: list[str], is_told: bool) -> None:
    others = inputs([5.0] * 12)
    odd, good = (
        GlobalScale(f"layers.20.{name}", INPUT, amax / 2688, amax / 2688, 2688.0)
        for name, amax in zip(names, (3e5, 7.0), strict=True)
    )
    scales = [*others, odd, good]
    backwards = reversed_scales(scales, lambda linear: None)
    assert list(backwards) == ([odd] if is_told else [])
    assert [fault.where for fault in odd_faults(scales, backwards)] == ([] if is_told else [odd.where])


def test_massive_activations_of_a_whole_group_are_left_alone() -> None:
    group = [GlobalScale(f"layers.20.{n}_proj", INPUT, 3e5 / 2688, 3e5 / 2688, 2688.0) for n in ("q", "k", "v")]
    assert not any(is_reversed([*inputs([5.0] * 12), *group]))


def test_a_global_scale_of_one_on_both_sides() -> None:
    """Each is the other's reciprocal, and their own."""
    scales = [GlobalScale(f"a.{leaf}_proj", WEIGHT, m, m, 2688.0) for leaf, m in (("gate", 1.0), ("up", 1.01))]
    assert is_reversed(scales) == [False, False]


# ---------------------------------------------------------------- fused groups


@pytest.mark.parametrize(
    ("name", "tensor", "group"),
    [
        (NVFP4, f"{MLP}.up_proj.weight_scale_2", GATE_UP),
        (NVFP4, f"{ATTENTION}.k_proj.weight_scale_2", QKV),
        (CT, f"{ATTENTION}.v_proj.weight_global_scale", QKV),
        (W4A8, f"{MLP}.gate_proj.weight_scale_2", GATE_UP),
        (MOE, f"{MLP}.experts.2.up_proj.weight_scale_2", f"{MLP}.experts.2.gate_proj+up_proj"),
    ],
)
@pytest.mark.parametrize("factor", [10.0, 1.25, 1 + 2**-22])
def test_global_scales_differ(tmp_path: Path, name: str, tensor: str, group: str, factor: float) -> None:
    for quick in (True, False):
        parent = tmp_path / str(quick)
        parent.mkdir()
        faults = found(parent, name, multiply(tensor, factor), quick=quick)
        assert named(faults) == {("fused-global-scale-mismatch", group)}
        assert f"{factor:.3g} times apart" in faults[0].message or "last bits" in faults[0].message


def test_w1_and_w3_are_fused(tmp_path: Path) -> None:
    """Mixtral's names for gate and up."""

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            new = name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")
            tensors[new] = tensors.pop(name)
        tensors[f"{MLP}.experts.1.w3.weight_scale_2"] *= 2
        tensors[f"{MLP}.experts.1.w2.weight_scale_2"] *= 2

    assert named(found(tmp_path, MOE, rename)) == {("fused-global-scale-mismatch", f"{MLP}.experts.1.w1+w3")}


def test_experts_do_not_share(tmp_path: Path) -> None:
    names = [f"{MLP}.experts.2.{leaf}.weight_scale_2" for leaf in ("gate_proj", "up_proj")]
    assert found(tmp_path, MOE, lambda t: t.update({name: t[name] * 2 for name in names})) == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [(NVFP4, "input_scale"), (CT, "input_global_scale"), (FP8, "input_scale"), (MIXED, "input_scale")],
)
def test_input_scales_differ(tmp_path: Path, name: str, tensor: str) -> None:
    faults = found(tmp_path, name, multiply(f"{ATTENTION}.q_proj.{tensor}", 1.5))
    assert named(faults) == {("fused-input-scale-mismatch", QKV)}
    assert "1.5 times apart" in faults[0].message


def test_fp8_weights_keep_their_own_scales(tmp_path: Path) -> None:
    assert found(tmp_path, FP8, multiply(f"{ATTENTION}.q_proj.weight_scale", 1.5)) == []


def test_a_bad_scale_is_not_compared(tmp_path: Path) -> None:
    faults = found(tmp_path, NVFP4, lambda t: t[f"{MLP}.up_proj.weight_scale_2"].fill_(math.nan))
    assert named(faults) == {("bad-global-scale", f"{MLP}.up_proj")}
