"""PagedCache: keys and values of many sequences in pages of fixed size, in 16 bits, FP8 or NVFP4."""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from blockscale.errors import FormatError, UsageError
from blockscale.formats.nvfp4 import decode_packed

BLOCK = 16  # elements that share an NVFP4 block scale
_ALIGNMENT = 64  # bytes: a line of the CPU's caches, and as torch aligns its own memory


class KVFormat(Enum):
    """How one element of a cache is stored."""

    BITS16 = "16-bit"  # bfloat16 or float16, as computed
    FP8 = "fp8"  # E4M3 * scale, one scale for all keys and one for all values
    NVFP4 = "nvfp4"  # e2m1 * block_scale * scale; blocks of 16 along the head dimension


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of one layer.

    k, v            [num_pages, page_size, num_kv_heads, D] bfloat16 or float16 (BITS16), float8_e4m3fn (FP8), or
                    uint8 [.., D/2] packed as in `formats` (NVFP4). The last dimension is contiguous, the others may
                    have any stride; `allocate` lays a head's tokens of a page side by side, so that a kernel that
                    reads one head reads whole lines.
    k_block_scale,  float8_e4m3fn [num_pages, page_size, num_kv_heads, D/16], NVFP4 only
    v_block_scale
    k_scale,        float32 0-d multipliers on the caches' device (FP8: the tensor's scale, NVFP4: its global scale)
    v_scale
    dtype           bfloat16 or float16: what the cache stands for

    Token t of sequence b lies in page `page_table[b, t // page_size]` at `t % page_size`.
    """

    format: KVFormat
    k: Tensor
    v: Tensor
    k_block_scale: Tensor | None
    v_block_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_pages(self.format, self.k, self.k_block_scale, self.k_scale, self.dtype, "k")
        check_pages(self.format, self.v, self.v_block_scale, self.v_scale, self.dtype, "v")
        if self.k.shape != self.v.shape or self.k.device != self.v.device:
            raise FormatError(
                f"paged cache: k {list(self.k.shape)} on {self.k.device}, v {list(self.v.shape)} on {self.v.device}",
                hint="keys and values lie in pages of the same shape on the same device",
            )

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (2 if self.format is KVFormat.NVFP4 else 1)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys, values and block scales of one token, all heads."""
        parts = [t for t in (self.k, self.v, self.k_block_scale, self.v_block_scale) if t is not None]
        return sum(t.shape[2] * t.shape[3] * t.element_size() for t in parts)


_STORED = {KVFormat.FP8: torch.float8_e4m3fn, KVFormat.NVFP4: torch.uint8}


def check_pages(
    fmt: KVFormat, pages: Tensor, block_scale: Tensor | None, scale: Tensor | None, dtype: torch.dtype, name: str
) -> None:
    """FormatError unless `pages` [num_pages, page_size, num_kv_heads, D or D/2] and its scales are what `fmt` says."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise FormatError(f"paged cache: stands for {dtype}", hint="give bfloat16 or float16")
    expected = _STORED.get(fmt, dtype)
    if pages.dim() != 4 or pages.dtype != expected:
        raise FormatError(
            f"paged cache: {name} is {pages.dtype} {list(pages.shape)}, a cache of {fmt.value} holds {expected}",
            hint="pages are [num_pages, page_size, num_kv_heads, head_dim], half as wide where two codes share a byte",
        )
    head_dim = pages.shape[3] * (2 if fmt is KVFormat.NVFP4 else 1)
    if head_dim == 0 or head_dim % BLOCK or pages.shape[1] < BLOCK or pages.shape[1] & (pages.shape[1] - 1):
        raise FormatError(
            f"paged cache: {name} has pages of {pages.shape[1]} tokens and heads of {head_dim}",
            hint="pages hold a power of two of tokens, 16 or more; head dimensions are multiples of 16",
        )
    if pages.stride(3) != 1:
        raise FormatError(
            f"paged cache: {name} has stride {pages.stride(3)} in its last dimension", hint="it must be 1"
        )
    if (fmt is KVFormat.NVFP4) != (block_scale is not None):
        raise FormatError(f"paged cache: {name} of {fmt.value} with block scales: {block_scale is not None}")
    if block_scale is not None:
        shape = (*pages.shape[:3], head_dim // BLOCK)
        if block_scale.dtype != torch.float8_e4m3fn or tuple(block_scale.shape) != shape:
            raise FormatError(
                f"paged cache: {name}_block_scale is {block_scale.dtype} {list(block_scale.shape)}",
                hint=f"give float8_e4m3fn {list(shape)}",
            )
        if block_scale.stride(3) != 1 or block_scale.device != pages.device:
            raise FormatError(
                f"paged cache: {name}_block_scale must lie beside its pages, contiguous along heads' dims"
            )
    if (fmt is KVFormat.BITS16) != (scale is None):
        raise FormatError(f"paged cache: {name} of {fmt.value} with a scale: {scale is not None}")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != pages.device):
        raise FormatError(
            f"paged cache: {name}_scale is {scale.dtype} {list(scale.shape)} on {scale.device}",
            hint=f"give one float32 on {pages.device}",
        )


def allocate_pages(
    fmt: KVFormat, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor | None]:
    """Zeroed pages [num_pages, page_size, num_kv_heads, head_dim (or half)] and their block scales, head-major."""
    if head_dim % BLOCK:
        raise FormatError(f"paged cache: head dimension {head_dim}", hint="give a multiple of 16")
    columns = head_dim // 2 if fmt is KVFormat.NVFP4 else head_dim

    def zeros(width: int, stored: torch.dtype) -> Tensor:
        # zeros of bytes: float8 has no fill on some backends
        size = num_pages, num_kv_heads, page_size, width * stored.itemsize
        return _zeros(math.prod(size), device).view(size).view(stored).transpose(1, 2)

    pages = zeros(columns, _STORED.get(fmt, dtype))
    return pages, zeros(head_dim // BLOCK, torch.float8_e4m3fn) if fmt is KVFormat.NVFP4 else None


def _zeros(num_bytes: int, device: str) -> Tensor:
    """uint8 [num_bytes]. On the CPU memory comes as it is touched: a large cache takes what is used of it."""
    if torch.device(device).type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    whole = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    begin = -whole.data_ptr() % _ALIGNMENT
    return whole[begin : begin + num_bytes]


def allocate(
    fmt: KVFormat,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> PagedCache:
    """An empty cache of that size. Scales are those of calibration; a BITS16 cache has none and ignores them."""
    if min(num_pages, num_kv_heads) < 1:
        raise UsageError(f"paged cache: {num_pages} pages of {num_kv_heads} heads", hint="give at least one of each")
    sides = []
    for scale in (k_scale, v_scale):
        pages, block_scale = allocate_pages(fmt, num_pages, page_size, num_kv_heads, head_dim, dtype, device)
        has_scale = fmt is not KVFormat.BITS16
        sides.append((pages, block_scale, torch.tensor(scale, device=device) if has_scale else None))
    (k, k_block_scale, k_scale_), (v, v_block_scale, v_scale_) = sides
    return PagedCache(fmt, k, v, k_block_scale, v_block_scale, k_scale_, v_scale_, dtype)


def dequantize_pages(fmt: KVFormat, pages: Tensor, block_scale: Tensor | None, scale: Tensor | None) -> Tensor:
    """[num_pages, page_size, num_kv_heads, D] float32: what the pages stand for."""
    if fmt is KVFormat.BITS16:
        return pages.float()
    assert scale is not None
    if fmt is KVFormat.FP8:
        return pages.float() * scale
    assert block_scale is not None
    return decode_packed(pages.contiguous(), block_scale.contiguous(), scale)


@dataclass(frozen=True)
class LatentCache:
    """What multi-head latent attention keeps of a token: a latent, which is key and value of every head, and a key
    part that carries the position.

    pages        [num_pages, page_size, latent_dim + rope_dim], stored as PagedCache's; the latent comes first
    block_scale  float8_e4m3fn [num_pages, page_size, (latent_dim + rope_dim) / 16], NVFP4 only
    scale        float32 0-d multiplier, None for BITS16
    rope_dim     elements of the part with positions; it and the latent are powers of two
    """

    format: KVFormat
    pages: Tensor
    block_scale: Tensor | None
    scale: Tensor | None
    rope_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.pages.dim() != 3 or (self.block_scale is not None and self.block_scale.dim() != 3):
            raise FormatError(
                f"latent cache: pages are {list(self.pages.shape)}", hint="give [num_pages, tokens, width]"
            )
        block_scale = None if self.block_scale is None else self.block_scale.unsqueeze(2)
        check_pages(self.format, self.pages.unsqueeze(2), block_scale, self.scale, self.dtype, "pages")
        for name, size in (("latent", self.latent_dim), ("rope", self.rope_dim)):
            if size < 32 or size & (size - 1):
                raise FormatError(f"latent cache: {name} of {size} elements", hint="both are powers of two, 32 or more")

    @property
    def page_size(self) -> int:
        return self.pages.shape[1]

    @property
    def latent_dim(self) -> int:
        return self.pages.shape[2] * (2 if self.format is KVFormat.NVFP4 else 1) - self.rope_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, block scales included."""
        parts = [t for t in (self.pages, self.block_scale) if t is not None]
        return sum(t.shape[2] * t.element_size() for t in parts)
