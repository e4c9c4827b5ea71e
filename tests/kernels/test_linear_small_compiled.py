"""Every configuration of the linear for a few rows, compiled for sm_90a: its instructions, registers, no spills."""

import pytest
import torch

from blockscale.kernels.cuda.linear_small import _SHAPES, Configuration, program
from tests.kernels.compiled import Compiled, compile_cuda


def _compile(c: Configuration, dtype: torch.dtype, is_mxfp4: bool) -> Compiled:
    (kernel,) = compile_cuda(program(c, dtype, is_mxfp4), "sm_90a").values()
    return kernel


_CONFIGURATIONS = [
    Configuration(row_units, column_units, blocks, *rest, split=1, cluster=1, groups=132)
    for blocks, shapes in _SHAPES.items()
    for row_units, column_units, *rest in shapes
]


@pytest.mark.parametrize("is_mxfp4", [False, True], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("c", _CONFIGURATIONS, ids=lambda c: c.name(torch.bfloat16, False)[12:])
def test_instructions_of_hopper_and_no_spills(c, dtype, is_mxfp4):
    kernel = _compile(c, dtype, is_mxfp4)
    element = "F32.BF16" if dtype == torch.bfloat16 else "F32"
    # a slot's subtiles of 16 x 64, four instructions each, for each 8 rows of x
    subtiles = c.row_units * c.column_units * 4
    assert kernel.count(f"HMMA.16816.{element}") == kernel.count("HMMA") == subtiles * 4 * c.column_blocks
    assert kernel.count("UBLKCP") > 0  # weights and x come by bulk copies ...
    assert kernel.count("UCGABAR_ARV") > 0  # ... to clusters, where there are any
    assert kernel.count("LDGSTS") == 0
    assert kernel.num_spills == 0 and kernel.stack_bytes == 0
    assert kernel.registers * c.threads * c.blocks_per_sm <= 65536


def test_nvfp4_in_bfloat16_costs_what_was_counted():
    """Nine integer operations for eight codes, one multiplication a pair, and what addresses and scales take."""
    c = next(c for c in _CONFIGURATIONS if c.column_blocks == 1)
    kernel = _compile(c, torch.bfloat16, False)
    products = kernel.count("HMMA")
    assert kernel.count("HMUL2") + kernel.count("HFMA2") == products * 4
    assert kernel.count("LOP3") <= products * 11  # 5 for each of the two words of an instruction pair, and the rest
