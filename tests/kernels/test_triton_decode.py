"""Decoding by bits against the tables of `formats`, on every code and every scale byte."""

import itertools

import pytest
import torch
import triton.language as tl
from torch import Tensor

from blockscale.formats import mx
from blockscale.formats.minifloat import decode_table
from blockscale.formats.packing import pack_nibbles
from blockscale.formats.spec import E2M1, E4M3
from blockscale.kernels.triton.decode import NVFP4_SHIFT

from .interpreter import interpret, interpreted

decode = interpreted("blockscale.kernels.triton.decode")
e2m1, e4m3, e8m0 = decode.e2m1, decode.e4m3, decode.e8m0
decode_groups, reorder_k = decode.decode_groups, decode.reorder_k


def _values(codes, y, KIND: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    code = tl.load(codes + i)
    if KIND == 0:
        tl.store(y + i, e2m1(code))
    elif KIND == 1:
        tl.store(y + i, e4m3(code))
    else:
        tl.store(y + i, e8m0(code))


def _groups(groups, scales, y, MX: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    r, g = tl.arange(0, ROWS)[:, None], tl.arange(0, GROUPS)[None, :]
    values = decode_groups(tl.load(groups + r * GROUPS + g), tl.load(scales + r * GROUPS + g), y.dtype.element_ty, MX)
    tl.store(y + r * (16 * GROUPS) + tl.arange(0, 16 * GROUPS)[None, :], values)


def _reordered(x, y, ROWS: tl.constexpr, K: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(y + at, reorder_k(tl.load(x + at)))


@pytest.mark.parametrize(
    ("kind", "table"), [(0, decode_table(E2M1)), (1, decode_table(E4M3)), (2, mx.scale_values(torch.arange(256)))]
)
def test_one_value_at_a_time(kind: int, table: Tensor) -> None:
    y = torch.full((len(table),), torch.nan)
    interpret(_values)[(1,)](torch.arange(len(table), dtype=torch.uint8), y, KIND=kind, SIZE=len(table))
    assert torch.equal(y.nan_to_num(nan=12345.0), table.nan_to_num(nan=12345.0))


def expected_order() -> list[int]:
    """Position in a tile of 64 -> element, as the head of decode.py states it, written out the slow way."""
    order = [-1] * 64
    for t, h, e, q in itertools.product(range(4), range(2), range(2), range(4)):
        order[8 * (4 * h + q) + 2 * t + e] = 16 * t + 8 * h + 4 * e + q
    return order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_k(dtype: torch.dtype) -> None:
    x = torch.arange(256.0).view(2, 128).to(dtype)
    y = torch.full_like(x, torch.nan)
    interpret(_reordered)[(1,)](x, y, ROWS=2, K=128)
    order = expected_order()
    assert sorted(order) == list(range(64))
    assert torch.equal(y, x[:, order + [64 + k for k in order]])


@pytest.mark.parametrize(
    ("dtype", "is_mx"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True), (torch.float32, True)],
)
def test_every_code_with_every_scale_is_exact(dtype: torch.dtype, is_mx: bool) -> None:
    # row r: scale bytes 4r .. 4r + 3, each with all 16 codes
    codes = torch.arange(16, dtype=torch.uint8).repeat(64, 4)  # [64, 64]
    scales = torch.arange(256, dtype=torch.uint8).view(64, 4)
    y = torch.full((64, 64), 7.0, dtype=dtype)
    interpret(_groups)[(1,)](pack_nibbles(codes).view(torch.int64), scales, y, MX=is_mx, ROWS=64, GROUPS=4)
    values = decode_table(E2M1)[codes.int()].double().unflatten(-1, (4, 16))
    table = mx.scale_values(torch.arange(256)) if is_mx else decode_table(E4M3) / 2.0**NVFP4_SHIFT
    exact = (values * table.double().view(64, 4, 1)).flatten(1)[:, expected_order()]
    exact = torch.where(exact.abs() >= 2.0**128, exact.sign() * torch.inf, exact)  # beyond bf16 and fp32
    assert torch.equal(y.double().nan_to_num(nan=12345.0, posinf=1e300, neginf=-1e300),
                       exact.nan_to_num(nan=12345.0, posinf=1e300, neginf=-1e300))  # fmt: skip
