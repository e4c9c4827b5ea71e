"""INT4 groups."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from blockscale.formats.int4 import decode_codes, scale_from_amax
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import FORMATS, Format
from blockscale.formats.tensor import decode, encode

from .strategies import tensors

each_format = pytest.mark.parametrize("fmt", [FORMATS[f"int4-g{g}"] for g in (16, 32, 128)], ids=lambda f: f.name)


def test_codes_are_twos_complement() -> None:
    values = decode_codes(torch.arange(16, dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16))
    assert values.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]


def test_one_block_by_hand() -> None:
    x = torch.tensor([7.0, -7.0, 3.5, 2.5, -2.5, 0.5, -0.5, 0.51, -1.5, 6.4, 0, 0, 0, 0, 0, 0])
    q = encode(x, FORMATS["int4-g16"])
    assert q.block_scale.tolist() == [1.0]
    assert unpack_nibbles(q.packed).tolist() == [7, 9, 4, 2, 14, 0, 0, 1, 14, 6, 0, 0, 0, 0, 0, 0]
    assert decode(q).tolist() == [7, -7, 4, 2, -2, 0, 0, 1, -2, 6, 0, 0, 0, 0, 0, 0]


def test_scale_is_bf16_and_never_zero() -> None:
    scale = scale_from_amax(torch.tensor([0.0, 7.0, 1.0, 1e-45]))
    assert scale.dtype == torch.bfloat16
    assert scale[:3].tolist() == [1.0, 1.0, float(torch.tensor(1 / 7).bfloat16())]
    assert scale[3] == torch.finfo(torch.bfloat16).tiny


def test_a_scale_that_is_too_small_saturates_at_seven() -> None:
    x = torch.tensor([9.0, -9.0] * 8)
    q = encode(x, FORMATS["int4-g16"], block_scale=torch.ones(1, dtype=torch.bfloat16))
    assert decode(q).tolist() == [7.0, -7.0] * 8


@each_format
@settings(max_examples=30, deadline=None)
@given(x=tensors())
def test_every_code_is_the_nearest_and_minus_eight_is_not_used(fmt: Format, x: Tensor) -> None:
    q = encode(x, fmt)
    codes = unpack_nibbles(q.packed).int()
    integers = torch.where(codes > 7, codes - 16, codes)
    assert integers.abs().max() <= 7
    scale = q.block_scale.double().repeat_interleave(fmt.block_size, -1)
    grid = torch.arange(-7, 8, dtype=torch.float64)
    nearest = (x.double().unsqueeze(-1) - grid * scale.unsqueeze(-1)).abs().amin(-1)
    chosen = (x.double() - integers * scale).abs()
    assert (chosen - nearest <= x.double().abs() * 2.0**-23).all()  # the quotient is rounded to fp32
