"""The fragment-ordered weight layout: one contiguous block of bytes per 32 x 128 weights, ready for tensor cores.

A weight [N, K] of 4-bit codes becomes tiles uint8 [N' / 32, K' / 128, 2304], N' and K' being N and K rounded up to 64
and 128 (padding: code 0, scale 1.0). A tile is 2048 bytes of codes, then 256 bytes of scales:

    codes   [kt 2][r 2][g 8][t 4][h 2][w 2]  32-bit words of eight codes, bits permuted as below
    scales  [g 8][t 4][kt 2][r 2][h 2]       bytes, recoded as below

for rows 16 r + 8 h + g and columns 64 kt + 16 t + 8 w + (0..7) of the tile. Lane 4 g + t of a warp therefore reads 16
bytes per subtile of 16 x 64: 16 consecutive codes of row g and of row g + 8, each within one scale block. The order of
columns inside a matrix instruction is free as long as both operands agree, so instruction j (0..3) of a subtile gives
slots {2t, 2t+1, 2t+8, 2t+9} of lane t the columns 16 t + 4 j + {0, 1, 2, 3}: the four instructions need one scale per
lane and row, and the activations' fragments are 32 contiguous bytes of an activation row as it lies in memory.

Bits of a word: code 2p goes to the low and code 2p + 1 to the high half of register p. `_BIT_POSITIONS` is chosen so
that nine 32-bit operations leave sign << 15 | magnitude << 6 in each half of the four registers, which as bfloat16 is
the E2M1 value times 2^-126 (cuda/decode.cuh).

Scale bytes, NVFP4: (exponent + 9) << 3 | mantissa of the E4M3 value as a normal number, 0x99 for NaN, 0xA0 for zero.
Added into the upper bits of a bfloat16 (or float16) they give the scale times a power of two, NaN and -0 by carry.
Scale bytes, MXFP4: 2^(s - 1) as a product of two powers of two whose bfloat16 exponent fields are stored, the first in
the even, the second in the odd of the two 16-column blocks that the E8M0 byte s covers: no single bfloat16 factor
reaches from 2^-1 to 2^253. NaN (s = 255) is infinity times zero.

Both ways are lossless and inverse to each other, but for the sign of an E4M3 scale, which moves into the codes.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.minifloat import decode_table
from blockscale.formats.spec import E4M3, Format, ScaleType
from blockscale.kernels.prepare import Layout, PreparedWeight

TILE_ROWS, TILE_COLUMNS = 32, 128
CODE_BYTES, SCALE_BYTES = TILE_ROWS * TILE_COLUMNS // 2, TILE_ROWS * TILE_COLUMNS // 16
TILE_BYTES = CODE_BYTES + SCALE_BYTES  # 2304
ROW_MULTIPLE = 64  # two tiles: what a warp that takes four row blocks of 16 reads
SCALE_NAN, SCALE_ZERO, SCALE_ONE = 0x99, 0xA0, 9 << 3

# Where the bits (magnitude from the lowest, then sign) of the codes 2p (first) and 2p + 1 (second) lie in the word.
_BIT_POSITIONS = (
    ((6, 7, 8, 15), (22, 23, 24, 31)),
    ((0, 1, 2, 9), (16, 17, 18, 25)),
    ((12, 13, 14, 21), (28, 29, 30, 5)),
    ((10, 11, 4, 19), (26, 27, 20, 3)),
)
_CHUNK_CODES = 1 << 24  # weights laid out at a time: about 150 MB of scratch memory, however large the weight


def padded_shape(n: int, k: int) -> tuple[int, int]:
    """Rows and columns that the tiles of a weight [n, k] hold."""
    return -(-n // ROW_MULTIPLE) * ROW_MULTIPLE, -(-k // TILE_COLUMNS) * TILE_COLUMNS


def tiles_shape(n: int, k: int) -> tuple[int, int, int]:
    """Shape of the uint8 tensor that `pack_tiles` gives for a weight [n, k]."""
    rows, columns = padded_shape(n, k)
    return rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_BYTES


def pack_tiles(packed: Tensor, block_scale: Tensor, fmt: Format, out: Tensor | None = None) -> Tensor:
    """Tiles uint8 [N'/32, K'/128, 2304] of a weight [N, K].

    packed       uint8 [N, K/2], the even element in the low nibble
    block_scale  NVFP4: float8_e4m3fn (or its bytes) [N, K/16]; MXFP4: uint8 [N, K/32], E8M0
    out          contiguous uint8 of `tiles_shape`, if given

    Runs on the device of its inputs, in scratch memory that does not grow with N. FormatError for other formats,
    shapes, dtypes, or K not a multiple of 16 (MXFP4: 32).
    """
    n, k = _checked_shape(packed, block_scale, fmt)
    shape = tiles_shape(n, k)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    elif out.shape != shape or out.dtype != torch.uint8 or not out.is_contiguous():
        raise FormatError(f"tiles of [{n}, {k}] need a contiguous uint8 {list(shape)}, got {list(out.shape)}")
    step = _rows_at_a_time(shape[1])
    for first in range(0, n, step):
        tile = first // TILE_ROWS
        last = tile + step // TILE_ROWS if first + step < n else shape[0]
        _pack_rows(packed[first : first + step], block_scale[first : first + step], fmt, out[tile:last])
    return out


def unpack_tiles(tiles: Tensor, n: int, k: int, fmt: Format) -> tuple[Tensor, Tensor]:
    """(packed uint8 [n, k/2], block_scale's bytes) that `pack_tiles` was given: its inverse."""
    if tiles.shape != tiles_shape(n, k) or tiles.dtype != torch.uint8:
        raise FormatError(f"not the tiles of a weight [{n}, {k}]: {tiles.dtype} {list(tiles.shape)}")
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=tiles.device)
    block_scale = torch.empty(n, k // fmt.block_size, dtype=torch.uint8, device=tiles.device)
    step = _rows_at_a_time(tiles.shape[1])
    for first in range(0, n, step):
        part = tiles[first // TILE_ROWS : (first + step) // TILE_ROWS]
        words = part[..., :CODE_BYTES].contiguous().view(torch.int32)
        words = words.view(*part.shape[:2], 2, 2, 8, 4, 2, 2).permute(0, 3, 6, 4, 1, 2, 5, 7)
        rows = _move_bits(words.reshape(part.shape[0] * TILE_ROWS, -1), _moves()[1]).view(torch.uint8)
        packed[first : first + step] = rows[: n - first, : k // 2]
        recoded = part[..., CODE_BYTES:].reshape(*part.shape[:2], 8, 4, 2, 2, 2).permute(0, 5, 6, 2, 1, 4, 3)
        recoded = recoded.reshape(part.shape[0] * TILE_ROWS, -1)[: n - first, : k // 16]
        decode = _e8m0_from_factors if fmt.scale is ScaleType.E8M0 else _e4m3_from_recoded
        block_scale[first : first + step] = decode(recoded)
    return packed, block_scale


def to_fragments(weight: PreparedWeight) -> PreparedWeight:
    """A row-major weight in this layout.

    packed       the tiles, uint8 [..., N'/32, K'/128, 2304]
    block_scale  no scales: zero bytes [..., N'/4] in which a kernel that splits K over thread blocks counts those that
                 are done, and which it leaves zero. They belong to the weight, so that launches in a CUDA graph need
                 nothing else; one weight must not be multiplied on two streams at the same time.

    Returns when all is written: kernels read weights before they wait for the kernel ahead of them.
    """
    if weight.layout is not Layout.ROW_MAJOR:
        raise FormatError(f"tiles are made from the row-major layout, not from {weight.layout.value}")
    lead, (n, k) = weight.shape[:-2], weight.shape[-2:]
    tiles = torch.empty(*lead, *tiles_shape(n, k), dtype=torch.uint8, device=weight.device)
    parts = zip(_matrices(weight.packed), _matrices(weight.block_scale), _stack(tiles), strict=True)
    for packed, block_scale, out in parts:
        pack_tiles(packed, block_scale, weight.format, out)
    counters = torch.zeros(*lead, padded_shape(n, k)[0] // 4, dtype=torch.uint8, device=weight.device)
    if weight.device.type == "cuda":
        torch.cuda.current_stream(weight.device).synchronize()
    return replace(weight, layout=Layout.FRAGMENTS, packed=tiles, block_scale=counters)


def from_fragments(weight: PreparedWeight) -> PreparedWeight:
    """Inverse of `to_fragments`."""
    if weight.layout is not Layout.FRAGMENTS:
        raise FormatError(f"the layout is {weight.layout.value}, not {Layout.FRAGMENTS.value}")
    lead, (n, k) = weight.shape[:-2], weight.shape[-2:]
    pairs = [unpack_tiles(tiles, n, k, weight.format) for tiles in _stack(weight.packed)]
    packed = torch.stack([p for p, _ in pairs]).view(*lead, n, -1)
    block_scale = torch.stack([s for _, s in pairs]).view(*lead, n, -1)
    return replace(weight, layout=Layout.ROW_MAJOR, packed=packed, block_scale=block_scale)


def _matrices(x: Tensor) -> Tensor:
    """[N, C] or [E, N, C] -> [E, N, C]."""
    return x.view(-1, *x.shape[-2:])


def _stack(tiles: Tensor) -> Tensor:
    """Tiles of one weight or of a stack -> [E, N'/32, K'/128, 2304]."""
    return tiles.view(-1, *tiles.shape[-3:])


def _checked_shape(packed: Tensor, block_scale: Tensor, fmt: Format) -> tuple[int, int]:
    if fmt.name not in ("nvfp4", "mxfp4"):
        raise FormatError(f"no fragment-ordered layout for {fmt.name}", hint="formats: nvfp4, mxfp4")
    if packed.dtype != torch.uint8 or packed.dim() != 2 or not packed.numel():
        raise FormatError(f"packed codes must be uint8 [N, K/2], got {packed.dtype} {list(packed.shape)}")
    n, k = packed.shape[0], packed.shape[1] * 2
    if k % fmt.block_size:
        raise FormatError(f"K = {k} is not a multiple of {fmt.name}'s block of {fmt.block_size}")
    if block_scale.element_size() != 1 or block_scale.shape != (n, k // fmt.block_size):
        found = f"{block_scale.dtype} {list(block_scale.shape)}"
        raise FormatError(f"block scales must be bytes [{n}, {k // fmt.block_size}], got {found}")
    if packed.device != block_scale.device:
        raise FormatError(f"codes on {packed.device}, block scales on {block_scale.device}", hint="move one of them")
    return n, k


def _rows_at_a_time(num_column_tiles: int) -> int:
    return max(ROW_MULTIPLE, _CHUNK_CODES // (num_column_tiles * TILE_COLUMNS) // ROW_MULTIPLE * ROW_MULTIPLE)


def _pack_rows(packed: Tensor, block_scale: Tensor, fmt: Format, out: Tensor) -> None:
    """Some rows of `pack_tiles`, into their tiles `out`."""
    rows, columns = out.shape[0] * TILE_ROWS, out.shape[1] * TILE_COLUMNS
    codes = torch.zeros(rows, columns // 2, dtype=torch.uint8, device=packed.device)
    codes[: packed.shape[0], : packed.shape[1]] = packed
    if fmt.scale is ScaleType.E8M0:
        used, padding = _factors_from_e8m0(block_scale), _factors_from_e8m0(torch.tensor([[127]], dtype=torch.uint8))
    else:
        sign = block_scale.view(torch.uint8) >> 7
        if sign.any():  # no quantizer writes one, but E4M3 has it
            codes[: packed.shape[0], : packed.shape[1]] ^= (sign * 0x88).repeat_interleave(8, dim=1)
        used, padding = _recoded_from_e4m3(block_scale), torch.tensor([[SCALE_ONE]], dtype=torch.uint8)
    scales = padding.to(packed.device).repeat(rows, columns // 16 // padding.shape[1])
    scales[: used.shape[0], : used.shape[1]] = used
    words = _move_bits(codes.view(torch.int32), _moves()[0])
    words = words.view(out.shape[0], 2, 2, 8, out.shape[1], 2, 4, 2)  # tile r h g column-tile kt t w
    out[..., :CODE_BYTES] = words.permute(0, 4, 5, 1, 3, 6, 2, 7).reshape(*out.shape[:2], -1).view(torch.uint8)
    scales = scales.view(out.shape[0], 2, 2, 8, out.shape[1], 2, 4)  # tile r h g column-tile kt t
    out[..., CODE_BYTES:] = scales.permute(0, 4, 3, 6, 5, 1, 2).reshape(*out.shape[:2], -1)


@cache
def _moves() -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(distance, mask of the bits after moving) of the permutation of a word's bits, and of its inverse."""
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for p, pair in enumerate(_BIT_POSITIONS):
        for half, positions in enumerate(pair):
            for bit, position in enumerate(positions):
                source = 4 * (2 * p + half) + bit
                there[position - source] = there.get(position - source, 0) | 1 << position
                back[source - position] = back.get(source - position, 0) | 1 << source
    return tuple(there.items()), tuple(back.items())


def _move_bits(words: Tensor, moves: tuple[tuple[int, int], ...]) -> Tensor:
    """int32 words with their bits moved: bits of each mask come from `distance` below (negative: above)."""
    out = torch.zeros_like(words)
    for distance, mask in moves:
        moved = words << distance if distance >= 0 else words >> -distance  # the mask drops sign bits shifted in
        out |= moved & (mask - (1 << 32) if mask >> 31 else mask)
    return out


def _recode_table() -> Tensor:
    """uint8 [128]: E4M3 magnitude bytes -> recoded bytes."""
    values = decode_table(E4M3)[:128]
    mantissa, exponent = torch.frexp(values)  # mantissa in [.5, 1)
    recoded = (exponent - 1 + 9) * 8 + (mantissa * 16 - 8)
    recoded = torch.where(values == 0, float(SCALE_ZERO), recoded)
    return torch.where(values.isnan(), float(SCALE_NAN), recoded).to(torch.uint8)


def _recoded_from_e4m3(block_scale: Tensor) -> Tensor:
    magnitude = block_scale.view(torch.uint8) & 0x7F
    return _recode_table().to(block_scale.device)[magnitude.int()]


def _e4m3_from_recoded(recoded: Tensor) -> Tensor:
    table = torch.zeros(256, dtype=torch.uint8)
    table[_recode_table().int()] = torch.arange(128, dtype=torch.uint8)
    return table.to(recoded.device)[recoded.int()]


def _factors_from_e8m0(block_scale: Tensor) -> Tensor:
    """uint8 [N, K/32] -> uint8 [N, K/16]: exponent fields whose powers of two multiply to 2^(s - 1)."""
    half = block_scale >> 1
    first, second = half + 126, block_scale - half + 127
    is_nan = block_scale == 255
    first, second = first.masked_fill(is_nan, 255), second.masked_fill(is_nan, 0)
    return torch.stack((first, second), dim=-1).flatten(-2)


def _e8m0_from_factors(factors: Tensor) -> Tensor:
    first, second = factors[:, 0::2], factors[:, 1::2]
    return torch.where(first == 255, 255, first.int() + second.int() - 253).to(torch.uint8)
