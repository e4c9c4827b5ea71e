/* Products with AVX2 and FMA: a tile's 16 rows in two registers of 8 lanes, activations broadcast to all of them.
 *
 * Built twice: with AVX-VNNI (Alder Lake, Zen 5 and later) four products of bytes and their sum are one instruction. */
#include <immintrin.h>

#include "rows.h"

#ifdef __AVXVNNI__
#define TABLE kernels_avx2_vnni
#define TABLE_NAME "avx2_vnni"
#else
#define TABLE kernels_avx2
#define TABLE_NAME "avx2"
#endif

enum { AT_ONCE = 4 }; /* 8 sums fill half of the 16 registers */

/* Scales of 8 rows of one block as floats; `half` says which rows of the 16. Every call has constants. */
INLINE __m256 block_scales(const uint8_t *scales, int format, int block, int half) {
    if (format == NVFP4) { /* byte `block` of a lane to bits 20 .. 27, and 96 added to the exponent */
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(scales + 32 * half));
        const int up = 20 - 8 * block;
        const __m256i shifted = up >= 0 ? _mm256_slli_epi32(bytes, up) : _mm256_srli_epi32(bytes, -up);
        const __m256i bits = _mm256_or_si256(_mm256_and_si256(shifted, _mm256_set1_epi32(0x0FF00000)),
                                             _mm256_set1_epi32(0x30000000));
        return _mm256_castsi256_ps(bits);
    }
    const __m256i bytes = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(scales + 16 * half)));
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi32(bytes, 23 - 8 * block), _mm256_set1_epi32(0x7F800000));
    return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000))); /* 2^-127 is a subnormal */
}

/* offset + the dot products of 16 unsigned (weights) and signed bytes (activations) in each lane */
INLINE __m256i dot16(const __m256i *w, const uint32_t *bytes, int m, int32_t offset) {
#ifdef __AVXVNNI__
    __m256i product = _mm256_set1_epi32(offset);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        product = _mm256_dpbusd_avx_epi32(product, w[r], _mm256_set1_epi32((int)bytes[r * m]));
    }
    return product;
#else
    __m256i pairs = _mm256_setzero_si256(); /* 16 bits hold 8 products of 24 * 127 */
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[r], _mm256_set1_epi32((int)bytes[r * m])));
    }
    return _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), _mm256_set1_epi32(offset));
#endif
}

INLINE void clear(__m256 (*sum)[2], const int m) {
    for (int j = 0; j < m; j++) sum[j][0] = sum[j][1] = _mm256_setzero_ps();
}

INLINE void store_sums(__m256 (*sum)[2], const int m, float *out) {
    for (int j = 0; j < m; j++) {
        _mm256_storeu_ps(out + j * ROWS, sum[j][0]);
        _mm256_storeu_ps(out + j * ROWS + 8, sum[j][1]);
    }
}

INLINE void dot_bytes_of(const struct group *w, const int format, const struct chunk *x, const int m, float *out) {
    const uint8_t *tiles = w->tiles;
    const int blocks = TILE_K / block_size(format), parts = block_size(format) / 16;
    /* 2 * e2m1 + 12 of a code, for unsigned bytes */
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i low = _mm256_set1_epi8(15);
    const uint32_t *bytes = x->bytes;
    const float *scale = x->scale;
    const int32_t *offset = x->offset;
    __m256 sum[AT_ONCE][2];
    clear(sum, m);
    for (int64_t t = 0; t < w->tiles_count; t++, tiles += tile_bytes(format)) {
        prefetch_tile(tiles, w->prefetch_end, format);
#pragma GCC unroll 4
        for (int block = 0; block < blocks; block++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                __m256i product[AT_ONCE];
                for (int j = 0; j < m; j++) product[j] = _mm256_setzero_si256();
#pragma GCC unroll 2
                for (int part = 0; part < parts; part++) {
                    const uint8_t *from = tiles + (block * parts + part) * 128 + 32 * half;
                    const __m256i first = _mm256_loadu_si256((const __m256i *)from);
                    const __m256i second = _mm256_loadu_si256((const __m256i *)(from + 64));
                    const __m256i w[4] = {
                        _mm256_shuffle_epi8(table, _mm256_and_si256(first, low)),
                        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(first, 4), low)),
                        _mm256_shuffle_epi8(table, _mm256_and_si256(second, low)),
                        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(second, 4), low)),
                    };
#pragma GCC unroll 4
                    for (int j = 0; j < m; j++) {
                        const __m256i more = dot16(w, bytes + part * 4 * m + j, m, part == 0 ? offset[j] : 0);
                        product[j] = part == 0 ? more : _mm256_add_epi32(product[j], more);
                    }
                }
                const __m256 ws = block_scales(tiles + TILE_CODES, format, block, half);
#pragma GCC unroll 4
                for (int j = 0; j < m; j++) {
                    const __m256 factor = _mm256_mul_ps(ws, _mm256_set1_ps(scale[j]));
                    sum[j][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product[j]), factor, sum[j][half]);
                }
            }
            bytes += 4 * parts * m;
            scale += m;
            offset += m;
        }
    }
    store_sums(sum, m, out);
}

/* e2m1 values of the lowest nibble of each lane: an index of three bits, and bit 3 moved to the sign. */
INLINE __m256 decode_lanes(__m256i codes) {
    const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32((int)0x80000000));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
}

INLINE void dot_floats_of(const struct group *w, const int format, const struct chunk *x, const int m, float *out) {
    const uint8_t *tiles = w->tiles;
    const int blocks = TILE_K / block_size(format), registers = block_size(format) / 8;
    const float *floats = x->floats;
    __m256 sum[AT_ONCE][2];
    clear(sum, m);
    for (int64_t t = 0; t < w->tiles_count; t++, tiles += tile_bytes(format)) {
        prefetch_tile(tiles, w->prefetch_end, format);
#pragma GCC unroll 4
        for (int block = 0; block < blocks; block++) {
            __m256 part[AT_ONCE][2];
            clear(part, m);
            for (int r = 0; r < registers; r++) {
                const uint8_t *from = tiles + (block * registers + r) * 64;
                const __m256i upper = _mm256_loadu_si256((const __m256i *)from);
                const __m256i lower = _mm256_loadu_si256((const __m256i *)(from + 32));
#pragma GCC unroll 8
                for (int c = 0; c < 8; c++) {
                    const __m256 w0 = decode_lanes(_mm256_srli_epi32(upper, 4 * c));
                    const __m256 w1 = decode_lanes(_mm256_srli_epi32(lower, 4 * c));
#pragma GCC unroll 4
                    for (int j = 0; j < m; j++) {
                        const __m256 xs = _mm256_set1_ps(floats[c * m + j]);
                        part[j][0] = _mm256_fmadd_ps(w0, xs, part[j][0]);
                        part[j][1] = _mm256_fmadd_ps(w1, xs, part[j][1]);
                    }
                }
                floats += 8 * m;
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const __m256 ws = block_scales(tiles + TILE_CODES, format, block, half);
                for (int j = 0; j < m; j++) sum[j][half] = _mm256_fmadd_ps(part[j][half], ws, sum[j][half]);
            }
        }
    }
    store_sums(sum, m, out);
}

/* One copy of the loops for each number of rows, so that sums stay in registers. */
#define CASE(name, f, i) \
    case i: \
        name##_of(w, f, x, i, out); \
        break;
#define ALL(name, f) \
    switch (x->m) { CASE(name, f, 1) CASE(name, f, 2) CASE(name, f, 3) CASE(name, f, 4) }
BOTH_FORMATS(dot_bytes)
BOTH_FORMATS(dot_floats)

const struct kernels TABLE = {
    .name = TABLE_NAME,
    .rows_at_once = AT_ONCE,
    .groups_at_once = 1,
    .dot_floats = dot_floats,
    .dot_bytes = dot_bytes,
    ROW_FUNCTIONS,
};
