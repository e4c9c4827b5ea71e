"""The kernels for many tokens, compiled for sm_90a: the instructions they live by, and nothing spilled."""

import pytest
import torch

from blockscale.kernels.cuda import dequantize
from blockscale.kernels.cuda.linear_large import MIDDLE, TILINGS, WIDE, Tiling, program
from tests.kernels.compiled import compile_cuda

BF16, FP16 = torch.bfloat16, torch.float16
CASES = [(t, BF16, False) for t in TILINGS] + [(WIDE, FP16, True), (MIDDLE, BF16, True), (MIDDLE, FP16, False)]


@pytest.mark.parametrize(("tiling", "dtype", "is_mxfp4"), CASES)
def test_linear_large_uses_hopper(tiling: Tiling, dtype: torch.dtype, is_mxfp4: bool) -> None:
    (kernel,) = compile_cuda(program(tiling, dtype, is_mxfp4), "sm_90a").values()
    element = ".BF16" if dtype == torch.bfloat16 else ""
    # two steps of 64 columns, four instructions each, for every block of 64 rows that a warpgroup has
    assert kernel.count(f"HGMMA.64x{tiling.tokens}x16.F32{element}") == 8 * tiling.blocks
    assert kernel.count("HGMMA") == 8 * tiling.blocks
    assert kernel.count("UTMALDG.2D") == 1
    assert kernel.count("UTMALDG.2D.MULTICAST") == (tiling.cluster > 1)
    assert kernel.count("UBLKCP") == 1
    assert kernel.count("USETMAXREG") >= 2
    # after every two instructions, and at the end: more would mean that the compiler waits after each
    assert kernel.count("WARPGROUP.DEPBAR") == 4 * tiling.blocks + 1
    assert kernel.num_spills == 0


@pytest.mark.parametrize("name", ["dequantize_16<0, 0>", "dequantize_16<1, 1>"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_dequantize_moves_sixteen_bytes_at_a_time(name: str, arch: str) -> None:
    (kernel,) = compile_cuda(dequantize.program(name), arch).values()
    loads = sum(n for m, n in kernel.mnemonics.items() if m.startswith("LDG") and ".128" in m)
    stores = sum(n for m, n in kernel.mnemonics.items() if m.startswith("STG") and ".128" in m)
    assert (loads, stores) == (4, 16)  # a lane's 128 weights
    assert kernel.num_spills == 0


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_row_scales_compile(arch: str) -> None:
    (kernel,) = compile_cuda(dequantize.program("find_row_scales<1>"), arch).values()
    assert kernel.count("SHFL") == 8  # four rows a lane, over the four lanes of a row
    assert kernel.num_spills == 0


@pytest.mark.parametrize(
    ("name", "arch"),
    [("dequantize_e4m3<0>", "sm_89"), ("dequantize_e4m3<0>", "sm_90a"), ("quantize_rows_e4m3<1>", "sm_90a")],
)
def test_e4m3_is_rounded_to_by_hardware(name: str, arch: str) -> None:
    (kernel,) = compile_cuda(dequantize.program(name), arch).values()
    assert sum(n for m, n in kernel.mnemonics.items() if m.startswith("F2FP") and "E4M3" in m) > 0
    assert kernel.num_spills == 0
