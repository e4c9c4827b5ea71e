"""From a QuantizedTensor to the layout that a kernel reads: made once, when a model is loaded."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.formats.tensor import QuantizedTensor
from blockscale.kernels.checks import check_multiple

FORMATS = (NVFP4, MXFP4)


class Layout(Enum):
    """Order of a weight's codes and scales in memory.

    ROW_MAJOR  as checkpoints store them: packed [..., N, K/2], block_scale [..., N, K/block]
    FRAGMENTS  one stream of tiles, codes and scales together, in the order of tensor core operands (`layouts`)
    E4M3       rounded to eight bits: packed float8_e4m3fn [N', K], block_scale fp32 [1, N'], which has the global
               scale in it (`cuda/linear_w4a8`)
    HUMMING    as the package of that name lays it out (`humming_linear`)
    CPU        rows interleaved for vector registers (`cpu/`)
    """

    ROW_MAJOR = "row_major"
    FRAGMENTS = "fragments"
    E4M3 = "e4m3"
    HUMMING = "humming"
    CPU = "cpu"


@dataclass(frozen=True)
class PreparedWeight:
    """A weight [N, K], or a stack of them [E, N, K], in the layout of a kernel.

    packed        uint8; ROW_MAJOR: [..., N, K/2]. Other layouts say in their own file what it holds
    block_scale   uint8, the bytes of E4M3 (NVFP4) or E8M0 (MXFP4); ROW_MAJOR: [..., N, K/block].
                  Empty where `packed` holds the scales too
    global_scale  fp32 multiplier, 0-d, or [E] for a stack; 1 where the format has none
    shape         of the weight it stands for: (N, K) or (E, N, K)
    dtype         of the weight it stands for
    """

    layout: Layout
    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor
    shape: tuple[int, ...]
    format: Format
    dtype: torch.dtype

    @property
    def n(self) -> int:
        return self.shape[-2]

    @property
    def k(self) -> int:
        return self.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.block_scale, self.global_scale))


def row_major(q: QuantizedTensor) -> PreparedWeight:
    """The checkpoint's own order, without a copy: the tensors of `q` seen as bytes.

    `q` is a weight [N, K] or a stack [E, N, K] (with a global scale that is 0-d or [E]) in NVFP4 or MXFP4.
    """
    if q.format not in FORMATS:
        names = " and ".join(f.name for f in FORMATS)
        raise FormatError(f"no kernels for weights in {q.format.name}", hint=f"kernels read {names}")
    if len(q.shape) not in (2, 3):
        raise FormatError(f"a weight is [N, K] or [E, N, K], got {list(q.shape)}")
    block = q.format.block_size
    check_multiple("prepare", "K", q.shape[-1], block)
    *lead, n, k = q.shape
    packed, block_scale = q.packed.contiguous(), q.block_scale.contiguous().view(torch.uint8)
    for name, tensor, shape in (
        ("packed", packed, (*lead, n, k // 2)),
        ("block_scale", block_scale, (*lead, n, k // block)),
    ):
        if tuple(tensor.shape) != shape or tensor.device != packed.device:
            found = f"{list(tensor.shape)} on {tensor.device}"
            raise FormatError(f"{name} is {found}", hint=f"a weight {list(q.shape)} has {name} {list(shape)}")
    if q.global_scale is None:
        global_scale = torch.ones(lead, dtype=torch.float32, device=packed.device)
    else:
        global_scale = q.global_scale.to(packed.device, torch.float32)
        if global_scale.shape != torch.Size(lead):
            global_scale = global_scale.expand(lead).contiguous()
    return PreparedWeight(Layout.ROW_MAJOR, packed, block_scale, global_scale, tuple(q.shape), q.format, q.dtype)


def from_row_major(weight: PreparedWeight) -> QuantizedTensor:
    """Inverse of `row_major`, without a copy."""
    if weight.layout is not Layout.ROW_MAJOR:
        raise FormatError(f"the layout is {weight.layout.value}", hint="unpack it with the file that packed it")
    has_global = weight.format.has_global_scale
    scale = weight.block_scale.view(torch.float8_e4m3fn) if has_global else weight.block_scale
    global_scale = weight.global_scale if has_global else None
    return QuantizedTensor(weight.format, weight.packed, scale, global_scale, weight.shape, weight.dtype)
