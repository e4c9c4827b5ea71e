"""Rounding a weight column by column, each column's error moving the targets of the columns after it.

    code_j = e2m1(t_j / step_j),   e_j = r_j - q_j,   t_i += C[j, i] e_j  for i > j

with q_j the value that packing and decoding code_j gives. GPTQ and coordinate descent are this loop with different
targets t, references r and coefficients C. Everything is transposed: [E, K, N], one column of the weight contiguous.
"""

import torch
from torch import Tensor

from blockscale.formats.minifloat import encode
from blockscale.formats.spec import E2M1

_EXPONENT_MASK = 0x7F800000  # fp32
_ONE = 0x3F800000  # 1.0, the first binade of E2M1's normal numbers
_MAGIC = 1.5 * 2.0**22  # times the binade: its unit in the last place is E2M1's step there


def earlier_and_later(end: int, columns: int) -> tuple[int, int]:
    """(first, last): after column `end`, what columns first ... end-1 owe to columns end ... last-1 falls due.

    Called after every leaf of a power of two of columns, each pair of columns in different leaves is met exactly once,
    and most of the work falls into few, large matrix products, as in a recursive factorisation.
    """
    width = end & -end
    return end - width, min(end + width, columns)


def round_columns(
    targets: Tensor, references: Tensor, coefficients: Tensor, block_scale: Tensor, global_scale: Tensor, leaf: int
) -> tuple[Tensor, Tensor]:
    """(codes uint8 [E, K, N], errors fp32 [E, K, N] = references - decoded codes).

    targets       fp32 [E, K, N]; changed in place into what was rounded
    references    fp32 [E, K, N]
    coefficients  fp32 [E, K, K]; only those above the diagonal are read
    block_scale   float8_e4m3fn [E, K, N]: one per element, in the order of the columns; may be an expanded view
    global_scale  fp32 [1, 1] or [E, 1]
    leaf          columns handled one by one before a matrix product: a power of two

    The codes are `formats.nvfp4.encode_packed`'s for `targets`, and the errors are exact for `decode_packed`.
    """
    _, columns, _ = targets.shape
    codes = torch.empty(targets.shape, dtype=torch.uint8, device=targets.device)
    errors = torch.empty_like(targets)
    bits = torch.empty_like(targets[:, 0], dtype=torch.int32)
    magic = bits.view(torch.float32)
    for start in range(0, columns, leaf):
        end = min(start + leaf, columns)
        block = block_scale[:, start:end].float().contiguous()
        step = block * global_scale.unsqueeze(1)
        values = torch.empty_like(step)
        t, r, e = targets[:, start:end], references[:, start:end], errors[:, start:end]
        lists = (x.unbind(1) for x in (t, r, e, block, step, values))
        coefficient = coefficients[:, start:end, start:end].unsqueeze(-1)  # [E, leaf, leaf, 1]
        for j, (t_j, r_j, e_j, block_j, step_j, q) in enumerate(zip(*lists, strict=True)):
            torch.div(t_j, step_j, out=q)
            _round(q, bits, magic)
            torch.sub(r_j, q.mul_(block_j).mul_(global_scale), out=e_j)
            t[:, j + 1 :].addcmul_(coefficient[:, j, j + 1 :], e_j.unsqueeze(1))
        codes[:, start:end] = encode(t / step, E2M1)
        if end < columns:
            first, last = earlier_and_later(end, columns)
            targets[:, end:last].baddbmm_(coefficients[:, first:end, end:last].mT, errors[:, first:end])
    return codes, errors


def _round(x: Tensor, bits: Tensor, magic: Tensor) -> None:
    """x to E2M1's values in place, as `formats.minifloat.encode` rounds; `bits`, `magic`: one buffer seen twice."""
    x.clamp_(-E2M1.max, E2M1.max)
    torch.bitwise_and(x.view(torch.int32), _EXPONENT_MASK, out=bits)
    bits.clamp_(min=_ONE)
    magic.mul_(_MAGIC)
    x.add_(magic).sub_(magic)
