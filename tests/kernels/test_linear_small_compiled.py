"""Configurations of the linear for a few rows, compiled for sm_90a: instructions, registers, nothing spilled."""

from functools import cache

import pytest
import torch

from blockscale.kernels.cuda.linear_small import _SHAPES, SOURCE, Configuration
from blockscale.kernels.nvrtc import Program
from tests.kernels.compiled import Compiled, compile_cuda

_CONFIGURATIONS = tuple(
    Configuration(row_units, column_units, blocks, *rest, split=1, cluster=1, groups=132)
    for blocks, shapes in _SHAPES.items()
    for row_units, column_units, *rest in shapes
)
# every shape with NVFP4 and bfloat16, every decoding with the first shape
_CASES = [(c, torch.bfloat16, False) for c in _CONFIGURATIONS] + [
    (_CONFIGURATIONS[0], dtype, is_mxfp4)
    for dtype, is_mxfp4 in ((torch.float16, False), (torch.bfloat16, True), (torch.float16, True))
]


@cache
def _compiled() -> dict[str, Compiled]:
    names = tuple(dict.fromkeys(c.name(dtype, is_mxfp4) for c, dtype, is_mxfp4 in _CASES))
    return compile_cuda(Program(SOURCE, names), "sm_90a")


@pytest.mark.parametrize(
    ("c", "dtype", "is_mxfp4"),
    _CASES,
    ids=lambda v: v.name(torch.bfloat16, False)[12:] if isinstance(v, Configuration) else str(v),
)
def test_instructions_of_hopper_and_no_spills(c, dtype, is_mxfp4):
    kernel = _compiled()[c.name(dtype, is_mxfp4)]
    element = "F32.BF16" if dtype == torch.bfloat16 else "F32"
    # a slot's subtiles of 16 x 64, four instructions each, for each 8 rows of x
    subtiles = c.row_units * c.column_units * 4
    assert kernel.count(f"HMMA.16816.{element}") == kernel.count("HMMA") == subtiles * 4 * c.column_blocks
    assert kernel.count("UBLKCP") > 0  # weights and x come by bulk copies ...
    assert kernel.count("UCGABAR_ARV") > 0  # ... to clusters, where there are any
    assert kernel.count("LDGSTS") == 0
    assert kernel.num_spills == 0
    assert kernel.stack_bytes == 0
    assert kernel.registers * c.threads * c.blocks_per_sm <= 65536


def test_nvfp4_in_bfloat16_costs_what_was_counted():
    """Per two words of eight codes (one instruction pair): ten bit operations, four rotations, four multiplications
    to shift left, eight products with scales; scales, addresses and the kernel's ends come on top."""
    kernel = _compiled()[_CONFIGURATIONS[0].name(torch.bfloat16, False)]
    words = kernel.count("HMMA")  # two words of two rows serve two instructions
    assert kernel.count("HMUL2") == words * 4
    assert kernel.count("LOP3") <= words * 5 + 80
    assert kernel.count("SHF") <= words * 2 + 60
