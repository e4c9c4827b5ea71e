"""The 128x4 scale layout that cuBLAS, CUTLASS and tcgen05 read block scales in.

scale[r, c] of a row-major [R, C] matrix, padded to [128 a, 4 b] with zeros, lies at byte
((r/128) * (C_pad/4) + c/4) * 512 + (r%32) * 16 + ((r%128)/32) * 4 + c%4.
Source: cuBLAS documentation, "1D block scaling factors layout"; PTX ISA, tcgen05.mma scale-factor layout.
Never stored in a checkpoint: engines swizzle when they load.
"""

import torch
from torch import Tensor

from blockscale.errors import FormatError


def _ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def swizzle(scale: Tensor) -> Tensor:
    """[R, C] of any 1-byte dtype -> 1-D of the same dtype, ceil(R, 128) * ceil(C, 4) entries, padding zero."""
    if scale.dim() != 2 or scale.element_size() != 1:
        raise FormatError(f"swizzle takes a 2-D matrix of 1-byte scales, got {scale.dtype} {list(scale.shape)}")
    rows, cols = _ceil_to(scale.shape[0], 128), _ceil_to(scale.shape[1], 4)
    padded = torch.zeros(rows, cols, dtype=torch.uint8, device=scale.device)
    padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    tiles = padded.view(rows // 128, 4, 32, cols // 4, 4)  # [row tile, r%128/32, r%32, column tile, c%4]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of `swizzle`, cropped: any shape with ceil(R, 128) * ceil(C, 4) entries -> [R, C], same dtype."""
    padded_rows, padded_cols = _ceil_to(rows, 128), _ceil_to(cols, 4)
    if swizzled.numel() != padded_rows * padded_cols or swizzled.element_size() != 1:
        raise FormatError(
            f"a swizzled [{rows}, {cols}] scale has {padded_rows * padded_cols} 1-byte entries, "
            f"got {swizzled.numel()} of {swizzled.dtype}"
        )
    tiles = swizzled.view(torch.uint8).reshape(padded_rows // 128, padded_cols // 4, 32, 4, 4)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_cols)
    return padded[:rows, :cols].contiguous().view(swizzled.dtype)
