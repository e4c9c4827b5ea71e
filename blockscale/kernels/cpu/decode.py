"""A decoder's work besides its linears on the CPU, in fp32: where one token's time is that of torch's calls.

Each function gives None where it does not serve the operands, or where the kernels cannot be built: torch does then.
A row's numbers are the same in any batch, and in `layers`, which calls the same C functions.
"""

import ctypes
from ctypes import byref, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from blockscale.errors import BlockscaleError, FormatError
from blockscale.kernels.checks import check_contiguous, check_dtype, check_shape
from blockscale.kernels.cpu.library import library
from blockscale.kernels.paged_cache import KVFormat, PagedCache

LANES = 16
_OP = "attention on the CPU"


_SIZES = ("num_sequences", "num_pages", "table_width", "q_stride", "table_stride", "page_stride", "head_stride")
_OUT_OF_BOUNDS = 2


class Attention(ctypes.Structure):
    """struct attention of calls.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "k", "v", "table", "lengths", "sinks")),
        *((name, c_int64) for name in _SIZES),
        *((n, c_int32) for n in ("num_heads", "num_kv_heads", "head_dim", "page_size", "window", "threads")),
        ("scale", c_float),
        ("softcap", c_float),
    )


def attention_decode(
    q: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """fp32 [B, H, D]: as `ops.attention.attention_decode`, of fp32 queries and a cache in bfloat16.

    FormatError for a table that does not name a page of the cache for every token.
    """
    built = library()
    k, v, dim = cache.k, cache.v, cache.head_dim
    is_laid_out = k.stride(1) == dim and k.stride() == v.stride()
    if built is None or cache.format is not KVFormat.BITS16 or k.dtype != torch.bfloat16 or not is_laid_out:
        return None
    if q.dtype != torch.float32 or dim % LANES:
        return None
    check_shape(_OP, "q", q, (lengths.shape[0], None, dim))
    for name, tensor in (("page_table", page_table), ("lengths", lengths)):
        check_dtype(_OP, name, tensor, (torch.int32,))
    check_contiguous(_OP, "lengths", lengths)
    check_shape(_OP, "page_table", page_table, (lengths.shape[0], None))
    if q.stride(2) != 1 or q.stride(1) != dim or page_table.stride(1) != 1:
        q, page_table = q.contiguous(), page_table.contiguous()
    out = torch.empty(q.shape)
    logits = None if sinks is None else sinks.float().contiguous()
    call = Attention(
        q.data_ptr(),
        out.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        page_table.data_ptr(),
        lengths.data_ptr(),
        None if logits is None else logits.data_ptr(),
        q.shape[0],
        cache.num_pages,
        page_table.shape[1],
        q.stride(0),
        page_table.stride(0),
        k.stride(0),
        k.stride(2),
        q.shape[1],
        cache.num_kv_heads,
        dim,
        cache.page_size,
        window,
        torch.get_num_threads(),
        scale,
        softcap,
    )
    failure = built.blockscale_attention(byref(call))
    if failure == _OUT_OF_BOUNDS:
        raise FormatError(
            f"{_OP}: a length or a page outside of a table [.., {page_table.shape[1]}] of {cache.num_pages} pages",
            hint="the table names a page of the cache for every token",
        )
    if failure:
        raise BlockscaleError(f"{_OP}: out of memory", hint="use a smaller batch")
    return out


class Pages(ctypes.Structure):
    """struct pages of calls.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "k_pages", "v_pages", "slots")),
        *((name, c_int64) for name in ("m", "k_stride", "v_stride", "num_slots")),
        *((name, c_int64) for name in ("page_stride", "place_stride", "head_stride")),
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "page_size")),
    )


def write_pages(cache: PagedCache, k: Tensor, v: Tensor, slots: Tensor) -> bool:
    """Writes fp32 k and v [T, num_kv_heads, D] to slots int64 [T] of a cache in bfloat16. False: nothing was written.

    FormatError for a slot outside of the cache.
    """
    built, dim = library(), cache.head_dim
    if built is None or cache.k.dtype != torch.bfloat16 or k.dtype != torch.float32 or v.dtype != torch.float32:
        return False
    if cache.k.stride() != cache.v.stride() or cache.k.stride(3) != 1:
        return False
    shape = (slots.shape[0], cache.num_kv_heads, dim)
    check_shape(_OP, "k", k, shape)
    check_shape(_OP, "v", v, shape)
    check_dtype(_OP, "slots", slots, (torch.int64,))
    check_contiguous(_OP, "slots", slots)
    k, v = (x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous() for x in (k, v))
    call = Pages(
        *(tensor.data_ptr() for tensor in (k, v, cache.k, cache.v, slots)),
        slots.shape[0],
        k.stride(0),
        v.stride(0),
        cache.num_pages * cache.page_size,
        *cache.k.stride()[:3],
        cache.num_kv_heads,
        dim,
        cache.page_size,
    )
    if built.blockscale_write_pages(byref(call)):
        raise FormatError(
            f"{_OP}: a slot outside of {cache.num_pages} pages of {cache.page_size}",
            hint="a slot is page * page_size + place",
        )
    return True


class Norm(ctypes.Structure):
    """struct norm of calls.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "y")),
        ("m", c_int64),
        ("n", c_int64),
        ("epsilon", c_float),
        ("threads", c_int32),
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor | None:
    """fp32 like x [..., N]: x / rms(x) * weight [N]; a row's numbers are the same in any batch."""
    built = library()
    n = weight.shape[0]
    if built is None or x.dtype != torch.float32 or weight.dtype != torch.float32 or x.shape[-1] != n:
        return None
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(x.shape)
    num_rows = x.numel() // n if n else 0
    call = Norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), num_rows, n, epsilon, torch.get_num_threads())
    built.blockscale_rms_norm(byref(call))
    return y


class Turn(ctypes.Structure):
    """struct turn of calls.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "cos", "sin")),
        *((name, c_int64) for name in ("m", "x_stride", "out_stride")),
        *((name, c_int32) for name in ("num_heads", "head_dim", "half", "threads")),
    )


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """fp32 like x [T, H, D]: of each head the first R elements, x * cos + (x with its halves swapped) * sin.

    cos, sin  fp32 [T, 1, R], contiguous, R even and at most D; the sign is in `sin`
    """
    built = library()
    if built is None or x.dtype != torch.float32 or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return None
    num, heads, dim = x.shape
    size = cos.shape[-1]
    if cos.shape != (num, 1, size) or sin.shape != cos.shape or size % 2 or size > dim:
        return None
    if not (cos.is_contiguous() and sin.is_contiguous()):
        return None
    if x.stride(2) != 1 or x.stride(1) != dim:
        x = x.contiguous()
    out = torch.empty(num, heads, dim)
    call = Turn(
        *(tensor.data_ptr() for tensor in (x, out, cos, sin)),
        num,
        x.stride(0),
        out.stride(0),
        heads,
        dim,
        size // 2,
        torch.get_num_threads(),
    )
    built.blockscale_turn(byref(call))
    return out


class Gate(ctypes.Structure):
    """struct gate of calls.h."""

    _fields_ = (("x", c_void_p), ("y", c_void_p), ("m", c_int64), ("n", c_int64), ("threads", c_int32))


def silu_gate(x: Tensor) -> Tensor | None:
    """fp32 [..., N]: silu(gate) * up of x [..., 2 N], gates first; silu to 4 units in the last place."""
    built = library()
    if built is None or x.dtype != torch.float32 or x.shape[-1] % 2:
        return None
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], x.shape[-1] // 2)
    call = Gate(x.data_ptr(), y.data_ptr(), y.numel() // max(y.shape[-1], 1), y.shape[-1], torch.get_num_threads())
    built.blockscale_gate(byref(call))
    return y
