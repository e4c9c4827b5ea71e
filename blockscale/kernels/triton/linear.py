"""W4A16: y = x @ weight.T + bias with NVFP4 or MXFP4 weights as checkpoints store them, on sm_80 and later.

    y[m, n] = global_scale * sum_k x[m, k] * e2m1(code[n, k]) * block_scale[n, k / block] + bias[n]

The sum runs on tensor cores over exact operands (bf16 and fp16 hold E2M1 * E4M3) in fp32, and is rounded once, when y
is stored. Tiles are weights by activations, y transposed: weights are the operand that comes from registers, straight
from their codes, and few rows of x cost few columns. Few rows leave many multiprocessors idle, so K is then split and
a second kernel adds the parts in a fixed order: every call with the same operands gives the same bits.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4
from blockscale.kernels.checks import (
    check_activation,
    check_aligned,
    check_bias,
    check_contiguous,
    check_multiple,
    check_same_device,
    rows,
)
from blockscale.kernels.device import describe
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.triton.decode import NVFP4_SHIFT, decode_groups, reorder_k

_NVFP4_FACTOR = tl.constexpr(2.0**NVFP4_SHIFT)


@dataclass(frozen=True)
class Config:
    """How a product is cut: a program makes `block_n` outputs of `block_m` rows over K / `split`, `block_k` a step.

    reorder   x is brought into the order of the decoded weights by a kernel of its own, else inside each program
    unchained on sm_90: keeps Triton from leaving wgmmas in flight from one step to the next, which ptxas answers by
              waiting after every single one of them (its warning C7515). sm_100 does not compile with it
    """

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    split: int = 1
    reorder: bool = False
    unchained: bool = False


@triton.jit(do_not_specialize=["M", "K", "x_length", "steps"])
def _multiply(
    x,  # [M, x_length], rows `x_stride` apart; with REORDERED in the order of `decode_groups`
    groups,  # int64 [N, K/16]
    scales,  # uint8 [N, K/16], MX: [N, K/32]
    global_scale,  # fp32 0-d
    input_scale,  # fp32 0-d, of x; not read unless HAS_INPUT_SCALE
    bias,  # [N]; not read unless HAS_BIAS
    y,  # [M, N], or fp32 [SPLIT, M, N] where SPLIT > 1
    M,
    N,
    K,
    x_length,  # K, or with REORDERED K up to a multiple of 64
    x_stride,
    group_stride,
    scale_stride,
    steps,  # of BLOCK_K, per part of K
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    MX: tl.constexpr,
    REORDERED: tl.constexpr,
    UNCHAINED: tl.constexpr,  # `Config.unchained`
    EVEN: tl.constexpr,  # K is whole steps of all parts
    HAS_INPUT_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    tile_n, tile_m = _tile(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M))
    part = tl.program_id(1)
    GROUPS: tl.constexpr = BLOCK_K // 16
    # fp16 cannot hold E8M0's range; TF32 holds fp16 and E2M1 * E8M0
    DTYPE: tl.constexpr = tl.float32 if MX and x.dtype.element_ty == tl.float16 else x.dtype.element_ty

    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # rows past the end read the last one and are not stored: no masks in the loop. Few rows of x are masked all the
    # same, or one row would be fetched as often as the tile has
    row_n = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    row_m = tl.minimum(m, M - 1).to(tl.int64)[:, None]
    FEW: tl.constexpr = BLOCK_M <= 16
    has_row = (m < M)[:, None]
    g = part * steps * GROUPS + tl.arange(0, GROUPS)[None, :]
    k = part * steps * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    group_at = groups + row_n * group_stride + g
    SCALES: tl.constexpr = GROUPS // 2 if MX else GROUPS
    scale_at = scales + row_n * scale_stride + part * steps * SCALES + tl.arange(0, SCALES)[None, :]
    x_at = x + row_m * x_stride + k

    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(steps):
        if EVEN:
            codes = tl.load(group_at)
            scale = tl.load(scale_at)
            values = tl.load(x_at, mask=has_row, other=0.0) if FEW else tl.load(x_at)
        else:
            codes = tl.load(group_at, mask=g < K // 16 - step * GROUPS, other=0)
            s = (part * steps + step) * SCALES + tl.arange(0, SCALES)[None, :]
            scale = tl.load(scale_at, mask=s < (K // 32 if MX else K // 16), other=0)
            values = tl.load(x_at, mask=has_row & (k < x_length - step * BLOCK_K), other=0.0)
        if MX:  # two groups of 16 share a scale
            scale = tl.join(scale, scale).reshape([BLOCK_N, GROUPS])
        weights = decode_groups(codes, scale, DTYPE, MX)
        if not REORDERED:
            values = reorder_k(values)
        if UNCHAINED:  # never true, and gone from the machine code; until then the sum has another use in the loop
            total = tl.where(step < 0, 0.0, total)
        total = tl.dot(weights, tl.trans(values.to(DTYPE)), total)
        group_at += GROUPS
        scale_at += SCALES
        x_at += BLOCK_K

    at = m.to(tl.int64)[None, :] * N + n[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    if SPLIT > 1:
        tl.store(y + part.to(tl.int64) * M * N + at, total, mask=inside)
    else:
        offset = tl.load(bias + n, mask=n < N, other=0.0)[:, None] if HAS_BIAS else 0.0
        result = _finish(total, global_scale, input_scale, offset, MX, HAS_INPUT_SCALE)
        tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _tile(index, tiles_n, tiles_m):
    """Tiles of up to 8 neighbouring rows of weights run at a time over all of x: both stay in L2."""
    BAND: tl.constexpr = 8
    first = index // (BAND * tiles_m) * BAND
    height = tl.minimum(tiles_n - first, BAND)
    inside = index % (BAND * tiles_m)
    return first + inside % height, inside // height


@triton.jit
def _finish(total, global_scale, input_scale, offset, MX: tl.constexpr, HAS_INPUT_SCALE: tl.constexpr):
    alpha = tl.load(global_scale)
    if not MX:
        total = total * _NVFP4_FACTOR
    if HAS_INPUT_SCALE:  # x came from `decode_groups` as well
        total = total * _NVFP4_FACTOR
        alpha = tl.load(input_scale) * alpha
    return total * alpha + offset


@triton.jit(do_not_specialize=["size"])
def _add_parts(
    parts,  # fp32 [SPLIT, M, N]
    global_scale,
    input_scale,
    bias,
    y,  # [M, N]
    N,
    size,  # M * N
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MX: tl.constexpr,
    HAS_INPUT_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts + at + part * size.to(tl.int64), mask=inside, other=0.0)
    offset = tl.load(bias + at % N, mask=inside, other=0.0) if HAS_BIAS else 0.0
    result = _finish(total, global_scale, input_scale, offset, MX, HAS_INPUT_SCALE)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "K"])
def _reorder(x, out, M, K, x_stride, out_stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [M, K] -> out [M, K up to a multiple of 64, zeros past K] in the order of `decode_groups`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = m.to(tl.int64)[:, None]
    values = tl.load(x + row * x_stride + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
    inside = (m < M)[:, None] & (k < out_stride)[None, :]
    tl.store(out + row * out_stride + k[None, :], reorder_k(values), mask=inside)


def linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None, config: Config | None = None) -> Tensor:
    """[..., K] bf16 or fp16 -> [..., N] of its dtype.

    weight  [N, K] in Layout.ROW_MAJOR; K a multiple of 16 (NVFP4) or 32 (MXFP4), any N
    bias    [N] of x's dtype or fp32
    config  None takes the table's (`choose`)

    x may be strided and on any number of leading dimensions; NaN and Inf go where a bf16 product takes them. fp16
    with MXFP4 runs in TF32, which holds both operands. FormatError for operands that do not fit.
    """
    op = "linear_w4a16"
    check_activation(op, x, weight.k)
    check_operands(op, x, weight, bias)
    flat = rows(x)
    y = torch.empty(flat.shape[0], weight.n, dtype=x.dtype, device=x.device)
    if y.numel():
        with torch.cuda.device_of(x):
            config = config or choose_for(flat, weight)
            multiply(_reordered(flat) if config.reorder else flat, weight, bias, y, config)
    return y.view(*x.shape[:-1], weight.n)


def check_operands(op: str, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> None:
    """FormatError unless the kernels of this file can read them; x's shape and dtype are checked by the caller."""
    if weight.layout is not Layout.ROW_MAJOR or len(weight.shape) != 2:
        found = f"{list(weight.shape)}, {weight.layout.value}"
        raise FormatError(f"{op}: the weight is {found}", hint="prepare one [N, K] weight row-major")
    check_multiple(op, "K", weight.k, weight.format.block_size)
    check_same_device(op, x=x, weight=weight.packed, bias=bias)
    check_bias(op, bias, weight.n, x)
    for name, part in (("packed", weight.packed), ("block_scale", weight.block_scale)):
        check_contiguous(op, name, part)
    check_aligned(op, "packed", weight.packed, 8)
    if isinstance(_multiply, triton.runtime.JITFunction) and not x.is_cuda:
        raise FormatError(
            f"{op}: x is on {x.device}", hint="this kernel runs on an NVIDIA GPU: move the operands there"
        )


def choose_for(x: Tensor, weight: PreparedWeight) -> Config:
    """`choose` for x [M, ...] on its own device."""
    device = describe(x.device)
    return choose(x.shape[0], weight.n, weight.k, device.capability or (0, 0), device.num_sms)


def _reordered(x: Tensor) -> Tensor:
    """[M, K] -> [M, K up to a multiple of 64] in the order of decoded weights."""
    m, k = x.shape
    padded = -(-k // 64) * 64
    out = torch.empty(m, padded, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(m, 16), triton.cdiv(padded, 256))
    _reorder[grid](x, out, m, k, x.stride(0), padded, BLOCK_M=16, BLOCK_K=256)
    return out


def multiply(
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    y: Tensor,
    config: Config,
    input_scale: Tensor | None = None,
) -> None:
    """x [M, K] @ weight.T -> y [M, N], M and N at least 1, by the kernels above; operands are not checked.

    With `config.reorder` x is [M, K up to a multiple of 64] in the order of decoded weights already.
    `input_scale`: x holds what `decode_groups` made of NVFP4 activations, whose global scale this is.
    """
    (m, length), (n, k) = x.shape, weight.shape
    split, is_mx = config.split, weight.format == MXFP4
    steps = triton.cdiv(triton.cdiv(k, config.block_k), split)
    target = torch.empty(split, m, n, dtype=torch.float32, device=x.device) if split > 1 else y
    ends = {"MX": is_mx, "HAS_INPUT_SCALE": input_scale is not None, "HAS_BIAS": bias is not None}
    # arguments that are not read still need a pointer
    alpha, offset = y if input_scale is None else input_scale, y if bias is None else bias.contiguous()
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(m, config.block_m), split)
    _multiply[grid](
        x,
        weight.packed.view(torch.int64),
        weight.block_scale,
        weight.global_scale,
        alpha,
        offset,
        target,
        m,
        n,
        k,
        length,
        x.stride(0),
        k // 16,
        weight.block_scale.shape[1],
        steps,
        BLOCK_N=config.block_n,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        SPLIT=split,
        REORDERED=config.reorder,
        UNCHAINED=config.unchained,
        EVEN=steps * split * config.block_k == k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **ends,
    )
    if split > 1:
        blocks = triton.cdiv(m * n, 1024)
        _add_parts[(blocks,)](target, weight.global_scale, alpha, offset, y, n, m * n, BLOCK=1024, SPLIT=split, **ends)


# capability from -> (M up to, tile), the last row for every larger M. Measured on an H200; the others keep to what
# their shared memory holds and their registers take without spills (sm_86, sm_89 and sm_120 have 99 KB a program)
_MMA = (
    (8, Config(64, 8, 128, 4, 4)),
    (16, Config(64, 16, 128, 4, 4)),
    (32, Config(64, 32, 128, 4, 3)),
    (64, Config(64, 64, 64, 4, 3)),
    (0, Config(128, 128, 64, 8, 3, reorder=True)),
)
_TILES: dict[tuple[int, int], tuple[tuple[int, Config], ...]] = {
    (8, 0): _MMA,
    (9, 0): (
        (16, Config(64, 16, 128, 4, 5, unchained=True)),
        (64, Config(128, 64, 128, 8, 3, unchained=True)),
        (0, Config(128, 128, 128, 8, 2, reorder=True, unchained=True)),
    ),
    (10, 0): (
        (16, Config(64, 16, 128, 4, 4)),
        (64, Config(64, 64, 128, 4, 3)),
        (0, Config(128, 128, 128, 8, 2, reorder=True)),
    ),
    (12, 0): _MMA,
}
_WARPS_PER_SM, _FEWEST_STEPS, _LARGEST_SPLIT = 16, 4, 16  # what parts of K aim at; large tiles fill half of it


def choose(m: int, n: int, k: int, capability: tuple[int, int], num_sms: int) -> Config:
    """The configuration for a product [M, K] x [N, K] on a GPU: the table's tile, and as many parts of K as fill it."""
    table = _TILES[max((c for c in _TILES if c <= capability), default=(8, 0))]
    config = next(config for limit, config in table if m <= limit or not limit)
    tiles = triton.cdiv(n, config.block_n) * triton.cdiv(m, config.block_m)
    programs = num_sms * _WARPS_PER_SM // (config.num_warps * (2 if config.reorder else 1))
    steps, split = triton.cdiv(k, config.block_k), 1
    while 2 * split * tiles <= programs and 2 * split * _FEWEST_STEPS <= steps and 2 * split <= _LARGEST_SPLIT:
        split *= 2
    return replace(config, split=split)
