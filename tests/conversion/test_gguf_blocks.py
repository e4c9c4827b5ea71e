"""Bytes of GGML's blocks: against gguf's own decoders, and element by element."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.conversion.gguf.blocks import mxfp4_blocks, nvfp4_blocks, plain_blocks
from blockscale.errors import FormatError, NonFiniteError
from blockscale.formats import mx, nvfp4
from blockscale.formats.packing import pack_nibbles, unpack_nibbles
from blockscale.formats.spec import E2M1

E4M3_BYTES = [*range(127), 0x80]  # every scale that is no NaN and not negative; a zero may be -0


def random_codes(seed: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 3),
    supers=st.integers(1, 3),
    scale=st.floats(2.0**-20, 1024, width=32),
)
@settings(max_examples=50, deadline=None)
def test_nvfp4_blocks_times_the_global_scale_are_the_weight_exactly(
    seed: int, rows: int, supers: int, scale: float
) -> None:
    packed = pack_nibbles(random_codes(seed, rows, supers * 64))
    choice = torch.randint(0, len(E4M3_BYTES), (rows, supers * 4), generator=torch.Generator().manual_seed(seed + 1))
    block_scale = torch.tensor(E4M3_BYTES, dtype=torch.uint8)[choice].view(torch.float8_e4m3fn)
    blocks = nvfp4_blocks(packed, block_scale)
    assert blocks.shape == (rows, supers * 36)
    values = gguf.quants.dequantize(blocks, GGMLQuantizationType.NVFP4) * np.float32(scale)
    expected = nvfp4.decode_packed(packed, block_scale, torch.tensor(scale))
    assert np.array_equal(values, expected.numpy())


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 3), blocks=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_mxfp4_blocks_are_the_weight_exactly(seed: int, rows: int, blocks: int) -> None:
    codes = random_codes(seed, rows, blocks * 32)
    scale = torch.randint(0, 252, (rows, blocks), generator=torch.Generator().manual_seed(seed + 1)).to(torch.uint8)
    written = mxfp4_blocks(pack_nibbles(codes), scale)
    values = gguf.quants.dequantize(written, GGMLQuantizationType.MXFP4)
    assert np.array_equal(values, mx.decode_codes(codes, scale, E2M1).numpy())


def test_every_code_of_nvfp4_lies_where_ggml_looks_for_it() -> None:
    packed, scale = pack_nibbles(random_codes(1, 2, 128)), torch.arange(16, dtype=torch.uint8).view(2, 8) + 50
    blocks = nvfp4_blocks(packed, scale.view(torch.float8_e4m3fn)).reshape(2, 2, 36)
    codes = unpack_nibbles(packed)
    for row in range(2):
        for k in range(128):
            block, inside = divmod(k, 64)
            part, element = divmod(inside, 16)
            byte = blocks[row, block, 4 + 8 * part + element % 8]
            assert (byte >> 4 if element >= 8 else byte & 15) == codes[row, k]
            assert blocks[row, block, part] == scale[row, k // 16]


def test_a_stack_is_a_stack_of_blocks() -> None:
    packed = pack_nibbles(random_codes(2, 6, 64)).view(3, 2, 32)
    scale = torch.full((3, 2, 4), 1.5).to(torch.float8_e4m3fn)
    blocks = nvfp4_blocks(packed, scale)
    assert blocks.shape == (3, 2, 36)
    assert np.array_equal(blocks[1], nvfp4_blocks(packed[1], scale[1]))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16])
def test_plain_values_are_rounded_once(kind: GGMLQuantizationType) -> None:
    values = torch.randn(5, 33, generator=torch.Generator().manual_seed(3))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
    read = gguf.quants.dequantize(plain_blocks(values, kind, "w"), kind)
    assert np.array_equal(read, values.to(dtype).float().numpy())


def test_q8_0_is_what_gguf_makes_of_the_values() -> None:
    values = torch.randn(3, 70, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    written = plain_blocks(values, GGMLQuantizationType.Q8_0, "w")
    assert np.array_equal(written, gguf.quants.quantize(values.float().numpy(), GGMLQuantizationType.Q8_0))


def test_values_that_f16_cannot_hold_are_refused_by_name() -> None:
    with pytest.raises(FormatError, match=r"lm_head.*70000.*F16") as caught:
        plain_blocks(torch.tensor([[1.0, 70000.0]]), GGMLQuantizationType.F16, "lm_head")
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_with_their_place(value: float) -> None:
    values = torch.zeros(2, 32)
    values[1, 7] = value
    with pytest.raises(NonFiniteError, match=r"lm_head: (nan|inf) at \[1, 7\]"):
        plain_blocks(values, GGMLQuantizationType.BF16, "lm_head")
