"""Linears against float64: bit for bit where nothing is rounded but the result, and within what rounding explains.

A sum of K products in fp32, in any order, is off by at most K * 2^-23 of the sum of their magnitudes.
"""

from dataclasses import dataclass
from itertools import product as pairs

import torch
from torch import Tensor

from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.kernels.linears import PREPARE, Launcher, launcher
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.reference.linear import decoded_rows
from blockscale.kernels.reference.quantize import quantize_nvfp4
from blockscale.kernels.select import Choice, Kernel, Op
from blockscale.kernels.selftest.outcome import Mismatch, check_equal, check_near, rounding

N, K = 200, {NVFP4: 272, MXFP4: 288}  # not multiples of any tile
ROWS = (1, 33, 300)  # few enough that all is built and tested within half a minute
_EPSILON = 2.0**-23


@dataclass(frozen=True)
class _Case:
    choice: Choice
    format: Format
    dtype: torch.dtype
    m: int
    device: torch.device

    def __str__(self) -> str:
        return f"{self.format.name}, {str(self.dtype).removeprefix('torch.')}, M = {self.m}"


def test_linear(choice: Choice, device: torch.device) -> str:
    """Every format, dtype and number of rows that the kernel is for. Mismatch for the first that is wrong."""
    run = launcher(choice.op, choice.kernel)
    worst, count = 0.0, 0
    formats = (NVFP4,) if choice.op is Op.LINEAR_W4A4 or choice.kernel is Kernel.HUMMING else (NVFP4, MXFP4)
    for fmt, dtype in pairs(formats, (torch.bfloat16, torch.float16)):
        # every number of rows for what most models are; a kernel is built anew for each kind of it
        served = [m for m in ROWS if choice.is_for(m)]
        for m in served if (fmt, dtype) == (NVFP4, torch.bfloat16) else served[1:2]:
            case, generator = _Case(choice, fmt, dtype, m, device), torch.Generator().manual_seed(m)
            if choice.op is Op.LINEAR_W4A16:
                _exact(case, run, generator)
            worst = max(worst, _random(case, run, generator))
            count += 1
    return f"{count} cases, at most {worst:.2f} of what rounding explains"


def _exact(case: _Case, run: Launcher, generator: torch.Generator) -> None:
    """Small whole activations, scales that are powers of two: every sum is exact in fp32, so every bit is known."""
    fmt, dtype, m, device = case.format, case.dtype, case.m, case.device
    one = 56 if fmt == NVFP4 else 127  # the byte of 1.0
    step = 8 if fmt == NVFP4 else 1
    k = K[fmt]
    packed = torch.randint(0, 256, (N, k // 2), dtype=torch.uint8, generator=generator)
    powers = torch.randint(-2, 2, (N, k // fmt.block_size), generator=generator)
    scale = (one + step * powers).to(torch.uint8)
    x = torch.randint(-3, 4, (m, k), generator=generator).to(dtype)
    bias = torch.randint(-8, 9, (N,), generator=generator).to(dtype)
    weight = _weight(packed, scale, 2.0**-3 if fmt == NVFP4 else 1.0, fmt, dtype)
    expected = (x.double() @ _values(weight).T + bias.double()).to(dtype)
    y = run(x.to(device), _prepared(weight, case.choice, device), bias.to(device))
    check_equal(f"{case}, exact", y.cpu(), expected)


def _random(case: _Case, run: Launcher, generator: torch.Generator) -> float:
    """Normal activations in a strided tensor, all codes, scales over several binades."""
    choice, fmt, dtype, m, device = case.choice, case.format, case.dtype, case.m, case.device
    k = K[fmt]
    packed = torch.randint(0, 256, (N, k // 2), dtype=torch.uint8, generator=generator)
    low, high = (1, 72) if fmt == NVFP4 else (118, 128)  # NVFP4: subnormal scales, too
    scale = torch.randint(low, high, (N, k // fmt.block_size), dtype=torch.uint8, generator=generator)
    wide = torch.randn(m, k + 16, generator=generator).to(dtype)
    x = wide[:, 16:] if m > 1 else wide[:, :k]
    weight = _weight(packed, scale, 0.037 if fmt == NVFP4 else 1.0, fmt, dtype)
    values = _values(weight)
    y = run(wide.to(device)[:, 16:] if m > 1 else x.to(device), _prepared(weight, choice, device), None).cpu()
    operand = x.double()
    if choice.op is Op.LINEAR_W4A4:
        codes, block_scale, global_scale = quantize_nvfp4(x)
        operand = decode_unscaled(codes, block_scale).double() * global_scale.double()
    expected, size = operand @ values.T, operand.abs() @ values.abs().T
    bound = size * (k * _EPSILON) + rounding(expected, dtype)
    if choice.op is Op.LINEAR_W4A8:
        bound = bound + _eight_bit_bound(x.double(), values)
        noise = float((y.double() - expected).norm() / expected.norm())
        if not noise < 0.08:  # two roundings to four significant bits give 0.04
            raise Mismatch(f"{case}: the error is {noise:.3f} of the result")
    return check_near(str(case), y, expected, bound)


def _eight_bit_bound(x: Tensor, values: Tensor) -> Tensor:
    """What eight bits an operand may cost: E4M3 with a scale a row, or integers with a scale a row or finer.

    E4M3 errs by 2^-4 of a value or by 2^-10 of a scale that is amax / 448; integers of amax / 127 by half of that.
    """
    x_step = x.abs().amax(1, keepdim=True) / 254
    w_step = values.abs().amax(1, keepdim=True) / 448 * 2.0**-10
    relative = (1 + 2.0**-4) ** 2 * (1 + 2.0**-8) - 1
    return (
        relative * (x.abs() @ values.abs().T)
        + x_step * values.abs().sum(1)
        + x.abs().sum(1, keepdim=True) * w_step.T * 1.1
        + x.shape[1] * x_step * w_step.T
    )


def _weight(packed: Tensor, scale: Tensor, global_scale: float, fmt: Format, dtype: torch.dtype) -> PreparedWeight:
    shape = (packed.shape[0], packed.shape[1] * 2)
    return PreparedWeight(Layout.ROW_MAJOR, packed, scale, torch.tensor(global_scale), shape, fmt, dtype)


def _values(weight: PreparedWeight) -> Tensor:
    """float64 [N, K]; codes times scales are exact in fp32."""
    ((_, values),) = decoded_rows(weight)
    return values.double() * weight.global_scale.double()


def _prepared(weight: PreparedWeight, choice: Choice, device: torch.device) -> PreparedWeight:
    moved = PreparedWeight(
        weight.layout,
        weight.packed.to(device),
        weight.block_scale.to(device),
        weight.global_scale.to(device),
        weight.shape,
        weight.format,
        weight.dtype,
    )
    return PREPARE[choice.layout or Layout.ROW_MAJOR](moved)
