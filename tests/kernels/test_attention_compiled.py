"""Attention kernels compiled for GPUs that are not here: their instructions, registers and spills."""

from typing import Any

import pytest

from blockscale.kernels.triton import attention_decode, attention_mla, attention_prefill
from tests.kernels.compiled import TRITON_ARCHS, Compiled, compile_triton

BITS16, FP8, NVFP4 = 0, 1, 2
HOPPER_SHARED, SMALL_SHARED = 227 << 10, 99 << 10  # bytes a block may have: sm_90, and sm_86, sm_89 and sm_120

POINTERS = {
    "q_ptr": "*bf16", "out_ptr": "*bf16", "partial_ptr": "*fp32", "state_ptr": "*fp32", "table_ptr": "*i32",
    "length_ptr": "*i32", "cu_ptr": "*i32", "sink_ptr": "*fp32", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32",
    "scale_ptr": "*fp32", "scale": "fp32",
}  # fmt: skip
CACHES = ("k_ptr", "v_ptr", "k_block_ptr", "v_block_ptr", "pages_ptr", "block_ptr")
# Strides of block scales and counts are not multiples of 16; everything else is in the shapes below
NARROW = ("scale", "kb_stride_token", "vb_stride_token", "block_stride_token", "num_heads", "num_sequences")


def build(kernel: Any, arch: str, fmt: int, constexprs: dict[str, Any], num_warps: int) -> Compiled:
    capability = int(arch.removeprefix("sm_"))
    values = {**constexprs, "FORMAT": fmt, "HOW": 2 if capability >= 89 else 1, "ALIGNED": constexprs["ALIGNED"]}
    stored = "*bf16" if fmt == BITS16 else "*u8"
    names = [n for n in kernel.arg_names if n not in values]
    signature = {n: stored if n in CACHES else POINTERS.get(n, "i32") for n in names}
    wide = tuple(n for n in names if n not in NARROW)
    return compile_triton(kernel, signature, values, arch, num_warps=num_warps, divisible_by_16=wide)


def decode(arch: str, fmt: int, head_dim: int = 128, group: int = 8, **changes: Any) -> Compiled:
    padded = attention_decode.padded_head_dim(head_dim)
    values = {
        "D": head_dim, "PADDED": padded, "GROUP": group, "N": 8, "PAGE": 16, "WINDOW": 0, "SOFTCAP": 0.0,
        "HAS_SINK": False, "W": 4, "T": 16, "STAGES": 5, "IS_SPLIT": True, "ALIGNED": 8,
        "IS_CHAINED": int(arch.removeprefix("sm_")) >= 90, **changes,
    }  # fmt: skip
    return build(attention_decode._decode_kernel, arch, fmt, values, values["W"])


def prefill(arch: str, fmt: int, head_dim: int = 128, group: int = 8, **changes: Any) -> Compiled:
    rows, tokens, stages = attention_prefill.default_tile(4096, head_dim, arch in ("sm_90", "sm_100"))
    values = {
        "D": head_dim, "PADDED": attention_decode.padded_head_dim(head_dim), "GROUP": group, "PAGE": 16, "WINDOW": 0,
        "SOFTCAP": 0.0, "HAS_SINK": False, "M": rows, "QUERIES": rows // group, "T": tokens, "STAGES": stages,
        "ALIGNED": 8, "MAX_SEQUENCES": 16, **changes,
    }  # fmt: skip
    return build(attention_prefill._prefill_kernel, arch, fmt, values, 8)


def mla(arch: str, fmt: int) -> Compiled:
    shared = HOPPER_SHARED if arch == "sm_90" else SMALL_SHARED
    rows, tokens, warps, stages = attention_mla.tile(128, shared)
    values = {
        "LATENT": 512, "ROPE": 64, "PAGE": 64, "M": rows, "T": tokens, "STAGES": stages, "IS_SPLIT": True,
        "ALIGNED": 4,
    }  # fmt: skip
    return build(attention_mla._mla_kernel, arch, fmt, values, warps)


def assert_decode(kernel: Compiled, arch: str, fmt: int) -> None:
    assert kernel.num_spills == 0
    assert kernel.registers <= 255
    assert kernel.shared_bytes <= SMALL_SHARED
    assert kernel.count("HMMA.16816.F32") > 0
    assert kernel.count("LDGSTS") > 0  # pages travel to shared memory while others are computed
    if fmt == FP8:
        assert kernel.count("LDS.U8") == 0  # values are not gathered byte by byte
        assert (kernel.count("F2FP.F16.E4M3") > 0) == (arch not in ("sm_80", "sm_86"))


@pytest.mark.parametrize("fmt", [BITS16, FP8, NVFP4])
def test_decode_on_hopper(fmt: int) -> None:
    assert_decode(decode("sm_90", fmt), "sm_90", fmt)


def test_smallest_heads_make_whole_products() -> None:
    """Halves of 16 elements are too few for the tensor cores, which the interpreter would not tell."""
    assert decode("sm_90", NVFP4, 16, STAGES=2, ALIGNED=1).count("HMMA.16816.F32") > 0


def test_decode_on_ampere_without_a_type_for_fp8() -> None:
    assert_decode(decode("sm_80", FP8), "sm_80", FP8)


def test_prefill_on_hopper_uses_warpgroup_products() -> None:
    kernel = prefill("sm_90", NVFP4)
    assert kernel.count("HGMMA") > 0
    assert kernel.num_spills == 0
    assert kernel.shared_bytes <= HOPPER_SHARED


def test_latent_attention_on_hopper_uses_warpgroup_products() -> None:
    kernel = mla("sm_90", BITS16)
    assert kernel.count("HGMMA") > 0
    assert kernel.num_spills <= 8  # addresses: 64 x 512 sums fill the registers
    assert kernel.shared_bytes <= HOPPER_SHARED


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHS)
@pytest.mark.parametrize("fmt", [BITS16, FP8, NVFP4])
def test_decode_everywhere(arch: str, fmt: int) -> None:
    assert_decode(decode(arch, fmt), arch, fmt)
    wide = decode(arch, fmt, 256, STAGES=2, HAS_SINK=True, WINDOW=128, SOFTCAP=30.0)
    assert wide.count("HMMA.16816.F32") > 0
    assert wide.shared_bytes <= SMALL_SHARED
    assert decode(arch, fmt, 64, WINDOW=128, HAS_SINK=True, IS_SPLIT=False).num_spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHS)
@pytest.mark.parametrize("fmt", [BITS16, FP8, NVFP4])
def test_prefill_everywhere(arch: str, fmt: int) -> None:
    kernel = prefill(arch, fmt)
    product = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(arch, "HMMA.16816.F32")
    assert kernel.count(product) > 0
    assert kernel.num_spills == 0
    assert kernel.shared_bytes <= (HOPPER_SHARED if arch in ("sm_90", "sm_100") else SMALL_SHARED)
    assert prefill(arch, fmt, 256).shared_bytes <= (HOPPER_SHARED if arch in ("sm_90", "sm_100") else SMALL_SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHS)
@pytest.mark.parametrize("fmt", [BITS16, FP8, NVFP4])
def test_latent_attention_everywhere(arch: str, fmt: int) -> None:
    """On sm_90 the fp16 queries of FP8 and NVFP4 are held in registers and some of them spill, outside the products."""
    kernel = mla(arch, fmt)
    assert kernel.count("HGMMA") + kernel.count("HMMA") + kernel.count("UTCHMMA") > 0
    assert kernel.num_spills == 0 or arch == "sm_90"
    assert kernel.shared_bytes <= (HOPPER_SHARED if arch == "sm_90" else SMALL_SHARED)
