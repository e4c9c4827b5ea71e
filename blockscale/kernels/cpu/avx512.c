/* Products with AVX-512: 16 rows of a weight in the 16 lanes of a register, activations broadcast to all of them.
 *
 * Built twice. With VBMI and BF16 (Zen 4, Sapphire Rapids and later) a nibble is looked up without being cut out first,
 * since vpermb and vpermw ignore the upper bits of an index, and bf16 activations are multiplied in pairs. Without
 * (Cascade Lake, Ice Lake) the nibbles are masked, and exact products are those of floats. */
#include <immintrin.h>

#include "rows.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define TABLE kernels_avx512_bf16
#define TABLE_NAME "avx512_bf16"
#define WIDE 1
#else
#define TABLE kernels_avx512
#define TABLE_NAME "avx512"
#define WIDE 0
#endif
#define INLINE static inline __attribute__((always_inline))

enum { AHEAD = 8192 }; /* bytes that prefetches run ahead of the loads */

INLINE void prefetch_tile(const uint8_t *tiles, int format) {
    for (int i = 0; i < tile_bytes(format); i += 64) _mm_prefetch((const char *)tiles + AHEAD + i, _MM_HINT_T0);
}

/* 2 * e2m1 + 12 of a code, for unsigned bytes */
INLINE __m512i byte_table(void) {
    return _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

INLINE __m512i low_nibbles(__m512i table, __m512i codes) {
#if WIDE
    return _mm512_permutexvar_epi8(codes, table);
#else
    return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
#endif
}

INLINE __m512i high_nibbles(__m512i table, __m512i codes) { return low_nibbles(table, _mm512_srli_epi16(codes, 4)); }

/* The rows' scales of a tile, then those of one of its blocks as floats. Every call has a constant block. */
INLINE __m512i load_scales(const uint8_t *scales, int format) {
    return format == NVFP4 ? _mm512_loadu_si512(scales)
                           : _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)scales));
}

INLINE __m512 block_scales(__m512i bytes, int format, int block) {
    if (format == NVFP4) { /* byte `block` to bits 20 .. 27, and 96 added to the exponent */
        const int up = 20 - 8 * block;
        const __m512i shifted = up >= 0 ? _mm512_slli_epi32(bytes, up) : _mm512_srli_epi32(bytes, -up);
        const __m512i bits = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(0x0FF00000),
                                                       _mm512_set1_epi32(0x30000000), 0xEA); /* a & b | c */
        return _mm512_castsi512_ps(bits);
    }
    const __m512i shifted = _mm512_slli_epi32(bytes, 23 - 8 * block);
    const __m512i bits = _mm512_and_si512(shifted, _mm512_set1_epi32(0x7F800000));
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000))); /* 2^-127 is a subnormal */
}

INLINE void store_sums(const __m512 *sum, int m, float *out) {
    for (int j = 0; j < m; j++) _mm512_storeu_ps(out + j * ROWS, sum[j]);
}

INLINE void dot_bytes_of(const uint8_t *tiles, int64_t count, const int format, const struct chunk *x, const int m,
                         float *out) {
    const int blocks = TILE_K / block_size(format), registers = block_size(format) / 8;
    const __m512i table = byte_table();
    const uint32_t *bytes = x->bytes;
    const float *scale = x->scale;
    const int32_t *offset = x->offset;
    __m512 sum[MAX_CHUNK];
    for (int j = 0; j < m; j++) sum[j] = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t++, tiles += tile_bytes(format)) {
        prefetch_tile(tiles, format);
        const __m512i scales = load_scales(tiles + TILE_CODES, format);
#pragma GCC unroll 4
        for (int block = 0; block < blocks; block++) {
            __m512i w[8];
#pragma GCC unroll 4
            for (int r = 0; r < registers; r++) {
                const __m512i codes = _mm512_loadu_si512(tiles + (block * registers + r) * 64);
                w[2 * r] = low_nibbles(table, codes);
                w[2 * r + 1] = high_nibbles(table, codes);
            }
            const __m512 ws = block_scales(scales, format, block);
#pragma GCC unroll 8
            for (int j = 0; j < m; j++) {
                __m512i product = _mm512_set1_epi32(offset[j]);
#pragma GCC unroll 8
                for (int r = 0; r < 2 * registers; r++) {
                    product = _mm512_dpbusd_epi32(product, w[r], _mm512_set1_epi32((int)bytes[r * m + j]));
                }
                const __m512 factor = _mm512_mul_ps(ws, _mm512_set1_ps(scale[j]));
                sum[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), factor, sum[j]);
            }
            bytes += 2 * registers * m;
            scale += m;
            offset += m;
        }
    }
    store_sums(sum, m, out);
}

INLINE void dot_floats_of(const uint8_t *tiles, int64_t count, const int format, const struct chunk *x, const int m,
                          float *out) {
    const int blocks = TILE_K / block_size(format), registers = block_size(format) / 8;
    const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    const float *floats = x->floats;
    __m512 sum[MAX_CHUNK];
    for (int j = 0; j < m; j++) sum[j] = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t++, tiles += tile_bytes(format)) {
        prefetch_tile(tiles, format);
        const __m512i scales = load_scales(tiles + TILE_CODES, format);
#pragma GCC unroll 4
        for (int block = 0; block < blocks; block++) {
            __m512 part[MAX_CHUNK];
            for (int j = 0; j < m; j++) part[j] = _mm512_setzero_ps();
            for (int r = 0; r < registers; r++) {
                __m512i codes = _mm512_loadu_si512(tiles + (block * registers + r) * 64);
#pragma GCC unroll 8
                for (int c = 0; c < 8; c++) { /* vpermps reads the lowest four bits of a lane */
                    const __m512 w = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * c), table);
#pragma GCC unroll 8
                    for (int j = 0; j < m; j++) {
                        part[j] = _mm512_fmadd_ps(w, _mm512_set1_ps(floats[c * m + j]), part[j]);
                    }
                }
                floats += 8 * m;
            }
            const __m512 ws = block_scales(scales, format, block);
            for (int j = 0; j < m; j++) sum[j] = _mm512_fmadd_ps(part[j], ws, sum[j]);
        }
    }
    store_sums(sum, m, out);
}

#if WIDE
INLINE void dot_pairs_of(const uint8_t *tiles, int64_t count, const int format, const struct chunk *x, const int m,
                         float *out) {
    const int blocks = TILE_K / block_size(format), registers = block_size(format) / 8;
    /* the bf16 bits of each e2m1 code, twice: vpermw reads the lowest five bits of a lane */
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, (short)0x8000, (short)0xBF00, (short)0xBF80,
        (short)0xBFC0, (short)0xC000, (short)0xC040, (short)0xC080, (short)0xC0C0));
    const uint32_t *pairs = x->pairs;
    __m512 sum[MAX_CHUNK];
    for (int j = 0; j < m; j++) sum[j] = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t++, tiles += tile_bytes(format)) {
        prefetch_tile(tiles, format);
        const __m512i scales = load_scales(tiles + TILE_CODES, format);
#pragma GCC unroll 4
        for (int block = 0; block < blocks; block++) {
            __m512 part[MAX_CHUNK];
            for (int j = 0; j < m; j++) part[j] = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int r = 0; r < registers; r++) {
                const __m512i codes = _mm512_loadu_si512(tiles + (block * registers + r) * 64);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) { /* nibble c of the lower and of the upper word: columns c and c + 4 */
                    const __m512i w = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * c), table);
#pragma GCC unroll 8
                    for (int j = 0; j < m; j++) {
                        const __m512i xs = _mm512_set1_epi32((int)pairs[c * m + j]);
                        part[j] = _mm512_dpbf16_ps(part[j], (__m512bh)w, (__m512bh)xs);
                    }
                }
                pairs += 4 * m;
            }
            const __m512 ws = block_scales(scales, format, block);
            for (int j = 0; j < m; j++) sum[j] = _mm512_fmadd_ps(part[j], ws, sum[j]);
        }
    }
    store_sums(sum, m, out);
}
#endif

/* One copy of the loops for each number of rows, so that sums stay in registers. */
#define CASE(name, f, i) \
    case i: \
        name##_of(tiles, count, f, x, i, out); \
        break;
#define ALL(name, f) \
    switch (x->m) { \
        CASE(name, f, 1) CASE(name, f, 2) CASE(name, f, 3) CASE(name, f, 4) \
        CASE(name, f, 5) CASE(name, f, 6) CASE(name, f, 7) CASE(name, f, 8) \
    }
#define FUNCTION(name) \
    static void name(const uint8_t *tiles, int64_t count, int format, const struct chunk *x, float *out) { \
        if (format == NVFP4) { \
            ALL(name, NVFP4) \
        } else { \
            ALL(name, MXFP4) \
        } \
    }
FUNCTION(dot_bytes)
FUNCTION(dot_floats)
#if WIDE
FUNCTION(dot_pairs)
#endif

const struct kernels TABLE = {
    .name = TABLE_NAME,
    .rows_at_once = MAX_CHUNK,
    .has_pairs = WIDE,
    .dot_floats = dot_floats,
#if WIDE
    .dot_pairs = dot_pairs,
    .fill_pairs = fill_pairs,
#endif
    .dot_bytes = dot_bytes,
    .fill_floats = fill_floats,
    .fill_bytes = fill_bytes,
    .fill_fp4 = fill_fp4,
    .quantize_row = quantize_row,
    .finite_amax_bits = finite_amax_bits,
    .store = store,
};
