"""Triton kernels on the CPU, in the same process as compiled ones: Triton's interpreter, repaired.

    linear = interpreted("blockscale.kernels.triton.linear")
    y = linear.linear(x, weight)  # CPU tensors; the kernels inside run in the interpreter

`interpreted` imports a second copy of a module of `blockscale.kernels.triton` (and of those it imports from that
package) whose kernels are interpreted; the module that everyone else imports stays compiled. TRITON_INTERPRET need
not be set. What is repaired, of Triton 3.6.0:

* `range` over a kernel argument: numpy 2.4 refuses int() of its one-element arrays;
* bfloat16, which the interpreter keeps as raw bits: conversions from fp32 round to nearest even (it truncates) and
  keep subnormals (it flushes), arithmetic and comparisons take values (it takes bits), and so do `tl.dot` and sums;
* float8: conversions round to nearest even and saturate, as the hardware's do;
* min, max and clamp let the number win over NaN where the kernel asks for nothing else, as the hardware does;
* a function called by a kernel leaves triton.language as it was (the stock one does not: nothing compiles after it),
  and does not patch it again, which takes most of the interpreter's time;
* fma rounds once;
* of inline assembly, the one instruction that `decode` needs: two 16-bit products at a time.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITCallable

# Triton imports it at the first launch; with interpreted functions in tl it would refuse to be
importlib.import_module("triton.experimental.gluon")

_PACKAGE = "blockscale.kernels.triton"
_modules: dict[str, ModuleType] = {}  # interpreted copies, by name

_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def interpreted(name: str) -> ModuleType:
    """The module `name` of blockscale.kernels.triton with its kernels run by the interpreter on CPU tensors."""
    if name not in _modules:
        parent = importlib.import_module("blockscale.kernels")
        compiled = _take_modules()
        package = vars(parent).get("triton")
        sys.modules.update(_modules)
        try:
            with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
                importlib.import_module(name)
        finally:
            _modules.update(_take_modules())
            sys.modules.update(compiled)
            if package is not None:
                parent.triton = package
            else:
                vars(parent).pop("triton", None)
    return _modules[name]


def interpret(function: Callable[..., None]) -> Any:
    """A kernel written as a plain function, for the interpreter: `interpret(kernel)[grid](x, y, BLOCK=64)`."""
    return stock.InterpretedFunction(function)


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == _PACKAGE or name.startswith(_PACKAGE + ".")]
    return {name: sys.modules.pop(name) for name in names}


# --- tl.sum, tl.max, tl.zeros ...: kernels of triton.language itself, compiled at its import -------------------------


def _twins() -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, interpreted twin) of every compiled function that triton.language offers."""
    made: dict[Any, Any] = {}
    standard, random = sys.modules["triton.language.standard"], sys.modules["triton.language.random"]
    for owner in (standard, random, tl, tl.core.tensor):
        for name, function in list(vars(owner).items()):
            if isinstance(function, JITCallable) and hasattr(function, "fn") and not name.startswith("__"):
                twin = made.setdefault(function.fn, stock.InterpretedFunction(function.fn))
                yield owner, name, _method(twin) if owner is tl.core.tensor else twin


def _method(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


_TWINS = list(_twins())


@contextmanager
def _standard_library() -> Iterator[None]:
    """tl's own functions interpreted while a kernel runs."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in _TWINS]
    for owner, name, twin in _TWINS:
        setattr(owner, name, twin)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


# --- values of bf16 and fp8 -----------------------------------------------------------------------------------------


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """uint16 bits -> fp32."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 -> uint16 bits, to nearest even; NaN becomes 0x7FFF, as cvt.rn.bf16.f32 gives."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _to_fp32(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype == tl.bfloat16:
        return bf16_to_fp32(data)
    if dtype in _FP8:
        bits = torch.from_numpy(np.ascontiguousarray(data).astype(np.uint8))
        return bits.view(_FP8[dtype]).float().numpy()
    return data.astype(np.float32)


def _from_fp32(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype == tl.bfloat16:
        return fp32_to_bf16(values)
    if dtype in _FP8:
        largest = torch.finfo(_FP8[dtype]).max
        finite = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp(-largest, largest)
        return finite.to(_FP8[dtype]).view(torch.uint8).numpy()
    return values.astype(stock._get_np_dtype(dtype))


def _is_repaired(dtype: tl.dtype) -> bool:
    return dtype == tl.bfloat16 or dtype in _FP8


# --- the builder's operations ---------------------------------------------------------------------------------------

_Builder = stock.InterpreterBuilder
_Handle = stock.TensorHandle
_binary_op, _unary_op, _cast, _convert = _Builder.binary_op, _Builder.unary_op, _Builder.cast_impl, stock._convert_float
_reduce_sum, _run = stock.ReduceOps.sum, stock.GridExecutor.__call__
_patch_tensor = stock._patch_lang_tensor


def _repaired_binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    dtype = lhs.dtype.scalar
    with np.errstate(all="ignore"):
        if dtype != tl.bfloat16:
            return _binary_op(self, lhs, rhs, op)
        result = op(bf16_to_fp32(lhs.data), bf16_to_fp32(rhs.data))
        return _Handle(result if result.dtype == np.bool_ else fp32_to_bf16(result), dtype)


def _repaired_unary(self: Any, arg: Any, op: Any) -> Any:
    with np.errstate(all="ignore"):
        if arg.dtype.scalar != tl.bfloat16:
            return _unary_op(self, arg, op)
        return _Handle(fp32_to_bf16(op(bf16_to_fp32(arg.data))), tl.bfloat16)


def _repaired_cast(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    with np.errstate(all="ignore"):
        if not (_is_repaired(source) or _is_repaired(target)):
            return _cast(self, src, dst_type)
        return _Handle(_from_fp32(_to_fp32(src.data, source), target), target)


def _repaired_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    return _repaired_cast(self, src, dst_type)


def _repaired_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = a.data, b.data
    if a.dtype.scalar.is_floating():
        left, right = _to_fp32(left, a.dtype.scalar), _to_fp32(right, b.dtype.scalar)
    with np.errstate(all="ignore"):
        return _Handle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _repaired_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    with np.errstate(all="ignore"):
        if z.dtype.scalar == tl.bfloat16:
            exact = bf16_to_fp32(x.data).astype(np.float64) * bf16_to_fp32(y.data) + bf16_to_fp32(z.data)
            return _Handle(fp32_to_bf16(exact), tl.bfloat16)
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return _Handle(wide.astype(z.data.dtype), z.dtype.scalar)


class _Results:
    def __init__(self, *results: Any) -> None:
        self.results = results

    def get_result(self, index: int) -> Any:
        return self.results[index]


def _repaired_asm(self: Any, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Any:
    found = re.search(r"fma\.rn\.(bf16|f16)x2 \$0, \$1, \$2, z;", asm)
    if not found or "mov.b32 z, 0x80008000" not in asm or constraints != "=r,r,r":
        raise NotImplementedError(f"inline assembly: {asm}")
    halves = []
    for shift in (0, 16):
        left, right = (((v.data.view(np.uint32) >> shift) & 0xFFFF).astype(np.uint16) for v in values)
        with np.errstate(all="ignore"):
            if found[1] == "bf16":
                product = fp32_to_bf16(bf16_to_fp32(left) * bf16_to_fp32(right))
            else:
                product = (left.view(np.float16) * right.view(np.float16)).view(np.uint16)
        halves.append(product.astype(np.uint32) << shift)
    return _Results(_Handle((halves[0] | halves[1]).view(np.int32), tl.int32))


def _repaired_clamp(self: Any, arg: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
    if propagate_nans == stock._ir.PROPAGATE_NAN.ALL:
        return self.ternary_op(arg, low, high, np.clip)
    return self.ternary_op(arg, low, high, lambda x, a, b: np.fmin(np.fmax(x, a), b))


def _repaired_sum(self: Any, input: Any) -> Any:
    if input.dtype != tl.bfloat16:
        return _reduce_sum(self, input)
    total = np.sum(bf16_to_fp32(input.handle.data), axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(fp32_to_bf16(np.asarray(total)), tl.bfloat16)


def _repaired_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_all(function: Any) -> Any:
    """As the stock one, for tl and tl.core whatever the function sees: those it calls then need no patch of theirs."""
    scope = stock._LangPatchScope()
    for module in (tl, tl.core):
        stock._patch_builtin(module, stock.interpreter_builder, scope)
        stock._patch_builtin(module.tensor, stock.interpreter_builder, scope)
        stock._patch_lang_core(module, scope)
    stock._patch_builtin(tl.math, stock.interpreter_builder, scope)
    stock._patch_lang_tensor(tl.core.tensor, scope)
    stock._patch_builtin(tl.core.tensor_descriptor_base, stock.interpreter_builder, scope)
    return scope


def _repaired_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise stock.InterpreterError(repr(error)) from error


def _repaired_run(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _standard_library():
        return _run(self, *args, **kwargs)


def _repair() -> None:
    """For the whole test process; compiled kernels know nothing of these classes."""
    _Builder.binary_op, _Builder.unary_op = _repaired_binary, _repaired_unary
    _Builder.cast_impl, _Builder.create_fp_to_fp = _repaired_cast, _repaired_fp_to_fp
    _Builder.create_dot, _Builder.create_fma, _Builder.create_clampf = _repaired_dot, _repaired_fma, _repaired_clamp
    _Builder.create_inline_asm = _repaired_asm
    _Builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    _Builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    _Builder.get_bf16 = lambda self, value: _Handle(fp32_to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)
    stock.ReduceOps.sum = _repaired_sum
    stock._patch_lang_tensor, stock._patch_lang = _repaired_tensor, _patch_all
    stock.InterpretedFunction.__call__ = _repaired_call
    stock.GridExecutor.__call__ = _repaired_run


_repair()
