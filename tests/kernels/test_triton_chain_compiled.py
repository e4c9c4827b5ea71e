"""The small kernels between linears compiled: no spills, and linked by programmatic launches where a GPU knows them."""

from collections.abc import Mapping
from typing import Any

import pytest

from blockscale.kernels.triton import attention_decode, gated, norm, rotary
from tests.kernels.compiled import TRITON_ARCHS, Compiled, compile_triton

POINTERS = {
    **dict.fromkeys(("x", "added", "total", "out", "both", "heads", "q_out", "k_out"), "*bf16"),
    **dict.fromkeys(("weight", "cos", "sin", "q_weight", "k_weight", "k_scale", "v_scale"), "*fp32"),
    "slots": "*i64",
}
FLOATS = ("epsilon", "alpha", "limit")
ROTARY = {"D": 128, "TURNED": 128, "HALF": 64, "REST": 1, "PAGE": 16, "HAS_NORM": True}
CASES: dict[str, tuple[Any, Mapping[str, Any], int]] = {
    "norm": (norm._norm_kernel, {"COLUMNS": 4096, "IS_WHOLE": True, "HAS_ADDED": True}, 8),
    "long_norm": (norm._norm_kernel, {"COLUMNS": 4096, "IS_WHOLE": False, "HAS_ADDED": True}, 8),
    "gated": (gated._gated_kernel, {"COLUMNS": 512, "ACTIVATION": 0}, 4),
    "rotary": (rotary._rotary_kernel, {**ROTARY, "FORMAT": 0}, 1),
    "rotary_fp8": (rotary._rotary_kernel, {**ROTARY, "FORMAT": 1}, 1),
    "rotary_nvfp4": (rotary._rotary_kernel, {**ROTARY, "FORMAT": 2}, 1),
}


def build(name: str, arch: str) -> Compiled:
    kernel, constants, num_warps = CASES[name]
    is_chained = int(arch.removeprefix("sm_")) >= 90
    pages = "*u8" if name == "rotary_fp8" else "*bf16"
    types = {**POINTERS, **dict.fromkeys(("k_pages", "v_pages"), pages), **dict.fromkeys(FLOATS, "fp32")}
    names = kernel.arg_names
    return compile_triton(
        kernel,
        {n: types.get(n, "i32") for n in names},
        {**constants, "IS_CHAINED": is_chained},
        arch,
        num_warps=num_warps,
        divisible_by_16=tuple(
            n for n in names if (n in types and n not in FLOATS) or n.endswith("stride") or n == "num_columns"
        ),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a in ("sm_80", "sm_90") else [pytest.mark.slow]) for a in TRITON_ARCHS]
)
def test_compiles(name: str, arch: str) -> None:
    compiled = build(name, arch)
    assert compiled.stack_bytes == 0
    assert compiled.num_spills == 0
    # beside a block of linear_small that takes 320 times 159 of an SM's registers there is room for it
    assert compiled.registers * 32 * CASES[name][2] <= 65_536 - 320 * 160
    is_chained = int(arch.removeprefix("sm_")) >= 90
    assert compiled.count("ACQBULK") == compiled.count("PREEXIT") == (1 if is_chained else 0)


def test_attention_waits_for_the_pages_that_were_written_before_it() -> None:
    from tests.kernels.test_attention_compiled import BITS16, decode

    assert attention_decode._decode_kernel.arg_names[-1] == "IS_CHAINED"
    compiled = decode("sm_90", BITS16)
    assert compiled.count("ACQBULK") == compiled.count("PREEXIT") == 1
