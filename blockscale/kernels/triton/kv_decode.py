"""Pages of keys and values, decoded inside attention kernels.

FP8 and NVFP4 elements become fp16, which holds every E4M3 and every e2m1 * e4m3 exactly; 16-bit caches stay what they
are. Codes are decoded four bytes at a time by a few instructions of PTX; the plain operations beside them say the
same, run in Triton's interpreter and on anything that PTX does not know.

Two habits of the compiler decide the speed (Triton 3.6, seen in its SASS):

* keys are decoded from shared memory straight into the tensor cores' registers, which is what one wants. It does the
  same to values, whose registers run across tokens, byte by byte. `tie`, an operand that the PTX ignores, keeps the
  decode where the bytes lie; the 16-bit result then goes through shared memory and is transposed by ldmatrix.
* low and high nibbles stay two tensors (the even and the odd elements), each with its own product, so that nothing is
  interleaved. Within four bytes the order is 0, 2, 1, 3: two codes of a 32-bit word lie 16 bits apart. `code_order`
  gives queries the same order, `element_of` takes it back where results are stored.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.kernels.checks import check_aligned
from blockscale.kernels.device import Device
from blockscale.kernels.paged_cache import KVFormat, PagedCache

BITS16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)
FORMAT_CODES = {KVFormat.BITS16: BITS16.value, KVFormat.FP8: FP8.value, KVFormat.NVFP4: NVFP4.value}

# How E4M3 becomes fp16
PLAIN = tl.constexpr(0)  # integer operations
PTX = tl.constexpr(1)  # the same on pairs, sm_80 and sm_86
PTX_E4M3 = tl.constexpr(2)  # sm_89 and later convert two at a time

# Four E4M3 codes $2 -> two pairs of fp16; $3 is the tie
_CONVERT = tl.constexpr("""
{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}
""")

# The same by integer operations: exponents one bit wider, 0x7F carried into a NaN, times 256
_CONVERT_BITS = tl.constexpr("""
{
.reg .b32 b, m, n, u;
mov.b32 u, 0x5C005C00;
prmt.b32 b, $2, 0, 0x1404;
and.b32 m, b, 0x7F007F00;
add.u32 n, m, 0x01000100;
lop3.b32 m, m, n, 0x80008000, 0xF8;
shr.b32 m, m, 1;
lop3.b32 m, m, b, 0x80008000, 0xF8;
mul.rn.f16x2 $0, m, u;
prmt.b32 b, $2, 0, 0x3424;
and.b32 m, b, 0x7F007F00;
add.u32 n, m, 0x01000100;
lop3.b32 m, m, n, 0x80008000, 0xF8;
shr.b32 m, m, 1;
lop3.b32 m, m, b, 0x80008000, 0xF8;
mul.rn.f16x2 $1, m, u;
}
""")

# Four bytes $4 -> the low nibbles of bytes 0 and 2, of 1 and 3, and the high ones; sign to bit 15, the rest to 9..11
_NIBBLES = tl.constexpr("""
{
.reg .b32 m, s;
shl.b32 m, $4, 9;  and.b32 m, m, 0x0E000E00;  shl.b32 s, $4, 12;  lop3.b32 $0, m, s, 0x80008000, 0xF8;
shl.b32 m, $4, 1;  and.b32 m, m, 0x0E000E00;  shl.b32 s, $4, 4;   lop3.b32 $1, m, s, 0x80008000, 0xF8;
shl.b32 m, $4, 5;  and.b32 m, m, 0x0E000E00;  shl.b32 s, $4, 8;   lop3.b32 $2, m, s, 0x80008000, 0xF8;
shr.b32 m, $4, 3;  and.b32 m, m, 0x0E000E00;  lop3.b32 $3, m, $4, 0x80008000, 0xF8;
}
""")

# NVFP4 elements come out as value / 256: 2^-14 of the code's bits times 2^6 in the block scale, all exact in fp16
NVFP4_UNIT = tl.constexpr(256.0)


@triton.jit
def e4m3_plain(byte):
    """uint8 E4M3 codes -> fp16, exact; 0x7F and 0xFF are NaN."""
    b = byte.to(tl.int32)
    magnitude = b & 0x7F
    # fp16's exponent is one bit wider and its bias 8 larger; 0x7F carries into the bit that makes a NaN of it
    bits = (magnitude << 7) | (((magnitude + 1) & 0x80) << 7) | ((b & 0x80) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def e4m3_values(byte, tie, HOW: tl.constexpr):
    """uint8 E4M3 codes -> fp16, exact. `tie`: uint8 of the same shape, not used (see above)."""
    if HOW == PTX_E4M3:
        value = tl.inline_asm_elementwise(
            _CONVERT,
            "=&r,=r,r,r",
            [byte, tie],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    elif HOW == PTX:
        value = tl.inline_asm_elementwise(
            _CONVERT_BITS,
            "=&r,=r,r,r",
            [byte, tie],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        value = e4m3_plain(byte)
    return value


@triton.jit
def same_values(x, tie, HOW: tl.constexpr):
    """`x` [W, T, D] of 16 bits itself, held where it lies by `tie` (uint8, see above)."""
    if HOW != PLAIN:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=r,r,r,r", [x, tie], dtype=x.dtype, is_pure=True, pack=4
        )
    return x


@triton.jit
def nibbles(byte, tie, HOW: tl.constexpr):
    """uint8 [W, T, H] of two codes -> fp16 (low, high) [W, T, H], e2m1 * 2^-14, bytes in the order 0, 2, 1, 3."""
    if HOW != PLAIN:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES,
            "=&r,=&r,=&r,=&r,r,r",
            [byte, tie],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        W: tl.constexpr = byte.shape[0]
        T: tl.constexpr = byte.shape[1]
        H: tl.constexpr = byte.shape[2]
        b = byte.reshape([W, T, H // 4, 2, 2]).permute(0, 1, 2, 4, 3).reshape([W, T, H]).to(tl.int32)
        low = ((b & 7) << 9) | ((b & 8) << 12)
        high = ((b & 0x70) << 5) | ((b & 0x80) << 8)
        low = low.to(tl.uint16).to(tl.float16, bitcast=True)
        high = high.to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def nvfp4_values(byte, block_scale, tie, HOW: tl.constexpr):
    """uint8 codes [W, T, H] and E4M3 scales [W, T, H/8] -> fp16 even and odd elements / NVFP4_UNIT, [W, T, H] each."""
    W: tl.constexpr = byte.shape[0]
    T: tl.constexpr = byte.shape[1]
    H: tl.constexpr = byte.shape[2]
    low, high = nibbles(byte, tie, HOW)
    scale = block_scale.to(tl.float8e4nv, bitcast=True).to(tl.float16) if HOW == PTX_E4M3 else e4m3_plain(block_scale)
    scale = (scale * 64.0)[:, :, :, None]
    low = (low.reshape([W, T, H // 8, 8]) * scale).reshape([W, T, H])
    high = (high.reshape([W, T, H // 8, 8]) * scale).reshape([W, T, H])
    return low, high


@triton.jit
def code_order(q):
    """[N, D] -> the even and the odd elements [N, D/2] each, in the order in which `nibbles` gives codes."""
    N: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    pairs = q.reshape([N, D // 8, 2, 2, 2]).permute(0, 1, 3, 2, 4).reshape([N, D // 2, 2])
    return pairs.split()


@triton.jit
def element_of(position):
    """The even element that lies at a position of `nibbles`' low result; the odd one is its successor."""
    return 2 * ((position & ~3) | ((position & 1) << 1) | ((position >> 1) & 1))


@triton.jit
def fp16_query(q):
    """[N, D] of any float -> fp16 [N, D] and fp32 [N] powers of two whose product it is.

    A power of two as large as the row's amax loses nothing above 2^-24 of it. NaN and Inf stay.
    """
    q = q.to(tl.float32)
    exponent = tl.max(q.to(tl.int32, bitcast=True) & 0x7F800000, 1)
    exponent = tl.where(exponent == 0x7F800000, 0x3F800000, exponent)
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return (q * inverse[:, None]).to(tl.float16), exponent.to(tl.float32, bitcast=True)


@triton.jit
def load_pages(
    pages, block_scales, page, slot, is_used, stride_page, stride_token, scale_stride_page, scale_stride_token,
    D: tl.constexpr, PADDED: tl.constexpr, FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Stored elements of tokens: page int64 [W, 1 or T], slot and is_used [W, T] -> [W, T, PADDED or half], scales.

    What is not used is not read and comes out as 0. Without block scales the second result is the first. ALIGNED: what
    every stride of the block scales is a multiple of, which Triton would look for only at 16.
    """
    COLUMNS: tl.constexpr = PADDED // 2 if FORMAT == NVFP4 else PADDED
    USED: tl.constexpr = D // 2 if FORMAT == NVFP4 else D
    column = tl.arange(0, COLUMNS)[None, None, :]
    mask = is_used[:, :, None]
    wide = mask if USED == COLUMNS else mask & (column < USED)
    slot = slot.to(tl.int64)
    values = tl.load(pages + (page * stride_page + slot * stride_token)[:, :, None] + column, mask=wide, other=0)
    if FORMAT == NVFP4:
        block = tl.arange(0, PADDED // 16)[None, None, :]
        wide = mask if D == PADDED else mask & (block < D // 16)
        row = tl.multiple_of((page * scale_stride_page + slot * scale_stride_token)[:, :, None], [1, 1, ALIGNED])
        scales = tl.load(block_scales + row + block, mask=wide, other=0)
    else:
        scales = values
    return values, scales


def padded_head_dim(head_dim: int) -> int:
    """A power of two, and at least two products of 16 (NVFP4's even and odd elements make one each)."""
    return max(32, triton.next_power_of_2(head_dim))


def ptx_of(device: Device, is_wide: bool) -> int:
    """Which of the ways above a device takes.

    The PTX takes four bytes of a register for four neighbours, which is what loads of rows that begin at multiples of
    16 bytes give (`is_wide`). Other codes (a head dimension of 80) are decoded one at a time.
    """
    if device.capability is None or not is_wide:
        return PLAIN.value
    return PTX_E4M3.value if device.capability >= (8, 9) else PTX.value


def decode_instructions(cache: PagedCache, device: Device, tokens: int, threads: int) -> int:
    """`ptx_of` for a cache read in tiles of `tokens` by `threads`: FP8 does not mind the order of bytes."""
    if cache.format is not KVFormat.NVFP4:
        return ptx_of(device, True)
    is_shared_out = tokens * padded_head_dim(cache.head_dim) // 2 >= 4 * threads  # four bytes a thread, or more
    strides = (stride for x in (cache.k, cache.v) for stride in x.stride()[:3])
    return ptx_of(device, is_shared_out and not any(stride % 16 for stride in strides))


def as_bytes(x: Tensor) -> Tensor:
    """float8 seen as uint8, which every target can load; anything else as it is."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def scale_alignment(k_block: Tensor, v_block: Tensor) -> int:
    """Bytes that every row of block scales begins at a multiple of, up to 16."""
    return math.gcd(16, *k_block.stride()[:3], *v_block.stride()[:3])


def check_cache_aligned(op: str, cache: PagedCache) -> None:
    """Pages begin where loads of 16 bytes can."""
    for name, pages in (("k", cache.k), ("v", cache.v)):
        check_aligned(op, f"the cache's {name}", pages, 16)
