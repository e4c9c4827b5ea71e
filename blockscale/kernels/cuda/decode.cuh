// Weights of the fragment-ordered layout (layouts.py) to pairs of bfloat16 or float16, exactly.
//
// A pair is a 32-bit register with two 16-bit numbers. Everything here but the multiplication is integer arithmetic
// and also compiles as host C++, where the including file supplies multiply_bf16x2 and multiply_f16x2.
//
// bfloat16, NVFP4: code bits give e2m1 * 2^-126, the scale pair is scale * 2^118, so the product is weight * 2^-8.
// float16, NVFP4: code bits give e2m1 * 2^-14, the scale pair is scale * 2^6, so the product is weight * 2^-8.
// e2m1 * e4m3 has at most six significant bits: both products are exact. MXFP4 weights come out as they are.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(__CUDACC__)
#define DEVICE __device__ __forceinline__
#else
#define DEVICE static inline
#endif

enum { BF16 = 0, FP16 = 1 };   // activations, and what weights are decoded to
enum { NVFP4 = 0, MXFP4 = 1 }; // weights

#if defined(__CUDACC__)
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {  // subnormals are kept
  u32 r;
#if __CUDA_ARCH__ >= 900
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else  // adding -0 changes nothing
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return r;
}
DEVICE u32 multiply_f16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
template <int TYPE>
DEVICE u32 round_pair(float low, float high) {  // to nearest even
  u32 r;
  if constexpr (TYPE == FP16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u32 rotate_right(u32 word, int distance) { return __funnelshift_r(word, word, distance); }
DEVICE u32 byte_of(u32 word, int index) { return __byte_perm(word, 0, 0x4440 | index); }
#else
DEVICE u32 rotate_right(u32 word, int distance) { return word >> distance | word << (32 - distance); }
DEVICE u32 byte_of(u32 word, int index) { return word >> 8 * index & 0xFF; }
#endif

template <int TYPE>
DEVICE u32 multiply_pair(u32 a, u32 b) {
  return TYPE == BF16 ? multiply_bf16x2(a, b) : multiply_f16x2(a, b);
}

// Eight codes of a word to four pairs of sign << 15 | magnitude << 6: e2m1 * 2^-126 as bfloat16. Nine operations.
// Bit operations and shifts share one pipe, which is the busiest: a kernel that gives 64 and 16 as values that the
// compiler does not know has the two shifts to the left done as multiplications by another.
DEVICE void codes_to_bf16(u32 word, u32 (&pairs)[4], u32 times64 = 64, u32 times16 = 16) {
  const u32 bits = 0x81C081C0u;
  pairs[0] = word & bits;
  pairs[1] = word * times64 & bits;
  pairs[2] = rotate_right(word, 6) & bits;
  pairs[3] = (rotate_right(word, 4) & 0x80C080C0u) | (word * times16 & 0x01000100u);
}

// The same codes to four pairs of sign << 15 | magnitude << 9: e2m1 * 2^-14 as float16.
DEVICE void codes_to_fp16(u32 word, u32 (&pairs)[4]) {
  const u32 sign = 0x80008000u, magnitude = 0x0E000E00u;
  pairs[0] = (word & sign) | (word << 3 & magnitude);
  pairs[1] = (word << 6 & sign) | (word << 9 & magnitude);
  pairs[2] = (rotate_right(word, 6) & sign) | (word >> 3 & magnitude);
  pairs[3] = (rotate_right(word, 4) & sign) | (word >> 1 & 0x06000600u) | (word << 7 & 0x08000800u);
}

// NVFP4 scale byte `index` of a word to a pair that holds it twice: * 2^118 as bfloat16, * 2^6 as float16.
// The byte lands on the exponent field and the upper mantissa bits; NaN and -0 (for 0) come out by carry.
template <int TYPE>
DEVICE u32 nvfp4_scale_pair(u32 word, int index) {
  return TYPE == BF16 ? byte_of(word, index) * 0x00100010u + 0x76007600u
                      : byte_of(word, index) * 0x00800080u + 0x30003000u;
}

// MXFP4: two pairs whose product, times the codes' pairs, is the weight. `first` and `second` are the words of the
// even and the odd block of 16 columns, which hold the bfloat16 exponent fields of both factors (layouts.py).
template <int TYPE>
DEVICE void mxfp4_factor_pairs(u32 first, u32 second, int index, u32& factor, u32& other) {
  const u32 a = byte_of(first, index), b = byte_of(second, index);
  if (TYPE == BF16) {
    factor = a * 0x00800080u;
    other = b * 0x00800080u;
  } else {
    // a + b - 253 is the E8M0 byte. Both factors are float16 powers of two, 2^-14 to 2^15, with product
    // 2^(byte - 113). Where that does not reach, weights vanish or overflow as float16 weights do.
    int exponent = (int)(a + b) - 253 - 113;
    exponent = exponent < -28 ? -28 : exponent;
    const int half = exponent >> 1;
    factor = a == 255 ? 0x7E007E00u : exponent > 30 ? 0x7BFF7BFFu : (u32)(half + 15) * 0x04000400u;
    other = exponent > 30 ? 0x7BFF7BFFu : (u32)(exponent - half + 15) * 0x04000400u;
  }
}

// What the products have to be multiplied by to be weights; global scale apart.
template <int FORMAT>
DEVICE float weight_factor() {
  return FORMAT == NVFP4 ? 256.0f : 1.0f;
}

// Eight codes of a word and their scale (MXFP4: two factors) to four pairs.
template <int TYPE, int FORMAT>
DEVICE void decode_word(u32 word, u32 factor, u32 other, u32 (&pairs)[4], u32 times64 = 64, u32 times16 = 16) {
  if (TYPE == BF16) codes_to_bf16(word, pairs, times64, times16);
  else codes_to_fp16(word, pairs);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    pairs[i] = multiply_pair<TYPE>(pairs[i], factor);
    if (FORMAT == MXFP4) pairs[i] = multiply_pair<TYPE>(pairs[i], other);
  }
}
