// Row-major weights, as checkpoints store them, to pairs of bfloat16 or float16, exactly.
//
// A pair is a 32-bit register with two 16-bit numbers. Code bits, moved to the end of the exponent and the top of the
// mantissa, are e2m1 * 2^-126 as bfloat16 and e2m1 * 2^-14 as float16, the subnormal 0.5 included; a scale that holds
// the inverse power makes one exact multiplication of the rest. See decode.cuh for the same with reordered codes.
#pragma once
#include "decode.cuh"

// Eight codes of a word, the first in the lowest bits, to four pairs: pair q holds codes q and q + 4.
template <int TYPE>
DEVICE void natural_codes(u32 word, u32 (&pairs)[4]) {
#pragma unroll
  for (int q = 0; q < 4; q++) {
    if (TYPE == BF16) {
      // One multiplication makes two copies of a nibble: one for the sign (bit 15), one for the magnitude (bits 6-8).
      const u32 nibbles = (q < 2 ? word : word >> 8) & (q & 1 ? 0x00F000F0u : 0x000F000Fu);
      pairs[q] = nibbles * (q & 1 ? 0x104u : 0x1040u) & 0x81C081C0u;
    } else {  // the copies would touch: magnitude in bits 9-11
      const int up = 9 - 4 * q;
      const u32 magnitude = up >= 0 ? word << (up & 31) : word >> (-up & 31);
      pairs[q] = (word << (12 - 4 * q) & 0x80008000u) | (magnitude & 0x0E000E00u);
    }
  }
}

DEVICE u32 bits_of(float value) {
#if defined(__CUDACC__)
  return __float_as_uint(value);
#else
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
#endif
}

DEVICE float float_of(u32 bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
#endif
}

// A float that bfloat16 holds (its lower bits are not looked at), twice.
DEVICE u32 twice_bf16(float value) { return bits_of(value) >> 16 | (bits_of(value) & 0xFFFF0000u); }

// E4M3 byte, NaN included, to fp32. Its bits, three places up, are the value * 2^-120 with nothing subnormal in use.
DEVICE float e4m3_value(u32 byte) {
  const u32 magnitude = byte & 0x7F;
  const float value = magnitude < 8 ? (float)magnitude * 0.001953125f : float_of((magnitude << 20) + (120u << 23));
  const float kept = magnitude == 0x7F ? float_of(0x7FC00000u) : value;
  return byte & 0x80 ? -kept : kept;
}

// Two scale bytes to two pairs, each scale twice: * 2^118 as bfloat16, * 2^7 as float16.
template <int TYPE>
DEVICE void natural_scales(u32 bytes, u32 (&pairs)[2]) {
#if defined(__CUDACC__)
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)bytes));
  if (TYPE == FP16) {
    halves = multiply_f16x2(halves, 0x58005800u);
    pairs[0] = __byte_perm(halves, 0, 0x1010);
    pairs[1] = __byte_perm(halves, 0, 0x3232);
  } else {
    float low, high;
    asm("{ .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high) : "r"(halves));
    pairs[0] = __byte_perm(bits_of(low * 0x1p118f), 0, 0x3232);
    pairs[1] = __byte_perm(bits_of(high * 0x1p118f), 0, 0x3232);
  }
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float value = e4m3_value(bytes >> 8 * i & 0xFF);
    if (TYPE == BF16) {
      pairs[i] = twice_bf16(value * 0x1p118f);
    } else {  // float16 has the value * 2^7 as a normal number, or as zero
      const u32 bits = bits_of(value * 128.0f), sign = bits >> 16 & 0x8000u;
      const u32 half = value != value ? 0x7E00u : value == 0 ? sign : sign | ((bits & 0x7FFFFFFFu) - (112u << 23)) >> 13;
      pairs[i] = half | half << 16;
    }
  }
#endif
}

// MXFP4's scale byte to two pairs whose product, times the codes' pairs, is the weight. As float16 weights do, those
// beyond its range vanish or overflow.
template <int TYPE>
DEVICE void natural_mx_factors(u32 byte, u32& factor, u32& other) {
  if (TYPE == BF16) {
    factor = 0x7E807E80u;  // 2^126
    other = byte == 0 ? 0x00400040u : byte == 255 ? 0x7FC07FC0u : byte * 0x00800080u;
  } else {
    // 2^14 * 2^(byte - 127) in two powers of float16, 2^-14 to 2^15
    const int wanted = (int)byte - 113, exponent = wanted < -28 ? -28 : wanted, half = exponent >> 1;
    factor = byte == 255 ? 0x7E007E00u : exponent > 30 ? 0x7BFF7BFFu : (u32)(half + 15) * 0x04000400u;
    other = exponent > 30 ? 0x7BFF7BFFu : (u32)(exponent - half + 15) * 0x04000400u;
  }
}

// What weights decoded by natural_codes and natural_scales have to be multiplied by, global scale apart.
template <int TYPE, int FORMAT>
DEVICE float natural_factor() {
  return FORMAT == MXFP4 ? 1.0f : TYPE == BF16 ? 256.0f : 128.0f;
}

// Eight elements of an activation row in the order of natural_codes: (0, 4), (1, 5), (2, 6), (3, 7).
DEVICE uint4 natural_order(uint4 v) {
#if defined(__CUDACC__)
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
#else
  return {(v.x & 0xFFFFu) | v.z << 16, v.x >> 16 | (v.z & 0xFFFF0000u), (v.y & 0xFFFFu) | v.w << 16,
          v.y >> 16 | (v.w & 0xFFFF0000u)};
#endif
}
