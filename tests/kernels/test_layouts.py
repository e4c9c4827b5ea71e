"""The fragment-ordered layout: lossless, and in the order that its description gives. Needs nothing."""

import pytest
import torch

from blockscale.errors import FormatError
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import FP8, MXFP4, NVFP4, Format
from blockscale.formats.tensor import encode
from blockscale.kernels import layouts
from blockscale.kernels.layouts import from_fragments, pack_tiles, to_fragments, unpack_tiles
from blockscale.kernels.prepare import Layout, from_row_major, row_major

SHAPES = ((64, 128), (1, 32), (33, 96), (100, 416), (130, 1312))
ALL_SCALES = {NVFP4: 128, MXFP4: 256}  # bytes of unsigned E4M3 (NaN included) and of E8M0


def _weight(n: int, k: int, fmt: Format, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    block_scale = torch.randint(0, ALL_SCALES[fmt], (n, k // fmt.block_size), dtype=torch.uint8, generator=g)
    return packed, block_scale


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpacking_gives_back_every_byte(n, k, fmt):
    packed, block_scale = _weight(n, k, fmt)
    tiles = pack_tiles(packed, block_scale, fmt)
    assert tiles.shape == layouts.tiles_shape(n, k)
    again, scale_again = unpack_tiles(tiles, n, k, fmt)
    assert torch.equal(again, packed)
    assert torch.equal(scale_again, block_scale)


def test_k_of_one_block():
    packed, block_scale = _weight(5, 16, NVFP4)
    again, scale_again = unpack_tiles(pack_tiles(packed, block_scale, NVFP4), 5, 16, NVFP4)
    assert torch.equal(again, packed)
    assert torch.equal(scale_again, block_scale)


def test_rows_are_laid_out_a_part_at_a_time_alike(monkeypatch):
    packed, block_scale = _weight(333, 256, NVFP4)
    whole = pack_tiles(packed, block_scale, NVFP4)
    monkeypatch.setattr(layouts, "_CHUNK_CODES", 128 * 256)
    assert layouts._rows_at_a_time(2) == 128
    assert torch.equal(pack_tiles(packed, block_scale, NVFP4), whole)
    assert torch.equal(unpack_tiles(whole, 333, 256, NVFP4)[0], packed)


def test_codes_lie_where_the_description_says():
    """Each code, found through the words and bit positions of the module's description, one lane at a time."""
    n, k = 64, 256
    packed, block_scale = _weight(n, k, NVFP4)
    codes, tiles = unpack_nibbles(packed), pack_tiles(packed, block_scale, NVFP4)
    words = tiles[..., : layouts.CODE_BYTES].contiguous().view(torch.int32).view(n // 32, k // 128, 2, 2, 32, 2, 2)
    found = torch.zeros_like(codes)
    for kt in range(2):
        for r in range(2):
            for lane in range(32):
                g, t = lane // 4, lane % 4
                for h in range(2):
                    for w in range(2):
                        word = words[:, :, kt, r, lane, h, w].long() & 0xFFFFFFFF
                        for p, halves in enumerate(layouts._BIT_POSITIONS):
                            for half, positions in enumerate(halves):
                                code = sum((word >> place & 1) << bit for bit, place in enumerate(positions))
                                column = 64 * kt + 16 * t + 8 * w + 2 * p + half
                                found[16 * r + 8 * h + g :: 32, column::128] = code.to(torch.uint8)
    assert torch.equal(found, codes)


def test_scales_lie_where_the_description_says():
    n, k = 64, 256
    _, block_scale = _weight(n, k, NVFP4)
    tiles = pack_tiles(torch.zeros(n, k // 2, dtype=torch.uint8), block_scale, NVFP4)
    scales = tiles[..., layouts.CODE_BYTES :].view(n // 32, k // 128, 8, 4, 2, 2, 2)  # g t kt r h
    recoded = layouts._recoded_from_e4m3(block_scale)
    for g in range(8):
        for t in range(4):
            for kt in range(2):
                for r in range(2):
                    for h in range(2):
                        expected = recoded[16 * r + 8 * h + g :: 32, 4 * kt + t :: 8]
                        assert torch.equal(scales[:, :, g, t, kt, r, h], expected)


def test_padding_is_zero_codes_with_scale_one():
    packed, block_scale = _weight(70, 144, NVFP4)
    tiles = pack_tiles(packed, block_scale, NVFP4)
    all_codes, all_scales = unpack_tiles(tiles, 128, 256, NVFP4)
    assert torch.equal(all_codes[:70, :72], packed)
    assert torch.equal(all_scales[:70, :9], block_scale)
    for padding, value in (
        (all_codes[70:], 0),
        (all_codes[:, 72:], 0),
        (all_scales[70:], 0x38),
        (all_scales[:, 9:], 0x38),
    ):
        assert padding.numel()
        assert torch.all(padding == value)


def test_negative_scales_move_their_sign_into_the_codes():
    packed, block_scale = _weight(64, 128, NVFP4)
    q = row_major_values(packed, block_scale)
    negative = block_scale.clone()
    negative[::3] |= 0x80
    again, scale_again = unpack_tiles(pack_tiles(packed, negative, NVFP4), 64, 128, NVFP4)
    sign = torch.ones(64, 1)
    sign[::3] = -1
    assert torch.equal(row_major_values(again, scale_again).nan_to_num(7), (q * sign).nan_to_num(7))


def row_major_values(packed: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    from blockscale.formats.nvfp4 import decode_unscaled

    return decode_unscaled(packed, block_scale.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)
def test_stacks_of_weights_come_back_as_they_were(fmt):
    w = torch.randn(3, 48, 96, dtype=torch.bfloat16)
    q = encode(w, fmt)
    weight = row_major(q)
    there = to_fragments(weight)
    assert there.layout is Layout.FRAGMENTS
    assert there.packed.shape == (3, 2, 1, layouts.TILE_BYTES)
    assert there.block_scale.shape == (3, 16)
    assert not there.block_scale.any()
    back = from_row_major(from_fragments(there))
    assert torch.equal(back.packed, q.packed)
    assert torch.equal(back.block_scale.view(torch.uint8), q.block_scale.view(torch.uint8))


def test_refusals_name_the_shape():
    packed, block_scale = _weight(64, 128, NVFP4)
    with pytest.raises(FormatError, match="fp8"):
        pack_tiles(packed, block_scale, FP8)
    with pytest.raises(FormatError, match=r"K = 24"):
        pack_tiles(packed[:, :12], block_scale, NVFP4)
    with pytest.raises(FormatError, match=r"\[64, 8\]"):
        pack_tiles(packed, block_scale[:, :4], NVFP4)
    with pytest.raises(FormatError, match="uint8"):
        pack_tiles(packed.int(), block_scale, NVFP4)
    with pytest.raises(FormatError, match=r"\[64, 256\]"):
        unpack_tiles(pack_tiles(packed, block_scale, NVFP4), 64, 256, NVFP4)
    with pytest.raises(FormatError, match="contiguous"):
        pack_tiles(packed, block_scale, NVFP4, torch.empty(2, 1, 2303, dtype=torch.uint8))
    prepared = row_major(encode(torch.randn(64, 128), NVFP4))
    with pytest.raises(FormatError, match="row_major"):
        from_fragments(prepared)
    with pytest.raises(FormatError, match="fragments"):
        to_fragments(to_fragments(prepared))
