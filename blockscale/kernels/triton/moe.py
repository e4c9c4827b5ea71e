"""Experts in four bits over routed tokens, for sm_80 and later: from one token to prefill.

Rows are sorted by expert (`moe_routing`); a program multiplies a tile of rows of one expert with a tile of that
expert's weight, whose codes become 16-bit floats in registers. Three products' worth of kernels: gate and up together
with the activation, down, and the weighted sum over each token's choices, taken in their order, so that the same
operands always give the same bits. The grid depends on shapes alone, as CUDA graphs need.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.kernels.checks import rows
from blockscale.kernels.device import describe
from blockscale.kernels.experts import SILU, GatedActivation, check_moe
from blockscale.kernels.prepare import PreparedWeight
from blockscale.kernels.triton.decode import NVFP4_SHIFT, decode_groups
from blockscale.kernels.triton.moe_routing import Routing, route

# Up to here each choice's output stays fp32 until the sum; beyond, memory matters more than its one rounding.
_FP32_PAIRS = 4096
FACTOR = tl.constexpr(2.0**NVFP4_SHIFT)


@dataclass(frozen=True)
class Tiles:
    """Of one product. n: rows of the weight, gate's and up's together; m: rows of tokens; k: along K, by 64."""

    n: int
    m: int
    k: int
    num_warps: int
    num_stages: int


@triton.jit
def _place_in_64(k):
    """Where `decode_groups` has element k of each 64: 16t + 8h + 4e + q at 32h + 8q + 2t + e."""
    return (k & -64) + ((k >> 3) & 1) * 32 + (k & 3) * 8 + ((k >> 4) & 3) * 2 + ((k >> 2) & 1)


@triton.jit(do_not_specialize=["T", "K"])
def _reorder(x, out, T, K, stride_x, stride_out, BT: tl.constexpr, BK: tl.constexpr):
    """x [T, K] -> out [T, K up to a multiple of 64, zeros past K], columns where `decode_groups` has them."""
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    k = (tl.program_id(1) * BK + tl.arange(0, BK))[None, :]
    value = tl.load(x + t * stride_x + k, mask=(t < T) & (k < K), other=0.0)
    tl.store(out + t * stride_out + _place_in_64(k), value, mask=(t < T) & (k < stride_out))


@triton.jit(do_not_specialize=["top_k", "num_n"])
def _grouped(
    a,  # [rows, K up to a multiple of 64], columns where `decode_groups` has them, zeros past K
    groups,  # int64 [E, R, K/16]; R = 2 N if GATED, else N
    scale,  # uint8 [E, R, K/16], MX: [E, R, K/32]
    global_scale,  # [E, SCALES]
    bias,  # [E, R]; not read unless HAS_BIAS
    out,  # GATED: [P, stride_out] of `a`'s dtype, columns reordered; else [P, N]
    pair, expert_end, tile_expert, tile_row,
    stride_a, stride_out, top_k, N, K, num_n, alpha, beta, limit,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, MX: tl.constexpr,
    EVEN: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of out: rows of one expert by BN rows of its weight. GATED: rows of `a` are tokens, else sorted pairs."""
    tile = tl.program_id(0) // num_n
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile_row + tile) + tl.arange(0, BM)
    end = tl.load(expert_end + expert)
    # rows past the last read the last one and are not stored: no masks in the loop
    source = tl.minimum(row, end - 1)
    if GATED:
        source = tl.load(pair + source) // top_k
    ROWS: tl.constexpr = BN // 2 if GATED else BN
    first = (tl.program_id(0) % num_n) * ROWS
    i = tl.arange(0, BN)
    if GATED:  # gate's rows, then up's
        n = tl.minimum(first + i % ROWS, N - 1)
        is_up = i // ROWS
        weight_row = 2 * n + is_up if INTERLEAVED else n + is_up * N
    else:
        weight_row = tl.minimum(first + i, N - 1)
    weight_row += expert * (2 * N if GATED else N)
    G: tl.constexpr = BK // 16
    S: tl.constexpr = G // 2 if MX else G
    # fp16 cannot hold E8M0's range; TF32 holds fp16 and E2M1 * E8M0
    DTYPE: tl.constexpr = tl.float32 if MX and a.dtype.element_ty == tl.float16 else a.dtype.element_ty
    g, s, k = tl.arange(0, G)[None, :], tl.arange(0, S)[None, :], tl.arange(0, BK)[None, :]
    num_scales = K // (32 if MX else 16)
    groups += weight_row[:, None] * (K // 16) + g
    scale += weight_row[:, None] * num_scales + s
    a += source.to(tl.int64)[:, None] * stride_a + k
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(tl.cdiv(K, BK)):
        if EVEN:
            codes, byte, x = tl.load(groups), tl.load(scale), tl.load(a)
        else:
            codes = tl.load(groups, mask=g < K // 16 - step * G, other=0)
            byte = tl.load(scale, mask=s < num_scales - step * S, other=0)
            x = tl.load(a, mask=k < stride_a - step * BK, other=0.0)
        if MX:  # two groups of 16 share a scale
            byte = tl.join(byte, byte).reshape([BN, G])
        acc = tl.dot(decode_groups(codes, byte, DTYPE, MX), tl.trans(x.to(DTYPE)), acc)
        groups += G
        scale += S
        a += BK
    if not MX:
        acc = acc * FACTOR
    if GATED:
        gate_scale = tl.load(global_scale + expert * SCALES)
        up_scale = tl.load(global_scale + expert * SCALES + (SCALES - 1))
        acc = acc * tl.where(is_up == 1, up_scale, gate_scale)[:, None]
    else:
        acc = acc * tl.load(global_scale + expert)
    if HAS_BIAS:
        acc += tl.load(bias + weight_row).to(tl.float32)[:, None]
    n = first + tl.arange(0, ROWS)
    column = n
    if GATED:
        gate, up = tl.split(acc.reshape([2, ROWS, BM]).permute([1, 2, 0]))
        # comparisons, not min and max: NaN passes through them
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        acc = gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)
        column = _place_in_64(n)
    at = out + row.to(tl.int64)[None, :] * stride_out + column[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (row < end)[None, :])


@triton.jit
def _combine(part, row, weights, y, top_k, stride_w, N, BN: tl.constexpr):
    """y[t] = sum over choices of weights[t, c] * part[row of (t, c)], in order, fp32."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for c in range(top_k):
        r = tl.load(row + t * top_k + c)
        value = tl.load(part + r.to(tl.int64) * N + n, mask=(n < N) & (r >= 0), other=0.0).to(tl.float32)
        weight = tl.load(weights + t * stride_w + c).to(tl.float32)
        total += tl.where(r >= 0, weight * value, 0.0)
    tl.store(y + t * N + n, total.to(y.dtype.element_ty), mask=n < N)


def choose_tiles(num_pairs: int, num_experts: int, capability: tuple[int, int]) -> Tiles:
    """By the rows that an expert gets when choices are balanced."""
    mean = num_pairs / num_experts
    if mean <= 8:
        return Tiles(64, 16, 128, 4, 4)
    if mean <= 24:
        return Tiles(64, 32, 128, 4, 4)
    if capability[0] not in (9, 10):  # sums and operands of a warp stay within its registers
        return Tiles(128, 64, 64, 8, 3)
    if mean <= 64:
        return Tiles(128, 64, 128, 8, 3)
    return Tiles(128, 128, 128, 8, 2)


def reordered(x: Tensor) -> Tensor:
    """[T, K] -> [T, K up to a multiple of 64], columns where the decoded weights have them."""
    num_tokens, k = x.shape
    out = torch.empty(num_tokens, _padded(k), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_tokens, 4), triton.cdiv(out.shape[1], 512))
    _reorder[grid](x, out, num_tokens, k, x.stride(0), out.stride(0), BT=4, BK=512)
    return out


def _padded(k: int) -> int:
    return -(-k // 64) * 64


def grouped(
    a: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    out: Tensor,
    n: int,
    routing: Routing,
    tiles: Tiles,
    top_k: int,
    activation: GatedActivation | None,
) -> None:
    """out [P, n or more]: rows of `a` (reordered) with their experts' weights; with `activation` rows of tokens."""
    num_n = triton.cdiv(n, tiles.n // 2 if activation else tiles.n)
    kind = activation or SILU
    _grouped[(routing.tile_expert.numel() * num_n,)](
        a, weight.packed.view(torch.int64), weight.block_scale, weight.global_scale,
        weight.global_scale if bias is None else bias, out,
        routing.pair, routing.expert_end, routing.tile_expert, routing.tile_row,
        a.stride(0), out.stride(0), top_k, n, weight.k, num_n, kind.alpha, kind.beta, kind.limit,
        GATED=activation is not None, INTERLEAVED=kind.is_interleaved,
        SCALES=1 if weight.global_scale.dim() == 1 else 2, HAS_BIAS=bias is not None,
        MX=not weight.format.has_global_scale, EVEN=weight.k % tiles.k == 0,
        BN=tiles.n, BM=tiles.m, BK=tiles.k, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def combine(part: Tensor, row: Tensor, topk_weights: Tensor, y: Tensor) -> None:
    """y [T, N]: each token's rows of `part` [P, N], weighted and summed in the order of its choices."""
    num_tokens, n = y.shape
    block = min(1024, triton.next_power_of_2(n))
    grid = (num_tokens, triton.cdiv(n, block))
    _combine[grid](part, row, topk_weights, y, topk_weights.shape[1], topk_weights.stride(0), n, BN=block)


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: PreparedWeight,
    down: PreparedWeight,
    *,
    activation: GatedActivation = SILU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> Tensor:
    """[T, N] of the dtype of `x`: the whole feed-forward layer of `experts`.

    x             [T, K] bfloat16 or float16
    topk_ids      [T, top_k] int32 or int64; ids outside 0..E-1 add nothing
    topk_weights  [T, top_k] float32 or 16 bits
    gate_up       row-major [E, 2 I, K], gate and up ordered as `activation` says; down [E, N, I]
    biases        [E, 2 I] and [E, N], of the dtype of x or float32
    tiles         of the two products, with the same m; None: by the number of rows

    Sums are fp32. Raises FormatError for operands that do not fit.
    """
    check_moe(x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias)
    x, num_tokens, top_k = rows(x), x.shape[0], topk_ids.shape[1]
    y = torch.empty(num_tokens, down.n, dtype=x.dtype, device=x.device)
    if num_tokens == 0 or down.n == 0:
        return y
    num_pairs, num_experts = num_tokens * top_k, gate_up.shape[0]
    first, second = tiles or [choose_tiles(num_pairs, num_experts, describe(x.device).capability or (0, 0))] * 2
    routing = route(topk_ids, num_experts, first.m)
    # columns past I meet codes of zero: they must be numbers
    make = torch.empty if down.k % 64 == 0 else torch.zeros
    h = make(num_pairs, _padded(down.k), dtype=x.dtype, device=x.device)
    grouped(reordered(x), gate_up, gate_up_bias, h, down.k, routing, first, top_k, activation)
    part_dtype = torch.float32 if num_pairs <= _FP32_PAIRS else x.dtype
    part = torch.empty(num_pairs, down.n, dtype=part_dtype, device=x.device)
    grouped(h, down, down_bias, part, down.n, routing, second, top_k, None)
    weights = topk_weights if topk_weights.stride(1) == 1 else topk_weights.contiguous()
    combine(part, routing.row, weights, y)
    return y
