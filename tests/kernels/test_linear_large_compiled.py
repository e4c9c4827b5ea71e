"""The kernels for many tokens, compiled for sm_90a: the instructions they live by, and nothing spilled."""

import pytest
import torch

from blockscale.kernels.cuda import dequantize
from blockscale.kernels.cuda.linear_large import TILINGS, Tiling, program
from tests.kernels.compiled import compile_cuda


@pytest.mark.parametrize("is_mxfp4", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiling", TILINGS)
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
    # one in the loop, one at its end: more would mean that the compiler waits after every instruction
    assert kernel.count("WARPGROUP.DEPBAR") == 2 * tiling.blocks + 1
    assert kernel.num_spills == 0


@pytest.mark.parametrize(
    "name", ["dequantize_16<0, 0>", "dequantize_16<0, 1>", "dequantize_16<1, 0>", "dequantize_16<1, 1>"]
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_dequantize_moves_sixteen_bytes_at_a_time(name: str, arch: str) -> None:
    (kernel,) = compile_cuda(dequantize.program(name), arch).values()
    loads = sum(n for m, n in kernel.mnemonics.items() if m.startswith("LDG") and ".128" in m)
    stores = sum(n for m, n in kernel.mnemonics.items() if m.startswith("STG") and ".128" in m)
    assert (loads, stores) == (4, 16)
    assert kernel.num_spills == 0


@pytest.mark.parametrize(
    "name", ["find_row_scales<0>", "find_row_scales<1>", "dequantize_e4m3<0>", "dequantize_e4m3<1>"]
)
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_e4m3_weights_compile(name: str, arch: str) -> None:
    (kernel,) = compile_cuda(dequantize.program(name), arch).values()
    assert kernel.count("F2FP") + kernel.count("F2F") > 0 or name.startswith("find")
    assert kernel.num_spills == 0


@pytest.mark.parametrize("name", ["quantize_rows_e4m3<0>", "quantize_rows_e4m3<1>"])
def test_activations_to_e4m3_compile(name: str) -> None:
    (kernel,) = compile_cuda(dequantize.program(name), "sm_90a").values()
    assert sum(n for m, n in kernel.mnemonics.items() if m.startswith("F2FP") and "E4M3" in m) > 0
    assert kernel.num_spills == 0
