"""RMSNorm, gated activations and Hadamard rotation with NVFP4 behind them, in Triton's interpreter.

What is quantized is compared with float64, and the bytes with those of `formats` for what was quantized.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from blockscale.algorithms.hadamard import rotate
from blockscale.errors import FormatError
from blockscale.formats.layout import swizzle
from blockscale.formats.tensor import FLOAT_DTYPES
from tests.kernels.interpreter import interpreted
from tests.kernels.test_triton_quantize import assert_same, expected, sample

norms = interpreted("blockscale.kernels.triton.norm_quantize")
gates = interpreted("blockscale.kernels.triton.silu_quantize")
rotations = interpreted("blockscale.kernels.triton.hadamard_quantize")

SCALE = torch.tensor(2e-3)
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
FP32_STEPS = 2.0**-18  # relative error of some ten fp32 operations, and of exp of up to 32 rounded to fp32


def assert_rounded(got: Tensor, exact: Tensor, num_roundings: int) -> None:
    """`got` is float64 `exact` after so many roundings to got's dtype, and a few of fp32."""
    step = torch.finfo(got.dtype).smallest_normal  # below it relative errors are larger
    bound = (num_roundings * HALF_ULP[got.dtype] * 1.01 + FP32_STEPS) * exact.abs() + step
    assert ((got.double() - exact).abs() <= bound).all()


def rms_norm(h: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    h = h.double()
    return h / (h.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm(dtype: torch.dtype, unit_offset: bool, has_residual: bool) -> None:
    x, weight = sample(2, 3, 272, dtype=dtype), sample(272, dtype=dtype, seed=1)
    residual = sample(2, 3, 272, dtype=dtype, seed=2) if has_residual else None
    got = norms.rms_norm_quantize(
        x, weight, SCALE, epsilon=1e-5, residual=residual, unit_offset=unit_offset, keep_normed=True
    )
    h = x if residual is None else x + residual
    factor = 1 + weight.double() if unit_offset else weight
    assert_rounded(got.normed, rms_norm(h, factor, 1e-5), 1 if unit_offset else 2)
    assert (got.residual is None) if residual is None else torch.equal(got.residual, h)
    assert_same((got.packed, got.block_scale), expected(got.normed, SCALE))


def test_norm_of_rows_longer_than_a_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_MOST_BLOCKS", 4)
    x, weight, residual = sample(2, 144), sample(144, seed=1), sample(2, 144, seed=2)
    got = norms.rms_norm_quantize(x, weight, SCALE, residual=residual, keep_normed=True, four_over_six=True)
    assert_rounded(got.normed, rms_norm(x + residual, weight, 1e-6), 2)
    assert torch.equal(got.residual, x + residual)
    assert_same((got.packed, got.block_scale), expected(got.normed, SCALE, four_over_six=True))


def test_norm_of_strided_rows_with_swizzled_scales() -> None:
    wide, weight = sample(3, 96), sample(32, seed=1)
    x, residual = wide[:, :32], wide[:, 32:64]
    got = norms.rms_norm_quantize(x, weight, SCALE, residual=residual, swizzled=True, keep_normed=True)
    packed, block_scale = expected(got.normed, SCALE)
    assert_same((got.packed, got.block_scale), (packed, swizzle(block_scale)))
    alone = norms.rms_norm_quantize(x.contiguous(), weight, SCALE, residual=residual.contiguous())
    assert torch.equal(alone.packed, got.packed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_of_a_norm_is_nan_and_the_others_are_not(bad: float) -> None:
    x = sample(2, 64)
    x[1, 40] = bad
    got = norms.rms_norm_quantize(x, torch.ones(64), SCALE)
    codes = got.block_scale.view(torch.uint8)
    # Inf / Inf is NaN; the rest of an infinite row is 0, as in bf16
    assert codes[1].tolist() == ([0x7F] * 4 if bad != bad else [0x38, 0x38, 0x7F, 0x38])
    assert (codes[0] != 0x7F).all()


def activation_of(name: str, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.double(), up.double()
    if name == "silu":
        return silu(gate) * up
    if name == "gelu_tanh":
        exact = gate * torch.sigmoid((8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))  # 1 + tanh would cancel
        assert torch.allclose(exact, gelu(gate, approximate="tanh"), rtol=0, atol=1e-14)
        return exact * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("activation", gates.Gate)
@pytest.mark.parametrize("arrangement", ["halves", "interleaved", "apart"])
def test_gated_activation(dtype: torch.dtype, activation: object, arrangement: str) -> None:
    both = sample(2, 3, 160, dtype=dtype, scale=1.5)
    gate, up = (both[..., ::2], both[..., 1::2]) if arrangement == "interleaved" else both.chunk(2, dim=-1)
    if arrangement == "apart":
        gate, up = gate.contiguous(), up.transpose(0, 1).contiguous().transpose(0, 1)
    activated = torch.empty(2, 3, 80, dtype=dtype)
    got = gates.silu_mul_quantize(gate, up, SCALE, activation=activation, activated=activated)
    num_roundings = 1 if activation.value == "clamped" else 2
    assert_rounded(activated, activation_of(activation.value, gate, up), num_roundings)
    assert_same(got, expected(activated, SCALE))


def test_interleaved_rows_that_no_view_covers() -> None:
    both = sample(4, 3, 64).transpose(0, 1)
    gate, up = both[..., ::2], both[..., 1::2]
    want = gates.silu_mul_quantize(gate.contiguous(), up.contiguous(), SCALE)
    assert_same(gates.silu_mul_quantize(gate, up, SCALE), want)
    swapped = gates.silu_mul_quantize(up, gate, SCALE)
    assert_same(swapped, gates.silu_mul_quantize(up.contiguous(), gate.contiguous(), SCALE))


@pytest.mark.parametrize("activation", gates.Gate)
def test_gated_activation_of_extremes(activation: object) -> None:
    gate, up = torch.zeros(1, 64, dtype=torch.bfloat16), torch.ones(1, 64, dtype=torch.bfloat16)
    gate[0, :2] = torch.tensor([300.0, -300.0])
    gate[0, 17], up[0, 33] = float("nan"), float("nan")
    got = gates.silu_mul_quantize(gate, up, SCALE, activation=activation)
    assert [code == 0x7F for code in got[1].view(torch.uint8)[0].tolist()] == [False, True, True, False]
    assert got[0][0, 0].item() & 0x7F == 7  # 300, or the limit, is the largest of its block; -300 gives 0


def test_gated_activation_with_swizzled_scales() -> None:
    gate, up = sample(5, 32), sample(5, 32, seed=1)
    packed, block_scale = gates.silu_mul_quantize(gate, up, SCALE)
    got = gates.silu_mul_quantize(gate, up, SCALE, swizzled=True)
    assert_same(got, (packed, swizzle(block_scale)))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", rotations.SIZES)
def test_hadamard_bytes_are_those_of_the_rotated_tensor(dtype: torch.dtype, size: int) -> None:
    x = sample(2, 3, 384, dtype=dtype)
    for four_over_six in (False, True):
        got = rotations.hadamard_quantize(x, SCALE, size, four_over_six=four_over_six)
        assert_same(got, expected(rotate(x, size), SCALE, four_over_six))


@pytest.mark.parametrize("exponent", [-133, -140])
def test_hadamard_of_the_smallest_numbers(exponent: int) -> None:
    x = sample(2, 128, dtype=torch.float32).mul_(2.0**exponent).bfloat16()
    for scale in (torch.tensor(2.0**4), torch.tensor(2.0**9), torch.tensor(2.0**-140)):
        assert_same(rotations.hadamard_quantize(x, scale, 64), expected(rotate(x, 64), scale))


def test_hadamard_of_strided_rows_with_swizzled_scales() -> None:
    x = sample(5, 192)[:, 64:]
    packed, block_scale = expected(rotate(x, 32), SCALE)
    assert_same(rotations.hadamard_quantize(x, SCALE, 32, swizzled=True), (packed, swizzle(block_scale)))


def test_no_rows() -> None:
    x = torch.empty(0, 64, dtype=torch.bfloat16)
    assert norms.rms_norm_quantize(x, torch.ones(64), SCALE, residual=x).residual.shape == (0, 64)
    assert gates.silu_mul_quantize(x, x, SCALE)[0].shape == (0, 32)
    assert rotations.hadamard_quantize(x, SCALE, 16)[1].shape == (0, 4)


def test_operands_that_do_not_fit() -> None:
    x = sample(2, 64)
    with pytest.raises(FormatError, match="weight"):
        norms.rms_norm_quantize(x, torch.ones(32), SCALE)
    with pytest.raises(FormatError, match="residual"):
        norms.rms_norm_quantize(x, torch.ones(64), SCALE, residual=x.float())
    with pytest.raises(FormatError, match="up is"):
        gates.silu_mul_quantize(x, x[:1], SCALE)
    with pytest.raises(FormatError, match="activated"):
        gates.silu_mul_quantize(x, x, SCALE, activated=x.t().contiguous().t())
    with pytest.raises(FormatError, match="size 128 over 64"):
        rotations.hadamard_quantize(x, SCALE, 128)
    with pytest.raises(FormatError, match="size 24"):
        rotations.hadamard_quantize(x, SCALE, 24)
