"""Rounding blocks of 16 to NVFP4 inside a kernel, bit for bit as `formats.nvfp4` does on finite input.

A block is held as two fp32 halves [B, 8], so that one thread owns it whole: 16 bytes of a 16-bit tensor are one load,
the amax needs no shuffle, and scale and reciprocal are computed once a block.

Division. `formats` divides; 16 divisions a block would cost more than the memory. With r + r' = 1 / d to twice fp32's
precision, q = fma(x, r, x r') lies on the same side of every rounding boundary of E2M1 and E4M3, or on it, as the
rounded quotient does: those boundaries have at most five significant bits, and all 2^23 significands of d were tried
against the numbers around each of them (tests/kernels/test_triton_quantize_division.py). That holds while nothing
over- or underflows: a global scale outside [2^-24, LARGEST] takes the other branch, which divides. LARGEST also keeps
the smallest number of the dtype from underflowing to zero, which would lose its sign.

Contraction of products and sums to fma must be off (`enable_fp_fusion=False`): those that are meant are written out.

NaN and Inf: a block that holds one gets the scale byte 0x7F and codes of 7, and so decodes to NaN. The format has no
infinity, and saturating would hide an overflow that bf16 shows.
"""

import torch
import triton
import triton.language as tl

# The largest global scale of the branch without division: 448 * scale stays below 2^150 * the dtype's smallest number.
LARGEST_GLOBAL_SCALE = {torch.bfloat16: 2.0**8, torch.float16: 2.0**60, torch.float32: 2.0**-8}

_SMALLEST: tl.constexpr = tl.constexpr(2.0**-24)  # 1 / (6 * scale) stays below 2^24, and x times its rest finite
_MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: its unit in the last place is 1, so adding it rounds


@triton.jit
def _side_by_side(first, second):
    """[B, 4] twice -> [B, 8]."""
    return tl.reshape(tl.permute(tl.join(first, second), [0, 2, 1]), [first.shape[0], 8])


@triton.jit
def _load(pointer, offset, mask, COUNT: tl.constexpr, FILL: tl.constexpr):
    at = pointer + offset[:, None] + tl.arange(0, COUNT)[None, :]
    if FILL:
        return tl.load(at, mask=mask[:, None], other=0.0)
    return tl.load(at, mask=mask[:, None])


@triton.jit
def widened(x):
    """fp32 of any float. bf16 by a shift: two of a word then cost one instruction each."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def unpacked_words(words, DTYPE: tl.constexpr):
    """int32 [B, 4] that hold eight 16-bit floats of DTYPE -> fp32 [B, 8]."""
    if tl.bfloat16 == DTYPE:
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    else:
        even = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        odd = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(even, odd), [words.shape[0], 8])


@triton.jit
def load_halves(pointer, offset, mask, FILL: tl.constexpr = False):
    """[B, 8] twice: elements 0..7 and 8..15 of the blocks at element `offset` [B], in the pointer's dtype.

    Where not `mask` [B]: zeros if FILL, else anything.
    """
    if pointer.dtype.element_ty == tl.float32:  # 16 bytes a load, or neighbouring threads would share a half
        low = _side_by_side(_load(pointer, offset, mask, 4, FILL), _load(pointer + 4, offset, mask, 4, FILL))
        high = _side_by_side(_load(pointer + 8, offset, mask, 4, FILL), _load(pointer + 12, offset, mask, 4, FILL))
    else:
        low, high = _load(pointer, offset, mask, 8, FILL), _load(pointer + 8, offset, mask, 8, FILL)
    return low, high


@triton.jit
def _load_four_pairs(pointer, offset, mask):
    return tl.split(tl.reshape(widened(_load(pointer, offset, mask, 8, False)), [offset.shape[0], 4, 2]))


@triton.jit
def load_pairs(pointer, offset, mask):
    """(even low, odd low, even high, odd high) fp32 [B, 8] of 32 elements from `offset` [B]; any where masked."""
    even0, odd0 = _load_four_pairs(pointer, offset, mask)
    even1, odd1 = _load_four_pairs(pointer + 8, offset, mask)
    even2, odd2 = _load_four_pairs(pointer + 16, offset, mask)
    even3, odd3 = _load_four_pairs(pointer + 24, offset, mask)
    low, odd_low = _side_by_side(even0, even1), _side_by_side(odd0, odd1)
    return low, odd_low, _side_by_side(even2, even3), _side_by_side(odd2, odd3)


@triton.jit
def store_halves(pointer, offset, low, high, mask):
    """fp32 halves [B, 8] as the pointer's dtype, to the blocks at element `offset` [B]."""
    at = pointer + offset[:, None] + tl.arange(0, 8)[None, :]
    tl.store(at, low.to(pointer.dtype.element_ty), mask=mask[:, None])
    tl.store(at + 8, high.to(pointer.dtype.element_ty), mask=mask[:, None])


@triton.jit
def columns(x):
    """[B, 8] -> its eight columns [B]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 4, 2]))
    x04, x26 = tl.split(tl.reshape(even, [x.shape[0], 2, 2]))
    x15, x37 = tl.split(tl.reshape(odd, [x.shape[0], 2, 2]))
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def join_columns(x0, x1, x2, x3, x4, x5, x6, x7):
    """Inverse of `columns`."""
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    even, odd = tl.reshape(even, [x0.shape[0], 4]), tl.reshape(odd, [x0.shape[0], 4])
    return tl.reshape(tl.join(even, odd), [x0.shape[0], 8])


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(low, high):
    """[B] of halves [B, 8]; NaN where one is NaN."""
    x0, x1, x2, x3, x4, x5, x6, x7 = columns(_larger(tl.abs(low), tl.abs(high)))
    return _larger(_larger(_larger(x0, x1), _larger(x2, x3)), _larger(_larger(x4, x5), _larger(x6, x7)))


@triton.jit
def reciprocal(divisor):
    """(r, r'): 1 / divisor rounded to nearest, and what is missing."""
    first = tl.div_rn(1.0, divisor)
    error = tl.fma(-first, divisor, 1.0)
    rest = error * first
    return first, tl.fma(rest, error, rest)


@triton.jit
def quotient(x, divisor, first, rest, DIVIDE: tl.constexpr):
    """x / divisor: rounded to nearest, or by its `reciprocal`, as good as that for E2M1 and E4M3; there -0 gives +0."""
    if DIVIDE:
        return tl.div_rn(x, divisor)
    return tl.fma(x, first, tl.fma(x, rest, 0.0))


@triton.jit
def to_e4m3(value):
    """fp32 in [2^-9, 448] -> (its E4M3 neighbour as fp32, code int32), half to even."""
    binade = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)  # 2^-6, the smallest normal
    magic = binade + 0x0A400000  # times 1.5 * 2^20: its unit in the last place is E4M3's step there
    addend = magic.to(tl.float32, bitcast=True)
    total = value + addend
    code = total.to(tl.int32, bitcast=True) - magic + ((binade - 0x3C800000) >> 20)
    return total - addend, code


@triton.jit
def scale_of_amax(amax, six, first, rest, DIVIDE: tl.constexpr):
    """(block scale fp32, its code int32) [B] of block amaxes; `six` = 6 * global scale. NaN: code 0x7F."""
    scale = quotient(amax, six, first, rest, DIVIDE)
    if DIVIDE:
        scale = tl.where(scale == 0.0, 1.0, scale)
    scale = tl.where(amax == 0.0, 1.0, scale)
    value, code = to_e4m3(tl.minimum(tl.maximum(scale, 0.001953125), 448.0))
    if DIVIDE:  # a global scale that is NaN; blocks that are not finite are seen to in `encode_halves`
        value, code = tl.where(scale == scale, value, scale), tl.where(scale == scale, code, 0x7F)
    return value, code


@triton.jit
def _word(x, step, first, rest, DIVIDE: tl.constexpr):
    """int32 [B]: E2M1 codes of x [B, 8] by steps [B] = block scale * global scale, the first element lowest."""
    q = quotient(x, tl.broadcast_to(step[:, None], x.shape), first[:, None], rest[:, None], DIVIDE)
    magnitude = tl.minimum(tl.abs(q), 6.0)  # NaN gives 6
    # Below 2 the step is 1/2, to 4 it is 1, then 2. Codes q * 2, q + 2, q / 2 + 4, each rounded half to even: where
    # one of them is meant it is the smallest.
    code = tl.fma(magnitude, 2.0, _MAGIC)
    code = tl.minimum(code, magnitude + (_MAGIC + 2.0))
    code = tl.minimum(code, tl.fma(magnitude, 0.5, _MAGIC + 4.0))
    c0, c1, c2, c3, c4, c5, c6, c7 = columns(code)
    # exact, as all stays below 2^24; codes come to lie in the low bits
    low = tl.fma(c3 - _MAGIC, 4096.0, tl.fma(c2 - _MAGIC, 256.0, tl.fma(c1 - _MAGIC, 16.0, c0)))
    high = tl.fma(c7 - _MAGIC, 4096.0, tl.fma(c6 - _MAGIC, 256.0, tl.fma(c5 - _MAGIC, 16.0, c4)))
    word = (low.to(tl.uint32, bitcast=True) & 0xFFFF) | (high.to(tl.uint32, bitcast=True) << 16)
    if DIVIDE:
        q = tl.where(q < 0.0, -1.0, 1.0)  # neither -0 nor NaN has a sign
    return (word | _signs(q)).to(tl.int32, bitcast=True)


@triton.jit
def _signs(q):
    """uint32 [B]: the sign of element i of q [B, 8] at bit 4 i + 3."""
    q0, q1, q2, q3, q4, q5, q6, q7 = columns(q.to(tl.uint32, bitcast=True))
    bits = q7 >> 28
    bits = (bits << 4) | (q6 >> 28)
    bits = (bits << 4) | (q5 >> 28)
    bits = (bits << 4) | (q4 >> 28)
    bits = (bits << 4) | (q3 >> 28)
    bits = (bits << 4) | (q2 >> 28)
    bits = (bits << 4) | (q1 >> 28)
    bits = (bits << 4) | (q0 >> 28)
    return bits & 0x88888888


@triton.jit
def _squares(magnitude, step, first, rest):
    """Squared rounding errors [B, 8] of magnitudes [B, 8] on grids of `step` [B]."""
    q = tl.minimum(quotient(magnitude, step[:, None], first[:, None], rest[:, None], False), 6.0)
    binade = tl.maximum(q.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)  # 1, the smallest normal
    magic = (binade + 0x0B400000).to(tl.float32, bitcast=True)  # times 1.5 * 2^22
    error = tl.fma((q + magic) - magic, tl.broadcast_to(step[:, None], q.shape), -magnitude)  # the product is exact
    return error * error


@triton.jit
def block_error(low, high, step):
    """[B]: sum of squared rounding errors of magnitudes in halves [B, 8], on grids of `step` [B] in [2^-9, 448].

    In units of the global scale. The sum has the order in which torch sums 16 numbers on a CPU.
    """
    first, rest = reciprocal(step)
    e0, e1, e2, e3, e4, e5, e6, e7 = columns(_squares(low, step, first, rest) + _squares(high, step, first, rest))
    return ((((((e0 + e1) + e2) + e3) + e4) + e5) + e6) + e7


@triton.jit
def _rounded_quotient(x, divisor, first, rest):
    """x / divisor to nearest: the quotient, which is within an ulp, and what it leaves (Markstein's theorem)."""
    q = tl.fma(x, first, x * rest)
    return tl.fma(tl.fma(-q, tl.broadcast_to(divisor, x.shape), x), first, q)


@triton.jit
def magnitudes(low, high, global_scale, DIVIDE: tl.constexpr):
    """|x| / global scale of both halves: errors are compared in this unit, or their squares would leave fp32.

    Where |x| is so small that the remainder underflows (not DIVIDE) the square is zero anyway.
    """
    low, high = tl.abs(low), tl.abs(high)
    if DIVIDE:
        divisor = tl.broadcast_to(global_scale, low.shape)
        low, high = tl.div_rn(low, divisor), tl.div_rn(high, divisor)
    else:
        first, rest = reciprocal(global_scale)
        low = _rounded_quotient(low, global_scale, first, rest)
        high = _rounded_quotient(high, global_scale, first, rest)
    return low, high


@triton.jit
def encode_halves(low, high, scale, code, amax, global_scale, DIVIDE: tl.constexpr):
    """(words of the low and the high half int32 [B], scale codes int32 [B]) with the block scales given."""
    step = scale * global_scale
    first, rest = reciprocal(step)
    low_word = _word(low, step, first, rest, DIVIDE)
    high_word = _word(high, step, first, rest, DIVIDE)
    is_finite = amax < float("inf")
    sevens = tl.full(low_word.shape, 0x77777777, tl.int32)
    return (
        tl.where(is_finite, low_word, sevens),
        tl.where(is_finite, high_word, sevens),
        tl.where(is_finite, code, 0x7F),
    )


@triton.jit
def quantize_halves_as(low, high, global_scale, FOUR_OVER_SIX: tl.constexpr, DIVIDE: tl.constexpr):
    """`quantize_halves` in one of its two ways; DIVIDE serves any global scale."""
    amax = block_amax(low, high)
    six = 6.0 * global_scale
    first, rest = reciprocal(six)
    scale, code = scale_of_amax(amax, six, first, rest, DIVIDE)
    if FOUR_OVER_SIX:
        four, four_code = scale_of_amax(amax * 1.5, six, first, rest, DIVIDE)
        low_magnitude, high_magnitude = magnitudes(low, high, global_scale, DIVIDE)
        error_of_six = block_error(low_magnitude, high_magnitude, scale)
        use_four = block_error(low_magnitude, high_magnitude, four) < error_of_six
        scale, code = tl.where(use_four, four, scale), tl.where(use_four, four_code, code)
    return encode_halves(low, high, scale, code, amax, global_scale, DIVIDE)


@triton.jit
def is_usual(global_scale, LARGEST: tl.constexpr):
    """Whether quotients may be taken by `reciprocal`; LARGEST: LARGEST_GLOBAL_SCALE of the numbers' dtype."""
    return (global_scale >= _SMALLEST) & (global_scale <= LARGEST)


@triton.jit
def quantize_halves(low, high, global_scale, FOUR_OVER_SIX: tl.constexpr, LARGEST: tl.constexpr):
    """(words of the low and the high half int32 [B], scale codes int32 [B]) of blocks [B, 8] + [B, 8].

    global_scale    fp32 scalar
    FOUR_OVER_SIX   the block scale maps the amax to 6 or, where that errs less, to 4
    LARGEST         LARGEST_GLOBAL_SCALE of the dtype whose numbers the halves hold
    """
    if is_usual(global_scale, LARGEST):
        low_word, high_word, code = quantize_halves_as(low, high, global_scale, FOUR_OVER_SIX, False)
    else:
        low_word, high_word, code = quantize_halves_as(low, high, global_scale, FOUR_OVER_SIX, True)
    return low_word, high_word, code


@triton.jit
def tile_places(num_rows, num_blocks, tiles_a_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tile: (first row int64, first block, row and block within it int32 [B], what lies inside [B])."""
    tile = tl.program_id(0)
    first_row = (tile // tiles_a_row).to(tl.int64) * ROWS
    first_block = (tile % tiles_a_row) * COLUMNS
    place = tl.arange(0, ROWS * COLUMNS)
    row, block = place // COLUMNS, place % COLUMNS
    rows_left = tl.minimum(num_rows - first_row, ROWS).to(tl.int32)
    blocks_left = tl.minimum(num_blocks - first_block, COLUMNS).to(tl.int32)
    return first_row, first_block, row, block, (row < rows_left) & (block < blocks_left)


@triton.jit
def store_words(pointer, block, low_word, high_word, mask):
    """The packed bytes of blocks number `block` [B] of a contiguous int32 tensor, two words a block."""
    words = tl.join(low_word, high_word)  # [B, 2]
    at = pointer + block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(at, words, mask=mask[:, None])


@triton.jit
def store_codes(
    packed,
    block_scale,
    first_row,
    first_block,
    row,
    block,
    low_word,
    high_word,
    code,
    mask,
    num_blocks,
    SWIZZLE: tl.constexpr,
):
    """Words and scale codes of a tile's blocks [first_row + row, first_block + block], scales row-major or swizzled.

    SWIZZLE: as `formats.layout.swizzle` lays them, padding zero; a tile's rows then lie within 128 that it divides.
    """
    first = first_row * num_blocks + first_block
    target = row * num_blocks.to(tl.int32) + block
    store_words(packed + first * 2, target, low_word, high_word, mask)
    if SWIZZLE:
        store_swizzled(block_scale, first_row, row, first_block + block, tl.where(mask, code, 0), num_blocks)
    else:
        tl.store(block_scale + first + target, code.to(tl.uint8), mask=mask)


@triton.jit
def store_swizzled(pointer, first_row, row, block, code, num_blocks):
    """Scale codes of blocks [first_row + row, block] in the 128x4 layout; blocks past its padding are left out."""
    columns_of_tiles = (num_blocks + 3) // 4
    row += (first_row % 128).to(tl.int32)
    at = block // 4 * 512 + row % 32 * 16 + row // 32 * 4 + block % 4
    tile_row = pointer + (first_row // 128) * columns_of_tiles * 512
    tl.store(tile_row + at, code.to(tl.uint8), mask=block < columns_of_tiles * 4)
