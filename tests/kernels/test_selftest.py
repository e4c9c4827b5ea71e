"""Self-tests find kernels that are wrong, and say so without stopping. Needs nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockscale.kernels.device import describe
from blockscale.kernels.experts import GatedActivation
from blockscale.kernels.reference import attention as plain_attention
from blockscale.kernels.reference import linear as plain_linear
from blockscale.kernels.reference import moe as plain_moe
from blockscale.kernels.reference import quantize as plain_quantize
from blockscale.kernels.select import Choice, Kernel, Mode, Op, usable
from blockscale.kernels.selftest import attention, linear, moe, outcome, quantize, run
from blockscale.kernels.selftest.outcome import Mismatch, check_equal, check_near

CPU = torch.device("cpu")


def torch_choice(op: Op) -> Choice:
    return next(c for c in usable(op, describe("cpu")) if c.kernel is Kernel.TORCH)


@pytest.mark.parametrize("op", Op)
def test_plain_torch_passes_every_test(op: Op) -> None:
    verdict = run._verdict(torch_choice(op), describe("cpu"), CPU)
    assert (verdict.self_test, verdict.choice.mode) == ("passed", Mode.REFERENCE), verdict.detail
    assert "cases" in verdict.detail


def test_every_op_has_a_test() -> None:
    assert set(run._TESTS) == set(Op)


def with_one_bit_more(y: Tensor) -> Tensor:
    """The last element is the next larger number of its dtype."""
    bits = y.clone().view(torch.int16)
    bits[-1, -1] += 1
    return bits.view(y.dtype)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w, b: with_one_bit_more(plain_linear.linear_w4a16(x, w, b)),
        lambda x, w, b: plain_linear.linear_w4a16(x, w),  # no bias
        lambda x, w, b: plain_linear.linear_w4a8(x, w, b),  # twice rounded
        lambda x, w, b: plain_linear.linear_w4a16(x.contiguous().roll(1, -1), w, b),
        lambda x, w, b: plain_linear.linear_w4a16(x, w, b).fill_(torch.nan),
        lambda x, w, b: plain_linear.linear_w4a16(x, w, b).float(),
    ],
)
def test_a_wrong_linear_fails(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(linear, "launcher", lambda op, kernel: wrong)
    with pytest.raises(Mismatch, match=r"nvfp4, bfloat16, M = 1"):
        linear.test_linear(torch_choice(Op.LINEAR_W4A16), CPU)


def test_w4a4_without_rounding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "launcher", lambda op, kernel: plain_linear.linear_w4a16)
    with pytest.raises(Mismatch, match="rounding explains"):
        linear.test_linear(torch_choice(Op.LINEAR_W4A4), CPU)


def test_w4a8_of_six_bits_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(x: Tensor, w: Any, b: Tensor | None) -> Tensor:
        step = x.float().abs().amax(1, keepdim=True) / 4
        return plain_linear.linear_w4a16(((x / step).round() * step).to(x.dtype), w, b)

    monkeypatch.setattr(linear, "launcher", lambda op, kernel: coarse)
    with pytest.raises(Mismatch):
        linear.test_linear(torch_choice(Op.LINEAR_W4A8), CPU)


def changed(result: tuple[Tensor, ...], index: int) -> tuple[Tensor, ...]:
    result[index].view(torch.uint8).reshape(-1)[77] ^= 1
    return result


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("op", [Op.QUANTIZE_NVFP4, Op.HADAMARD_QUANTIZE, Op.QUANTIZE_WEIGHT_SWEEP])
def test_one_bit_of_a_quantizer_fails(monkeypatch: pytest.MonkeyPatch, op: Op, index: int) -> None:
    right = quantize.launcher(op, Kernel.TORCH)
    monkeypatch.setattr(quantize, "launcher", lambda *_: lambda *a, **k: changed(right(*a, **k), index))
    with pytest.raises(Mismatch, match="bytes differ"):
        quantize.test_quantizer(torch_choice(op), CPU)


@pytest.mark.parametrize("op", [Op.RMS_NORM_QUANTIZE, Op.SILU_MUL_QUANTIZE])
def test_a_fused_quantizer_that_leaves_something_out_fails(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    def no_weight(x: Tensor, w: Tensor, s: Tensor, **options: Any) -> tuple[Tensor, ...]:
        made = plain_quantize.quantize_nvfp4(x, s)
        return made[0], made[1], x

    monkeypatch.setattr(quantize, "launcher", lambda *_: no_weight)
    with pytest.raises(Mismatch, match="plain torch"):
        quantize.test_quantizer(torch_choice(op), CPU)


def test_a_cache_writer_that_swaps_its_operands_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantize.launcher(Op.QUANTIZE_KV, Kernel.TORCH)
    monkeypatch.setattr(quantize, "launcher", lambda *_: lambda c, k, v, s: right(c, v, k, s))
    with pytest.raises(Mismatch):
        quantize.test_quantizer(torch_choice(Op.QUANTIZE_KV), CPU)


def test_a_layer_of_experts_with_another_gate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*operands: Any, activation: GatedActivation, **options: Any) -> Tensor:
        other = GatedActivation(activation.alpha * 1.05, activation.beta, activation.limit, activation.is_interleaved)
        return plain_moe.moe_w4a16(*operands, activation=other, **options)

    monkeypatch.setattr(moe, "launcher", lambda kernel: wrong)
    with pytest.raises(Mismatch, match="rounding explains"):
        moe.test_moe(torch_choice(Op.MOE_W4A16), CPU)


@pytest.mark.parametrize("op", [Op.ATTENTION_DECODE, Op.ATTENTION_PREFILL])
@pytest.mark.parametrize("left_out", ["window", "softcap", "sinks"])
def test_attention_that_leaves_something_out_fails(monkeypatch: pytest.MonkeyPatch, op: Op, left_out: str) -> None:
    right = plain_attention.attention_decode if op is Op.ATTENTION_DECODE else plain_attention.attention_prefill

    def wrong(*operands: Any, **options: Any) -> Tensor:
        return right(*operands, **{name: value for name, value in options.items() if name != left_out})

    monkeypatch.setattr(attention, "launcher", lambda *_: wrong)
    with pytest.raises(Mismatch, match=r"16-bit, \{'window'"):
        attention.test_attention(torch_choice(op), CPU)


def test_a_kernel_that_does_not_run_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(op: Op, kernel: Kernel) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(linear, "launcher", broken)
    verdict = run._verdict(torch_choice(Op.LINEAR_W4A16), describe("cpu"), CPU)
    assert (verdict.self_test, verdict.detail) == ("failed", "RuntimeError: no such instruction")
    assert verdict.to_dict()["op"] == "linear_w4a16"


def test_comparisons_see_what_they_should() -> None:
    a = torch.tensor([0.0, 1.0])
    check_equal("a", a, a.clone())
    for other in (torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0], dtype=torch.float64), torch.zeros(1)):
        with pytest.raises(Mismatch):
            check_equal("a", other, a)
    bound = torch.full((2,), 0.5)
    assert check_near("a", a + 0.25, a.double(), bound) == 0.5
    for other in (a + 0.6, torch.tensor([torch.nan, 1.0]), torch.zeros(3)):
        with pytest.raises(Mismatch):
            check_near("a", other, a.double(), bound)
    for dtype, half in outcome.HALF_UNIT.items():
        assert half == torch.finfo(dtype).eps / 2


def test_kernels_that_share_a_layout_are_all_tested() -> None:
    served = [c.kernel for c in run.serving(Op.LINEAR_W4A16, describe("cpu"))]
    assert len(served) == 1
    verdicts = list(run.self_test(is_run=False))
    assert {v.choice.op for v in verdicts} == set(Op)
    assert {v.self_test for v in verdicts} == {"not run"}
