"""The block scale of least error, found exactly.

For a block b with E4M3 scale s (times the tensor's global scale g) the error is sum_i h_i (x_i - q_i)^2 with
q_i = e2m1(x_i / (s g)) s g, and all h_i = 1 unless an importance is given: E[x_i^2] of the input channel, which makes
the error that of the layer's output were its channels uncorrelated.

Let c be the E4M3 code of the amax scale, amax_b / (6 g) rounded. No best code lies above c+7: for s >= amax_b / 3.5
every level in use is at most 3 s, so s / 2 serves every element as well, and that bounds s by 12/7 of the amax scale,
at most 7 codes up. Below, enumerating E4M3's cells shows no gain past 3 codes when all h_i are equal: 11 codes are
tried.

With unequal h_i there is no such floor (where a channel with a large weight hardly fires, the best scale clips it).
Then codes go on down, block by block, until clipping alone, sum_i h_i max(0, |x_i| - 6 s g)^2, costs more than the
best error so far: it only grows from there.

Halving takes an E4M3 number to another only from 2^-5 (code 16) up: for c < 8, where the bound would end below that,
codes 1 ... 15 are tried instead.

Source: the bound as stated in ScaleSweep (2026), for the unweighted error; the h_i are llama.cpp's importance matrix.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.error import block_squared_error
from blockscale.formats.minifloat import round_magnitude
from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax
from blockscale.formats.spec import E2M1

OFFSETS = range(-3, 8)
_LOW_CODES = range(1, 16)
_FIRST_NORMAL = 8
_MIN_CODE, _MAX_CODE = 1, 126  # smallest subnormal .. 448; 0 would lose the block, 127 is NaN


def best_block_scale(x: Tensor, global_scale: Tensor, block_size: int = 16, importance: Tensor | None = None) -> Tensor:
    """float8_e4m3fn [..., K/block_size] of least squared error for x [..., K] (bf16, fp16 or fp32).

    `global_scale` wants headroom (amax / (6 * 256)): a scale above the largest block's amax scale must exist.
    `importance`: what a squared error costs, by channel, not negative: [K], or any shape that broadcasts over x.
    A block without importance is treated as if all its channels mattered alike. Add a little of its mean to an
    importance from few tokens, or weights of channels that happened to be silent are clipped at will.
    """
    amax = block_amax(x, block_size)
    start = block_scale_from_amax(amax, global_scale).view(torch.uint8).int()
    # in units of the global scale, or the squares of very small or large weights would leave fp32
    magnitude = (x.float().abs() / global_scale).unflatten(-1, (-1, block_size))
    weights = None if importance is None else _block_weights(importance, x, block_size).expand_as(magnitude)
    code, error = _least_error(
        _error_of(magnitude, weights), start, ((start + o).clamp_(_MIN_CODE, _MAX_CODE) for o in OFFSETS)
    )
    is_low = start < _FIRST_NORMAL
    if weights is not None:
        code = _descend(magnitude, weights, start + (OFFSETS.start - 1), code, error, ~is_low & (amax > 0))
    if is_low.any():
        low_start = start[is_low]
        low_codes = (torch.full_like(low_start, c) for c in _LOW_CODES)
        low_error = _error_of(magnitude[is_low], None if weights is None else weights[is_low])
        code[is_low] = _least_error(low_error, low_start, low_codes)[0]
    code = torch.where(amax == 0, start, code)  # a zero block keeps the scale of 1
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


def _block_weights(importance: Tensor, x: Tensor, block_size: int) -> Tensor:
    """fp32 [..., B, n], the largest of each block 1; ones where a block has none."""
    try:
        torch.broadcast_shapes(importance.shape, x.shape)
    except RuntimeError:
        message = f"an importance {list(importance.shape)} does not broadcast over a weight {list(x.shape)}"
        raise FormatError(message, hint="give one value per input channel") from None
    weights = importance.to(x.device, torch.float32).expand(*importance.shape[:-1], x.shape[-1])
    weights = weights.unflatten(-1, (-1, block_size))
    largest = weights.amax(-1, keepdim=True)
    return torch.where(largest > 0, weights / largest, 1.0)


def _values(code: Tensor) -> Tensor:
    return code.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _error_of(magnitude: Tensor, weights: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Codes int32 [..., B] -> errors [..., B] of the magnitudes [..., B, n] under them."""

    def error(code: Tensor) -> Tensor:
        if weights is None:
            return block_squared_error(magnitude, _values(code))
        step = _values(code).unsqueeze(-1)
        difference = round_magnitude(magnitude / step, E2M1).mul_(step).sub_(magnitude)
        return difference.square_().mul_(weights).sum(-1)

    return error


def _least_error(
    error_of: Callable[[Tensor], Tensor], start: Tensor, candidates: Iterable[Tensor]
) -> tuple[Tensor, Tensor]:
    """The candidate code of least error, a block, and that error; the first one where several are equal."""
    best_code, best_error = start.clone(), torch.full(start.shape, torch.inf, device=start.device)
    for code in candidates:
        error = error_of(code)
        is_better = error < best_error
        best_code = torch.where(is_better, code, best_code)
        best_error = torch.where(is_better, error, best_error)
    return best_code, best_error


def _descend(
    magnitude: Tensor, weights: Tensor, next_code: Tensor, code: Tensor, error: Tensor, is_open: Tensor
) -> Tensor:
    """Improves `code` by lower ones, from `next_code` down, for the blocks that are open and while clipping allows."""
    place = is_open.flatten().nonzero().squeeze(-1)
    best_code, best_error = code.flatten(), error.flatten()
    magnitude, weights, tried = magnitude[is_open], weights[is_open], next_code[is_open]
    while len(place):
        is_open = tried >= _MIN_CODE
        clipped = (magnitude - E2M1.max * _values(tried.clamp(min=_MIN_CODE)).unsqueeze(-1)).clamp_(min=0)
        is_open &= clipped.square_().mul_(weights).sum(-1) < best_error[place]
        place, tried = place[is_open], tried[is_open]
        magnitude, weights = magnitude[is_open], weights[is_open]
        found = _error_of(magnitude, weights)(tried)
        is_better = found < best_error[place]
        best_code[place[is_better]] = tried[is_better]
        best_error[place[is_better]] = found[is_better]
        tried = tried - 1
    return best_code.view_as(code)


HESSIAN_OFFSETS = range(-8, 16)


def best_block_scale_hessian(x: Tensor, global_scale: Tensor, block_hessians: Tensor, block_size: int = 16) -> Tensor:
    """float8_e4m3fn [..., N, K/16] of least dw^T H_b dw for x [..., N, K], dw the rounding error of a block of a row.

    block_hessians  [K/16, 16, 16] as statistics.block_hessians gives them, or [E, K/16, 16, 16] for x [E, N, K]

    Rounding is to nearest. The best code for the diagonal of H_b is found first, then 8 codes below to 15 above it are
    tried under all of H_b. No bound holds here, since a finer grid can err worse where errors are correlated; against
    all 126 codes the window loses at most 0.1 % of any layer's error on the real weights it was chosen on.
    A block whose H_b is zero is searched as if H_b were the identity.

    Source: Model Optimizer's local-Hessian scale search, which tries all codes.
    """
    *lead, num_blocks, rows, columns = block_hessians.shape
    if rows != block_size or columns != block_size or x.shape[-1] != num_blocks * block_size:
        message = f"block Hessians {list(block_hessians.shape)} do not fit a weight {list(x.shape)}"
        raise FormatError(message, hint=f"one of {block_size} x {block_size} per {block_size} input channels")
    stack = x.reshape(*lead, -1, x.shape[-1])  # [.., N, K]
    diagonal = block_hessians.diagonal(dim1=-2, dim2=-1).clamp(min=0).flatten(-2).unsqueeze(-2)  # [.., 1, K]
    centre = best_block_scale(stack, global_scale, block_size, diagonal).view(torch.uint8).int()
    trace = diagonal.unflatten(-1, (-1, block_size)).squeeze(-3).sum(-1)[..., None, None]
    identity = torch.eye(block_size, device=x.device)
    hessians = torch.where(trace > 0, block_hessians.float() / trace, identity).flatten(0, -3)  # [E*B, 16, 16]

    blocks = (stack.float() / global_scale).unflatten(-1, (-1, block_size)).transpose(-3, -2)
    blocks = blocks.reshape(-1, *blocks.shape[-2:])  # [E*B, N, 16]
    magnitude, signs = blocks.abs(), blocks.sign()
    start = centre.transpose(-2, -1).reshape(blocks.shape[:-1])  # [E*B, N]

    def error(code: Tensor) -> Tensor:
        step = _values(code).unsqueeze(-1)
        difference = round_magnitude(magnitude / step, E2M1).mul_(step).sub_(magnitude).mul_(signs)
        return torch.bmm(difference, hessians).mul_(difference).sum(-1)

    candidates = ((start + o).clamp_(_MIN_CODE, _MAX_CODE) for o in HESSIAN_OFFSETS)
    code, _ = _least_error(error, start, candidates)
    code = code.view(*lead, num_blocks, -1).transpose(-2, -1).reshape(*x.shape[:-1], num_blocks)
    zero = block_amax(x, block_size) == 0
    return torch.where(zero, centre.view_as(code), code).to(torch.uint8).view(torch.float8_e4m3fn)
