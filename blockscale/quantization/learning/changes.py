"""What learning changed: which tensors are written anew, and what there is to tell of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.algorithms.learned_rounding import LearnedRounding
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.packing import pack_nibbles
from blockscale.quantization.summary import Learning

_MAGNITUDE = 0b0111  # of a code
Tensors = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Changes:
    """Tensors that are not as they were, by stored name.

    linears   codes uint8 [..., K] and block_scale float8_e4m3fn [..., K/16]
    gains     in their dtype on disk
    learning  the record
    """

    linears: Tensors
    gains: Mapping[str, Tensor]
    learning: Learning


def find_changes(
    before: Tensors, gains_before: Mapping[str, Tensor], found: LearnedRounding, steps: int, seed: int
) -> Changes:
    """`before`: of everything that could learn."""
    linears: dict[str, tuple[Tensor, Tensor]] = {}
    num_codes = num_block_scales = 0
    for name, (old, old_scale) in before.items():
        codes, scale = found.tensors[name]
        # of a zero's two codes the one that there was
        codes = torch.where(((codes | old) & _MAGNITUDE) == 0, old, codes)
        moved, rescaled = int((codes != old).sum()), int((scale.float() != old_scale.float()).sum())
        num_codes, num_block_scales = num_codes + moved, num_block_scales + rescaled
        if moved or rescaled:
            linears[name] = (codes, scale)
    gains = {name: new for name, new in found.vectors.items() if not torch.equal(new, gains_before[name])}
    learning = Learning(
        steps,
        seed,
        found.best_step,
        found.start_loss,
        found.loss,
        sum(codes.numel() for codes, _ in before.values()),
        num_codes,
        num_block_scales,
        len(gains),
    )
    return Changes(linears, gains, learning)


def sqnr_db(codes: Tensor, block_scale: Tensor, unrounded: Tensor) -> float:
    """Of a weight against what it was rounded from, both without the global scale; inf for no error."""
    error = unrounded - decode_unscaled(pack_nibbles(codes), block_scale)
    ratio = unrounded.double().square().sum() / error.double().square().sum()
    return round((10 * ratio.log10()).item(), 3)
