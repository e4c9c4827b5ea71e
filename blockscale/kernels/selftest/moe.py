"""The experts' layer against float64, within what fp32 sums and the rounding of the hidden values explain."""

from dataclasses import replace

import torch
from torch import Tensor

from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.kernels.experts import GPT_OSS, SILU, GatedActivation
from blockscale.kernels.ops.moe import launcher
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.reference.linear import product
from blockscale.kernels.reference.moe import gated
from blockscale.kernels.select import Choice
from blockscale.kernels.selftest.outcome import HALF_UNIT, check_near, rounding

_EXPERTS, _TOP_K, _K, _H, _N = 5, 2, 128, 96, 80
_TOKENS = (1, 9, 150)


def test_moe(choice: Choice, device: torch.device) -> str:
    """Both formats and activations, from one token to many, an expert without tokens, an id that is none."""
    run = launcher(choice.kernel)
    worst, count = 0.0, 0
    for fmt, activation, dtype in ((NVFP4, SILU, torch.bfloat16), (MXFP4, GPT_OSS, torch.float16)):
        generator = torch.Generator().manual_seed(7)
        gate_up = _stack(2 * _H, _K, fmt, dtype, generator)
        down = _stack(_N, _H, fmt, dtype, generator)
        bias = torch.randn(_EXPERTS, 2 * _H, generator=generator).to(dtype)
        for tokens in _TOKENS:
            x = torch.randn(tokens, _K, generator=generator).to(dtype)
            ids = torch.randint(0, _EXPERTS - 1, (tokens, _TOP_K), generator=generator, dtype=torch.int32)
            ids[-1, 1] = -1
            weights = torch.rand(tokens, _TOP_K, generator=generator)
            y = run(
                x.to(device),
                ids.to(device),
                weights.to(device),
                _to(gate_up, device),
                _to(down, device),
                activation=activation,
                gate_up_bias=bias.to(device),
            )
            expected, bound = _expected(x, ids, weights, gate_up, down, bias, activation)
            what = f"{fmt.name}, {tokens} tokens"
            worst = max(worst, check_near(what, y.cpu(), expected, bound + rounding(expected, dtype)))
            count += 1
    return f"{count} cases, at most {worst:.2f} of what rounding explains"


def _expected(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: PreparedWeight,
    down: PreparedWeight,
    bias: Tensor,
    activation: GatedActivation,
) -> tuple[Tensor, Tensor]:
    """float64 [T, N]: the layer with hidden values rounded as its definition says, and what may lie beside it."""
    y = torch.zeros(x.shape[0], _N, dtype=torch.float64)
    bound = torch.zeros_like(y)
    for token in range(x.shape[0]):
        for choice in range(_TOP_K):
            e = int(ids[token, choice])
            if not 0 <= e < _EXPERTS:
                continue
            up, back = _expert(gate_up, e), _expert(down, e)
            first = product(x[token : token + 1].double(), up) * up.global_scale.double() + bias[e].double()
            h = gated(first, activation)
            second = h.to(x.dtype).double()
            values = product(torch.eye(_H, dtype=torch.float64), back) * back.global_scale.double()  # [H, N]
            weight = weights[token, choice].double()
            y[token] += (weight * (second @ values))[0]
            size = product(x[token : token + 1].double().abs(), _magnitude(up)) * up.global_scale.double()
            off = (size + bias[e].double().abs()) * (_K * 2.0**-22)  # fp32 sums of the gate and of up
            moved = _spread(first.abs() + activation.beta, off, activation)
            loose = h.abs() * 2 * HALF_UNIT[x.dtype] + moved + h.abs() * 2.0**-19  # the other neighbour; exp
            bound[token] += (weight * (loose @ values.abs()))[0]
    return y, bound


def _spread(first: Tensor, off: Tensor, activation: GatedActivation) -> Tensor:
    """What errors `off` [1, 2 H] of gate and up move their product by: 1.1 is the steepest that the gate gets."""
    if activation.is_interleaved:
        gate, up, gate_off, up_off = first[:, 0::2], first[:, 1::2], off[:, 0::2], off[:, 1::2]
    else:
        (gate, up), (gate_off, up_off) = first.chunk(2, dim=1), off.chunk(2, dim=1)
    return 1.2 * gate_off * up + gate * up_off + gate_off * up_off


def _magnitude(weight: PreparedWeight) -> PreparedWeight:
    return replace(weight, packed=weight.packed & 0x77)


def _stack(n: int, k: int, fmt: Format, dtype: torch.dtype, generator: torch.Generator) -> PreparedWeight:
    packed = torch.randint(0, 256, (_EXPERTS, n, k // 2), dtype=torch.uint8, generator=generator)
    low, high = (40, 64) if fmt == NVFP4 else (122, 127)
    scale = torch.randint(low, high, (_EXPERTS, n, k // fmt.block_size), dtype=torch.uint8, generator=generator)
    one = torch.rand(_EXPERTS, generator=generator) * 0.03 + 0.01 if fmt == NVFP4 else torch.ones(_EXPERTS)
    return PreparedWeight(Layout.ROW_MAJOR, packed, scale, one, (_EXPERTS, n, k), fmt, dtype)


def _expert(stack: PreparedWeight, e: int) -> PreparedWeight:
    packed, scale, one = stack.packed[e], stack.block_scale[e], stack.global_scale[e]
    return PreparedWeight(Layout.ROW_MAJOR, packed, scale, one, stack.shape[1:], stack.format, stack.dtype)


def _to(stack: PreparedWeight, device: torch.device) -> PreparedWeight:
    packed, scale, one = stack.packed.to(device), stack.block_scale.to(device), stack.global_scale.to(device)
    return PreparedWeight(Layout.ROW_MAJOR, packed, scale, one, stack.shape, stack.format, stack.dtype)
