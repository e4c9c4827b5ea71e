"""Codes to bytes and back."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.packing import pack_nibbles, pack_sixes, unpack_nibbles, unpack_sixes


def random_codes(seed: int, leading: list[int], length: int, bits: int) -> Tensor:
    shape = [*leading, length]
    return torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


seeds = st.integers(0, 2**32 - 1)
leading_shapes = st.lists(st.integers(1, 3), max_size=3)


def test_even_element_lies_in_the_low_nibble() -> None:
    assert pack_nibbles(torch.tensor([0x1, 0x2, 0xF, 0x0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    assert unpack_nibbles(torch.tensor([0x21, 0x0F], dtype=torch.uint8)).tolist() == [0x1, 0x2, 0xF, 0x0]


def test_four_sixes_fill_three_bytes_from_the_lowest_bit() -> None:
    codes = [0b000001, 0b100010, 0b011111, 0b110000]
    bits = sum(code << 6 * i for i, code in enumerate(codes))
    packed = pack_sixes(torch.tensor(codes, dtype=torch.uint8))
    assert packed.tolist() == list(bits.to_bytes(3, "little"))
    assert unpack_sixes(packed).tolist() == codes


def test_every_byte_of_nibbles() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(every_byte)), every_byte)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, leading=leading_shapes, quarters=st.integers(1, 20))
def test_unpack_inverts_pack(seed: int, leading: list[int], quarters: int) -> None:
    for bits, pack, unpack in ((4, pack_nibbles, unpack_nibbles), (6, pack_sixes, unpack_sixes)):
        codes = random_codes(seed, leading, 4 * quarters, bits)
        packed = pack(codes)
        assert packed.dtype == torch.uint8
        assert list(packed.shape) == [*leading, 4 * quarters * bits // 8]
        assert torch.equal(unpack(packed), codes)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, leading=leading_shapes, triples=st.integers(1, 20))
def test_pack_inverts_unpack(seed: int, leading: list[int], triples: int) -> None:
    data = random_codes(seed, leading, 3 * triples, 8)
    assert torch.equal(pack_nibbles(unpack_nibbles(data)), data)
    assert torch.equal(pack_sixes(unpack_sixes(data)), data)


def test_strided_codes() -> None:
    codes = random_codes(0, [8], 12, 4).t()  # [12, 8], stride (1, 12)
    assert torch.equal(pack_nibbles(codes), pack_nibbles(codes.contiguous()))
    assert torch.equal(unpack_nibbles(codes), unpack_nibbles(codes.contiguous()))
    assert torch.equal(pack_sixes(codes), pack_sixes(codes.contiguous()))
    assert torch.equal(unpack_sixes(codes.t()), unpack_sixes(codes.t().contiguous()))


@pytest.mark.parametrize(("pack", "length"), [(pack_nibbles, 3), (pack_sixes, 6)])
def test_a_length_that_fills_no_whole_byte_is_refused(pack: Callable[[Tensor], Tensor], length: int) -> None:
    with pytest.raises(FormatError, match=rf"cannot pack {length} \d-bit codes"):
        pack(torch.zeros(2, length, dtype=torch.uint8))
