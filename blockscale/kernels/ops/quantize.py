"""Tensors to NVFP4 and FP8 as a model runs: activations, alone or behind what comes before them, weights, KV caches."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blockscale.errors import UsageError
from blockscale.kernels.device import describe
from blockscale.kernels.ops.library import cache_parts, define
from blockscale.kernels.paged_cache import KVFormat, PagedCache
from blockscale.kernels.select import Kernel, Op, choose

_Pair = tuple[Tensor, Tensor]


def quantize_nvfp4(
    x: Tensor, global_scale: Tensor | None = None, *, four_over_six: bool = False, swizzled: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] (bf16, fp16, fp32) -> packed uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16], global_scale.

    global_scale   fp32 0-d, static; None takes that of the finite values' amax
    four_over_six  each block's amax becomes 6 or, where that errs less, 4
    swizzled       block_scale is 1-D in the 128x4 layout of tensor cores
    """
    if global_scale is None:
        return _DYNAMIC(x, four_over_six, swizzled)
    packed, block_scale = _STATIC(x, global_scale, four_over_six, swizzled)
    return packed, block_scale, global_scale


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    global_scale: Tensor,
    *,
    epsilon: float = 1e-6,
    residual: Tensor | None = None,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(packed, block_scale, x + residual or None): NVFP4 of RMSNorm(x [+ residual]) * weight (1 + weight)."""
    packed, block_scale, total = _NORM(x, weight, global_scale, epsilon, residual, unit_offset)
    return packed, block_scale, None if residual is None else total


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    global_scale: Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> _Pair:
    """(packed, block_scale): NVFP4 of activation(gate) * up; silu, gelu_tanh, or clamped (gpt-oss)."""
    return _GATED(gate, up, global_scale, activation, alpha, limit)


def hadamard_quantize(x: Tensor, global_scale: Tensor, size: int) -> _Pair:
    """(packed, block_scale): NVFP4 of x rotated in blocks of `size` 16, 32, 64 or 128 along K."""
    return _HADAMARD(x, global_scale, size)


def quantize_weight_sweep(weight: Tensor, global_scale: Tensor) -> _Pair:
    """(packed, block_scale): NVFP4 of a weight with the block scales of least squared error.

    global_scale  fp32 0-d with headroom: amax / (6 * 256)
    """
    return _SWEEP(weight, global_scale)


def quantize_kv(cache: PagedCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """k, v [T, num_kv_heads, D] into the pages of `cache`.

    slots  int64 [T]: page * page_size + place in the page; what lies outside the cache is skipped
    """
    _KV(*cache_parts(cache), k, v, slots)


@cache
def launcher(op: Op, kernel: Kernel) -> Callable[..., Any]:
    """The function of a kernel, with the arguments of the op; QUANTIZE_NVFP4 gives the global scale back, too."""
    if kernel is Kernel.CPU_QUANTIZE:
        return _cpu_quantize
    if kernel is Kernel.TORCH:
        from blockscale.kernels.reference import kv, quantize

        plain: dict[Op, Callable[..., Any]] = {
            Op.QUANTIZE_NVFP4: quantize.quantize_nvfp4,
            Op.RMS_NORM_QUANTIZE: quantize.rms_norm_quantize,
            Op.SILU_MUL_QUANTIZE: quantize.silu_mul_quantize,
            Op.HADAMARD_QUANTIZE: quantize.hadamard_quantize,
            Op.QUANTIZE_WEIGHT_SWEEP: quantize.quantize_weight_sweep,
            Op.QUANTIZE_KV: kv.quantize_kv,
        }
        return plain[op]
    from blockscale.kernels.triton.hadamard_quantize import hadamard_quantize as hadamard
    from blockscale.kernels.triton.kv_quantize import quantize_kv as kv_pages
    from blockscale.kernels.triton.weight_sweep import quantize_weight_sweep as sweep

    functions: dict[Op, Callable[..., Any]] = {
        Op.QUANTIZE_NVFP4: _triton_quantize,
        Op.RMS_NORM_QUANTIZE: _triton_norm,
        Op.SILU_MUL_QUANTIZE: _triton_gated,
        Op.HADAMARD_QUANTIZE: hadamard,
        Op.QUANTIZE_WEIGHT_SWEEP: sweep,
        Op.QUANTIZE_KV: kv_pages,
    }
    return functions[op]


def _triton_quantize(x: Tensor, global_scale: Tensor | None = None, **options: bool) -> tuple[Tensor, Tensor, Tensor]:
    from blockscale.kernels.triton.quantize import quantize, quantize_dynamic

    if global_scale is None:
        return quantize_dynamic(x, **options)
    return (*quantize(x, global_scale, **options), global_scale)


def _triton_norm(
    x: Tensor, weight: Tensor, global_scale: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    from blockscale.kernels.triton.norm_quantize import rms_norm_quantize as norm

    made = norm(x, weight, global_scale, **options)
    return made.packed, made.block_scale, made.residual


def _triton_gated(
    gate: Tensor, up: Tensor, global_scale: Tensor, *, activation: str, alpha: float, limit: float
) -> _Pair:
    from blockscale.kernels.triton.silu_quantize import Gate
    from blockscale.kernels.triton.silu_quantize import silu_mul_quantize as gated

    try:
        kind = Gate(activation)
    except ValueError:
        names = ", ".join(a.value for a in Gate)
        raise UsageError(f"no activation '{activation}'", hint=names) from None
    return gated(gate, up, global_scale, activation=kind, alpha=alpha, limit=limit)


def _cpu_quantize(
    x: Tensor, global_scale: Tensor | None = None, *, four_over_six: bool = False, swizzled: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    from blockscale.kernels.cpu.quantize import quantize_nvfp4 as in_c
    from blockscale.kernels.reference.quantize import quantize_nvfp4 as in_torch

    if four_over_six or swizzled:  # the layout of tensor cores, and a rule of activations on GPUs
        return in_torch(x, global_scale, four_over_six=four_over_six, swizzled=swizzled)
    return in_c(x, global_scale)


def _run(op: Op, x: Tensor) -> Callable[..., Any]:
    return launcher(op, choose(op, describe(x.device)).kernel)


def _dynamic(x: Tensor, four_over_six: bool, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _run(Op.QUANTIZE_NVFP4, x)(x, None, four_over_six=four_over_six, swizzled=swizzled)


def _static(x: Tensor, global_scale: Tensor, four_over_six: bool, swizzled: bool) -> _Pair:
    run = _run(Op.QUANTIZE_NVFP4, x)
    packed, block_scale, _ = run(x, global_scale, four_over_six=four_over_six, swizzled=swizzled)
    return packed, block_scale


def _norm(
    x: Tensor, weight: Tensor, global_scale: Tensor, epsilon: float, residual: Tensor | None, unit_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    packed, block_scale, total = _run(Op.RMS_NORM_QUANTIZE, x)(
        x, weight, global_scale, epsilon=epsilon, residual=residual, unit_offset=unit_offset
    )
    return packed, block_scale, x.new_empty(0) if total is None else total


def _gated(gate: Tensor, up: Tensor, global_scale: Tensor, activation: str, alpha: float, limit: float) -> _Pair:
    run = _run(Op.SILU_MUL_QUANTIZE, gate)
    return run(gate, up, global_scale, activation=activation, alpha=alpha, limit=limit)


def _hadamard(x: Tensor, global_scale: Tensor, size: int) -> _Pair:
    return _run(Op.HADAMARD_QUANTIZE, x)(x, global_scale, size)


def _sweep(weight: Tensor, global_scale: Tensor) -> _Pair:
    return _run(Op.QUANTIZE_WEIGHT_SWEEP, weight)(weight, global_scale)


def _kv(
    k_pages: Tensor,
    v_pages: Tensor,
    k_block_scale: Tensor | None,
    v_block_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    fmt: str,
    dtype: torch.dtype,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> None:
    pages = PagedCache(KVFormat(fmt), k_pages, v_pages, k_block_scale, v_block_scale, k_scale, v_scale, dtype)
    _run(Op.QUANTIZE_KV, k_pages)(pages, k, v, slots)


def _fake_pair(x: Tensor, *others: object) -> _Pair:
    *lead, k = x.shape
    return x.new_empty(*lead, k // 2, dtype=torch.uint8), x.new_empty(*lead, k // 16, dtype=torch.float8_e4m3fn)


def _fake_static(x: Tensor, global_scale: Tensor, four_over_six: bool, swizzled: bool) -> _Pair:
    packed, block_scale = _fake_pair(x)
    if swizzled:
        num_rows = x.numel() // x.shape[-1]
        size = (num_rows + 127) // 128 * 128 * ((x.shape[-1] // 16 + 3) // 4 * 4)
        block_scale = x.new_empty(size, dtype=torch.float8_e4m3fn)
    return packed, block_scale


def _fake_dynamic(x: Tensor, four_over_six: bool, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (*_fake_static(x, x, four_over_six, swizzled), x.new_empty((), dtype=torch.float32))


def _fake_norm(
    x: Tensor, weight: Tensor, global_scale: Tensor, epsilon: float, residual: Tensor | None, unit_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (*_fake_pair(x), x.new_empty(0) if residual is None else x.new_empty(x.shape))


def _fake_kv(*operands: object) -> None:
    return None


_RULE = "bool four_over_six, bool swizzled"
_PAIR = "-> (Tensor, Tensor)"
_DYNAMIC = define("quantize_nvfp4", f"(Tensor x, {_RULE}) -> (Tensor, Tensor, Tensor)", _dynamic, _fake_dynamic)
_STATIC = define("quantize_nvfp4_static", f"(Tensor x, Tensor global_scale, {_RULE}) {_PAIR}", _static, _fake_static)
_NORM = define(
    "rms_norm_quantize",
    "(Tensor x, Tensor weight, Tensor global_scale, float epsilon, Tensor? residual, bool unit_offset) "
    "-> (Tensor, Tensor, Tensor)",
    _norm,
    _fake_norm,
)
_GATED = define(
    "silu_mul_quantize",
    f"(Tensor gate, Tensor up, Tensor global_scale, str activation, float alpha, float limit) {_PAIR}",
    _gated,
    _fake_pair,
)
_HADAMARD = define("hadamard_quantize", f"(Tensor x, Tensor global_scale, int size) {_PAIR}", _hadamard, _fake_pair)
_SWEEP = define("quantize_weight_sweep", f"(Tensor weight, Tensor global_scale) {_PAIR}", _sweep, _fake_pair)
_KV = define(
    "quantize_kv",
    "(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!)? k_block_scale, Tensor(d!)? v_block_scale, "
    "Tensor? k_scale, Tensor? v_scale, str format, ScalarType dtype, Tensor k, Tensor v, Tensor slots) -> ()",
    _kv,
    _fake_kv,
)
