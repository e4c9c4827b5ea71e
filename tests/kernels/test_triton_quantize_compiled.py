"""The quantizers compiled for every architecture: wide loads, few registers, no spills."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import triton.language as tl

from blockscale.kernels.triton import (
    hadamard_quantize,
    kv_quantize,
    norm_quantize,
    quantize,
    silu_quantize,
    weight_sweep,
)
from tests.kernels.compiled import TRITON_ARCHS, Compiled, compile_triton

OUTPUTS = {"packed": "*i32", "block_scale": "*u8", "global_scale": "*fp32"}
COMMON = {"FOUR_OVER_SIX": False, "SWIZZLE": False, "LARGEST": 256.0}
STRIDES = ("row_stride", "x_stride", "residual_stride", "gate_stride", "up_stride", "k_token", "k_head", "v_token")


@dataclass(frozen=True)
class Case:
    """One kernel: its pointers, other arguments that are not i32, constants, warps; 16-byte loads that it has at least.

    `most_registers` of a thread: what still lets 16 warps share a multiprocessor.
    """

    kernel: Any
    pointers: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    wide_loads: int
    floats: tuple[str, ...] = ()
    most_registers: int = 128


def _case(kernel: Any, pointers: Mapping[str, str], constants: Mapping[str, Any], *rest: Any, **named: Any) -> Case:
    return Case(kernel, {**OUTPUTS, **pointers}, {**COMMON, **constants}, *rest, **named)


QUANTIZE = {"PARTIALS": 0, "UNSCALED": 2688.0}
GATED = {"gate": "*bf16", "up": "*bf16", "activated": "*bf16"}
NORM = dict.fromkeys(("x", "residual", "weight", "new_residual", "normed"), "*bf16")
KV = {
    **dict.fromkeys(("k", "v"), "*bf16"),
    **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
    **dict.fromkeys(("k_block_scale", "v_block_scale"), "*u8"),
    "slots": "*i64",
}
CASES = {
    "quantize": _case(
        quantize._flat_kernel,
        {"x": "*i32", "partials": "*fp32"},
        {**QUANTIZE, "BLOCKS": 128, "DTYPE": tl.bfloat16, "IS_EVEN": True},
        4,
        4,
        most_registers=64,
    ),
    "quantize_dynamic": _case(
        quantize._flat_kernel,
        {"x": "*i32", "partials": "*fp32"},
        {
            **QUANTIZE,
            "PARTIALS": 64,
            "FOUR_OVER_SIX": True,
            "UNSCALED": 1536.0,
            "BLOCKS": 128,
            "DTYPE": tl.float16,
            "IS_EVEN": False,
        },
        4,
        4,
    ),
    "quantize_strided": _case(
        quantize._quantize_kernel,
        {"x": "*fp16", "partials": "*fp32"},
        {**QUANTIZE, "ROWS": 2, "COLUMNS": 64},
        4,
        2,
    ),
    "quantize_swizzled": _case(
        quantize._quantize_kernel,
        {"x": "*fp32", "partials": "*fp32"},
        {**QUANTIZE, "ROWS": 32, "COLUMNS": 4, "SWIZZLE": True, "LARGEST": 2.0**-8},
        4,
        4,
    ),
    "amax": Case(quantize._amax_kernel, {"x": "*bf16", "partials": "*fp32"}, {"BLOCKS": quantize.AMAX_BLOCKS}, 4, 8),
    "norm": _case(
        norm_quantize._norm_kernel,
        NORM,
        {
            "BLOCKS": 128,
            "IS_WHOLE": True,
            "HAS_RESIDUAL": True,
            "HAS_NORMED": False,
            "UNIT_OFFSET": False,
        },
        4,
        6,
        floats=("epsilon",),
    ),
    "silu": _case(
        silu_quantize._gated_kernel,
        GATED,
        {"ROWS": 1, "COLUMNS": 128, "ACTIVATION": 0, "IS_INTERLEAVED": False, "HAS_ACTIVATED": False},
        4,
        4,
        floats=("alpha", "limit"),
    ),
    "clamped_interleaved": _case(
        silu_quantize._gated_kernel,
        GATED,
        {"ROWS": 1, "COLUMNS": 128, "ACTIVATION": 2, "IS_INTERLEAVED": True, "HAS_ACTIVATED": False},
        4,
        4,
        floats=("alpha", "limit"),
    ),
    "hadamard": _case(
        hadamard_quantize._hadamard_kernel,
        {"x": "*bf16"},
        {"ROWS": 1, "COLUMNS": 128, "SIZE": 128, "FACTOR": 128**-0.5, "LARGEST": 16.0},
        4,
        2,
    ),
    "sweep": Case(
        weight_sweep._sweep_kernel,
        {"weight": "*bf16", **OUTPUTS},
        {"BLOCKS": 128, "LARGEST": 256.0},
        4,
        2,
    ),
    "kv_nvfp4": Case(
        kv_quantize._kv_kernel,
        {**KV, "k_pages": "*i32", "v_pages": "*i32"},
        {"PAGE_SIZE": 16, "BLOCKS_A_HEAD": 8, "BLOCKS": 64, "FORMAT": 2, "LARGEST": 256.0},
        2,
        2,
    ),
    "kv_fp8": Case(
        kv_quantize._kv_kernel,
        {**KV, "k_pages": "*u8", "v_pages": "*u8"},
        {"PAGE_SIZE": 16, "BLOCKS_A_HEAD": 8, "BLOCKS": 64, "FORMAT": 1, "LARGEST": 256.0},
        2,
        2,
    ),
}
FAST = {(name, "sm_90") for name in CASES if name not in ("quantize_dynamic", "quantize_strided", "kv_fp8")}
FAST |= {("quantize", "sm_80"), ("quantize", "sm_120")}


def build(case: Case, arch: str) -> Compiled:
    names = case.kernel.arg_names
    constants = {**case.constants, "IS_CHAINED": int(arch.removeprefix("sm_")) >= 90}
    signature = {n: case.pointers.get(n) or ("fp32" if n in case.floats else "i32") for n in names}
    return compile_triton(
        case.kernel,
        signature,
        {n: value for n, value in constants.items() if n in names},
        arch,
        num_warps=case.num_warps,
        divisible_by_16=tuple(n for n in names if n in case.pointers or n in STRIDES or n == "v_head"),
        enable_fp_fusion=False,
    )


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=[] if (name, arch) in FAST else [pytest.mark.slow])
        for name in CASES
        for arch in TRITON_ARCHS
    ],
)
def test_compiles(name: str, arch: str) -> None:
    case = CASES[name]
    kernel = build(case, arch)
    assert kernel.num_spills == 0
    assert kernel.registers <= case.most_registers
    assert kernel.count("LDG.E.128") + kernel.count("LDG.E.EF.128") >= case.wide_loads
