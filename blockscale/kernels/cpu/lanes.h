/* Sixteen fp32 lanes in the compiler's own vectors, for files that are compiled once for several processors. */
#ifndef BLOCKSCALE_CPU_LANES_H
#define BLOCKSCALE_CPU_LANES_H

#include <math.h>

#include "kernels.h"

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU
#endif
#define INLINED static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

INLINED floats load_floats(const float *from) {
    floats v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINED floats load_bf16(const uint16_t *from) {
    halves stored;
    memcpy(&stored, from, sizeof stored);
    const words bits = __builtin_convertvector(stored, words) << 16;
    floats v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

INLINED void store_floats(float *to, floats v) { memcpy(to, &v, sizeof v); }

/* e^x within 2 units in the last place, 0 below -87; loops over it become vectors */
INLINED float exp_of(float x) {
    const float low = x < -87.0f ? -87.0f : x, inside = low > 88.7f ? 88.7f : low; /* NaN stays */
    const float scaled = inside * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to the nearest whole number */
    const float whole = scaled - 12582912.0f, rest = inside - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = rest * 1.9875691500e-4f + 1.3981999507e-3f; /* Cephes' polynomial of expf */
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const float half = float_of((bits_of(scaled) - 0x4B400000u + 126u) << 23); /* of 2^whole, whose exponent has no room */
    const float found = sum * half * 2.0f, positive = x < -87.0f ? 0.0f : found;
    return x > 88.7f ? INFINITY : positive;
}

/* In one fixed order */
INLINED float sum_of(floats v) {
    float s[LANES];
    memcpy(s, &v, sizeof s);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    }
    return s[0];
}

#endif
