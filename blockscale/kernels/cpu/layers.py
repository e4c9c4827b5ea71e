"""All layers of a decoder for a few new tokens in one call, on the CPU in fp32.

At that size the products take some microseconds each, and so do the calls from Python between them. The C functions are
those that the layers call one by one elsewhere: the numbers are the same to the bit.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import BlockscaleError, FormatError
from blockscale.kernels.checks import check_contiguous, check_dtype, check_shape
from blockscale.kernels.cpu.decode import LANES
from blockscale.kernels.cpu.library import FORMAT_CODES, library
from blockscale.kernels.paged_cache import KVFormat, PagedCache
from blockscale.kernels.prepare import Layout, PreparedWeight

_OP = "decoder layers on the CPU"
_BFLOAT16 = -1
_OUT_OF_BOUNDS = 2


@dataclass(frozen=True)
class Matrix:
    """weight  PreparedWeight in the layout of the CPU, or bfloat16 [N, K]
    bias    fp32 [N]
    """

    weight: PreparedWeight | Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """Of a layer x + attention(norm(x)), then x + down(silu(gate) * up) of norm(x). Norms and sinks are fp32.

    window  tokens that a query sees; 0 for all
    """

    input_norm: Tensor
    middle_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    sinks: Tensor | None
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    window: int


@dataclass(frozen=True)
class Shape:
    """What all layers have in common. softcap: 0 for none."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    scale: float
    softcap: float


class _Matrix(ctypes.Structure):
    """struct matrix of layers.c."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("global_scale", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int64),
    )


class _Layer(ctypes.Structure):
    """struct layer of layers.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "middle_norm", "q_norm", "k_norm", "sinks")),
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        ("window", c_int64),
    )


_SIZES = (
    *("num_layers", "m", "hidden", "inner", "num_pages", "table_width"),
    *("table_stride", "page_stride", "place_stride", "head_stride"),
)
_SMALL_SIZES = ("num_heads", "num_kv_heads", "head_dim", "half", "local_half", "page_size", "threads")


class _Decode(ctypes.Structure):
    """struct decode of layers.c."""

    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("k", POINTER(c_void_p)),
        ("v", POINTER(c_void_p)),
        *((name, c_void_p) for name in ("x", "cos", "sin", "local_cos", "local_sin", "slots", "table", "lengths")),
        *((name, c_int64) for name in _SIZES),
        *((name, c_int32) for name in _SMALL_SIZES),
        *((name, c_float) for name in ("epsilon", "scale", "softcap")),
    )


@dataclass(frozen=True)
class DecodeLayers:
    """Weights by their addresses. `weights` keeps them; they may be written, but not moved."""

    weights: tuple[LayerWeights, ...]
    shape: Shape
    table: ctypes.Array[_Layer]

    def __call__(
        self,
        x: Tensor,
        caches: Sequence[PagedCache],
        turns: tuple[Tensor, Tensor],
        local_turns: tuple[Tensor, Tensor],
        page_table: Tensor,
        lengths: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """fp32 [B, hidden]: what comes out of the last layer, of B tokens. In each layer all of their keys and values
        are written before any of them attends: tokens of one sequence may stand beside one another.

        x                   fp32 [B, hidden]
        caches              one a layer, all that `serves_caches`
        turns, local_turns  cos and sin, fp32 [B, 1, R] each: see `decode.turn`; the second for layers with a window
        page_table          int32 [B, P]
        lengths             int32 [B]: tokens that each attends to, itself included
        slots               int64 [B]: page * page_size + place of the new token
        FormatError for a table or a slot that names no page of the caches.
        """
        built, shape, cache, num = library(), self.shape, caches[0], x.shape[0]
        assert built is not None  # or there would be no layout of the CPU
        if len(caches) != len(self.weights):
            raise FormatError(f"{_OP}: {len(caches)} caches for {len(self.weights)} layers", hint="give one a layer")
        check_shape(_OP, "a cache", cache.k, (None, None, shape.num_kv_heads, shape.head_dim))
        check_dtype(_OP, "x", x, (torch.float32,))
        check_shape(_OP, "x", x, (num, shape.hidden))
        for name, tensor, dtype, size in (
            ("lengths", lengths, torch.int32, (num,)),
            ("page_table", page_table, torch.int32, (num, None)),
            ("slots", slots, torch.int64, (num,)),
        ):
            check_dtype(_OP, name, tensor, (dtype,))
            check_shape(_OP, name, tensor, size)
            check_contiguous(_OP, name, tensor)
        for cos_or_sin in (*turns, *local_turns):
            check_dtype(_OP, "turns", cos_or_sin, (torch.float32,))
            check_shape(_OP, "turns", cos_or_sin, (num, 1, None))
            check_contiguous(_OP, "turns", cos_or_sin)
        out = x.clone(memory_format=torch.contiguous_format)
        pages = c_void_p * len(caches)
        call = _Decode(
            self.table,
            pages(*(c.k.data_ptr() for c in caches)),
            pages(*(c.v.data_ptr() for c in caches)),
            *(tensor.data_ptr() for tensor in (out, *turns, *local_turns, slots, page_table, lengths)),
            len(self.weights),
            num,
            shape.hidden,
            shape.inner,
            cache.num_pages,
            page_table.shape[1],
            page_table.stride(0),
            cache.k.stride(0),
            cache.k.stride(1),
            cache.k.stride(2),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            turns[0].shape[-1] // 2,
            local_turns[0].shape[-1] // 2,
            cache.page_size,
            torch.get_num_threads(),
            shape.epsilon,
            shape.scale,
            shape.softcap,
        )
        failure = built.blockscale_decode_layers(byref(call))
        if failure == _OUT_OF_BOUNDS:
            raise FormatError(
                f"{_OP}: a slot, a length or a page outside of a table [.., {page_table.shape[1]}] of "
                f"{cache.num_pages} pages",
                hint="the table names a page of the cache for every token",
            )
        if failure:
            raise BlockscaleError(f"{_OP}: out of memory", hint="use a smaller batch")
        return out

    def serves_caches(self, caches: Sequence[PagedCache]) -> bool:
        """Whether they are of 16 bits in bfloat16 and laid out alike, as `paged_cache.allocate` does it."""
        first, dim = caches[0].k, self.shape.head_dim
        return all(
            cache.format is KVFormat.BITS16
            and cache.k.dtype == torch.bfloat16
            and cache.k.shape == first.shape
            and cache.k.stride() == cache.v.stride() == first.stride()
            and cache.k.stride(1) == dim
            for cache in caches
        )


def decode_layers(weights: Sequence[LayerWeights], shape: Shape) -> DecodeLayers | None:
    """None where a weight or a size is none that these kernels have, or where they could not be built.

    FormatError for tensors of another shape than `shape` says.
    """
    matrices = [matrix for layer in weights for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    if library() is None or shape.head_dim % LANES or not all(map(_is_served, matrices)):
        return None
    for layer in weights:
        _check(layer, shape)
    table = (_Layer * len(weights))()
    for entry, layer in zip(table, weights, strict=True):
        norms = layer.head_norms or (None, None)
        for name, tensor in (
            ("input_norm", layer.input_norm),
            ("middle_norm", layer.middle_norm),
            ("q_norm", norms[0]),
            ("k_norm", norms[1]),
            ("sinks", layer.sinks),
        ):
            setattr(entry, name, _address(tensor))
        for name in ("qkv", "o", "gate_up", "down"):
            setattr(entry, name, _matrix(getattr(layer, name)))
        entry.window = layer.window
    return DecodeLayers(tuple(weights), shape, table)


def _check(layer: LayerWeights, shape: Shape) -> None:
    """C reads what the shape says."""
    hidden, inner, dim = shape.hidden, shape.inner, shape.head_dim
    attended = shape.num_heads * dim
    for name, matrix, n, k in (
        ("qkv", layer.qkv, attended + 2 * shape.num_kv_heads * dim, hidden),
        ("o", layer.o, hidden, attended),
        ("gate_up", layer.gate_up, 2 * inner, hidden),
        ("down", layer.down, hidden, inner),
    ):
        if tuple(matrix.weight.shape) != (n, k):
            raise FormatError(f"{_OP}: {name} is {list(matrix.weight.shape)}", hint=f"{name} must be [{n}, {k}]")
        if matrix.bias is not None:
            check_shape(_OP, f"bias of {name}", matrix.bias, (n,))
    norms = layer.head_norms or ()
    sinks = () if layer.sinks is None else (layer.sinks,)
    vectors = [(layer.input_norm, hidden), (layer.middle_norm, hidden), *((norm, dim) for norm in norms)]
    for vector, size in (*vectors, *((sink, shape.num_heads) for sink in sinks)):
        check_dtype(_OP, "a vector", vector, (torch.float32,))
        check_shape(_OP, "a vector", vector, (size,))
        check_contiguous(_OP, "a vector", vector)


def _is_served(matrix: Matrix) -> bool:
    bias, weight = matrix.bias, matrix.weight
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return False
    if isinstance(weight, PreparedWeight):
        return weight.layout is Layout.CPU
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()


def _matrix(matrix: Matrix) -> _Matrix:
    weight, bias = matrix.weight, _address(matrix.bias)
    if isinstance(weight, Tensor):
        return _Matrix(weight.data_ptr(), bias, None, *weight.shape, _BFLOAT16)
    scale = weight.global_scale.data_ptr()
    return _Matrix(weight.packed.data_ptr(), bias, scale, weight.n, weight.k, FORMAT_CODES[weight.format])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
