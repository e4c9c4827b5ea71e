"""Codes and scales to floats inside a kernel, by their bits: no float8 type and no table, so every GPU from sm_80 on.

One value at a time (`e2m1`, `e4m3`, `e8m0`), or eight codes of a 32-bit word at a time (`decode_groups`), which costs
two integer operations a weight. There are two ideas in the latter:

* Three bits of an E2M1 magnitude, put where the exponent of a wider float ends and its mantissa begins, are that
  float's bits for the value times a fixed power of two (bf16: 2^-126, fp16: 2^-14), its subnormal 0.5 included. One
  multiplication with a scale that holds the inverse power gives code * scale, exactly: E2M1 * E4M3 has 6 bits.
* Masking `word >> 4q` leaves codes q and q + 4 in its two halves, which is a register of two 16-bit operands. The
  values therefore come out in another order along K than they lie in memory. A product does not care as long as both
  operands agree: within 64 elements, position 8 * (4h + q) + 2t + e of the tile holds element 16t + 8h + 4e + q. This
  is the order in which each thread of a tensor core's operand finds its values in one 64-bit word, a scale's 16 codes.
"""

import triton
import triton.language as tl

# e2m1 * e4m3 comes out of `decode_groups` times 2^-8: what the largest scale leaves free in fp16 and bf16
NVFP4_SHIFT = 8

_2_126 = tl.constexpr(2.0**126)
_FMA_F16 = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.f16x2 $0, $1, $2, z; }")
_FMA_BF16 = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")


@triton.jit
def e2m1(code):
    """int codes 0..15 -> fp32 values."""
    magnitude = ((code & 7).to(tl.uint32) << 22).to(tl.float32, bitcast=True) * _2_126
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def e4m3(byte):
    """uint8 -> fp32; 0x7F and 0xFF are NaN."""
    return _e4m3_half(byte).to(tl.float32) * 256.0


@triton.jit
def e8m0(byte):
    """uint8 -> fp32 2^(byte - 127); 255 is NaN. The smallest, 2^-127, is subnormal."""
    return (_e8m0_bits(byte).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3_half(byte):
    """uint8 -> fp16 of the value times 2^-8, NaN kept."""
    magnitude = (byte & 0x7F).to(tl.int16)
    bits = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7) | ((byte & 0x80).to(tl.int16) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _e8m0_bits(byte):
    """uint8 -> int16 bits of bf16: the exponent field, and a mantissa bit for the subnormal 2^-127 and for NaN."""
    exponent = byte.to(tl.int16)
    return (exponent << 7) | tl.where((exponent == 0) | (exponent == 255), 0x40, 0).to(tl.int16)


@triton.jit
def _pair(word, Q: tl.constexpr, HALF: tl.constexpr):
    """int32 of 8 codes -> int32 of two floats' bits: code Q in the low half, code Q + 4 in the high half.

    HALF: fp16 (magnitude in bits 9-11), else bf16 (bits 6-8).
    """
    shift: tl.constexpr = (9 if HALF else 6) - 4 * Q
    mask: tl.constexpr = 0x0E000E00 if HALF else 0x01C001C0
    # -0x7FFF8000 is 0x80008000 as an int32; the sign bit of a code, bit 3, goes to bit 15
    if shift >= 0:
        return ((word << shift) & mask) | ((word << (12 - 4 * Q)) & -0x7FFF8000)
    return ((word >> -shift) & mask) | ((word << (12 - 4 * Q)) & -0x7FFF8000)


@triton.jit
def multiply_pairs(a, b, HALF: tl.constexpr):
    """int32 tensors of two floats' bits, fp16 if HALF and else bf16 -> their products', each rounded once.

    Written out because the compiler, left to pair 16-bit products by itself, adds a shuffle for every one. fma is what
    sm_80 has for bf16, and a * b + -0.0 is a * b.
    """
    asm: tl.constexpr = _FMA_F16 if HALF else _FMA_BF16
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _scaled_pair(word, scale, DTYPE: tl.constexpr, Q: tl.constexpr, MX: tl.constexpr):
    """-> [..., 2] of DTYPE: codes Q and Q + 4 of each word times its scale."""
    HALF: tl.constexpr = tl.float16 == DTYPE
    bits = _pair(word, Q, HALF)
    if tl.float32 == DTYPE:
        low = (bits << 16).to(tl.float32, bitcast=True) * _2_126 * scale
        high = (bits & -0x10000).to(tl.float32, bitcast=True) * _2_126 * scale
    else:
        if MX:  # E8M0 spans all of bf16's exponents: none is left to hold the inverse power
            bits = multiply_pairs(bits, 0x7E807E80, HALF)  # 2^126 twice
        bits = multiply_pairs(bits, scale, HALF)
        low = (bits & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _scaled_word(word, scale, DTYPE: tl.constexpr, MX: tl.constexpr):
    """int32 [R, G], scale [R, G] -> [R, G, 2 (e), 2, 2 (q)]: the 8 codes times the scale."""
    even = tl.join(_scaled_pair(word, scale, DTYPE, 0, MX), _scaled_pair(word, scale, DTYPE, 2, MX))
    odd = tl.join(_scaled_pair(word, scale, DTYPE, 1, MX), _scaled_pair(word, scale, DTYPE, 3, MX))
    return tl.join(even, odd)


@triton.jit
def _operand_scale(byte, DTYPE: tl.constexpr, MX: tl.constexpr):
    """uint8 scales -> what codes are multiplied by: fp32, or int32 that holds the bits of DTYPE twice."""
    if tl.float32 == DTYPE:
        factor = e8m0(byte)
    else:
        if MX:
            bits = _e8m0_bits(byte)
        elif tl.float16 == DTYPE:  # codes come times 2^-14
            bits = (_e4m3_half(byte).to(tl.float32) * 16384.0).to(tl.float16).to(tl.int16, bitcast=True)
        else:  # 2^-126
            bits = (_e4m3_half(byte).to(tl.float32) * _2_126).to(tl.bfloat16).to(tl.int16, bitcast=True)
        wide = bits.to(tl.int32) & 0xFFFF
        factor = wide | (wide << 16)
    return factor


@triton.jit
def decode_groups(groups, scale, DTYPE: tl.constexpr, MX: tl.constexpr):
    """int64 [R, G] of 16 codes each and uint8 scales [R, G] -> DTYPE [R, 16 G], K in the order of this file's head.

    G is a multiple of 4. The values are exact: e2m1 * e4m3 * 2^-NVFP4_SHIFT in bf16 or fp16, or, where MX, e2m1 * e8m0
    in bf16 or fp32 (what lies beyond bf16's largest is Inf).
    """
    R: tl.constexpr = groups.shape[0]
    G: tl.constexpr = groups.shape[1]
    factor = _operand_scale(scale, DTYPE, MX)
    low = _scaled_word(groups.to(tl.int32), factor, DTYPE, MX)
    high = _scaled_word((groups >> 32).to(tl.int32), factor, DTYPE, MX)
    values = tl.join(low, high).reshape([R, G // 4, 4, 2, 2, 2, 2])  # R, 64s, t, e, q, q, h
    return values.permute([0, 1, 6, 4, 5, 2, 3]).reshape([R, 16 * G])


@triton.jit
def reorder_k(x):
    """[R, K] in memory's order -> the order that `decode_groups` gives; K is a multiple of 64."""
    R: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    split = x.reshape([R, K // 64, 4, 2, 2, 4])  # R, 64s, t, h, e, q
    return split.permute([0, 1, 3, 5, 2, 4]).reshape([R, K])
