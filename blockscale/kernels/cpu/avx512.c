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

INLINE void clear(__m512 (*sum)[MAX_CHUNK], int groups, int m) {
    for (int g = 0; g < groups; g++) {
        for (int j = 0; j < m; j++) sum[g][j] = _mm512_setzero_ps();
    }
}

INLINE void store_sums(__m512 (*sum)[MAX_CHUNK], int groups, int m, float *out) {
    for (int g = 0; g < groups; g++) {
        for (int j = 0; j < m; j++) _mm512_storeu_ps(out + (g * m + j) * ROWS, sum[g][j]);
    }
}

/* The scales of a tile of each group, and the tile ahead of it on its way. */
INLINE void open_tile(const struct group *weight, const int groups, const int format, const uint8_t *tiles,
                      __m512i *scales) {
    for (int g = 0; g < groups; g++) {
        prefetch_tile(tiles + g * weight->bytes, weight->prefetch_end, format);
        scales[g] = load_scales(tiles + g * weight->bytes + TILE_CODES, format);
    }
}

INLINE void load_codes(const struct group *weight, const int groups, const uint8_t *from, __m512i *codes) {
    for (int g = 0; g < groups; g++) codes[g] = _mm512_loadu_si512(from + g * weight->bytes);
}

/* sum += part * scale of a block */
INLINE void add_block(const __m512i *scales, const int groups, const int format, const int block, const int m,
                      __m512 (*part)[MAX_CHUNK], __m512 (*sum)[MAX_CHUNK]) {
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++) {
        const __m512 ws = block_scales(scales[g], format, block);
#pragma GCC unroll 8
        for (int j = 0; j < m; j++) sum[g][j] = _mm512_fmadd_ps(part[g][j], ws, sum[g][j]);
    }
}

INLINE void dot_bytes_of(const struct group *weight, const int groups, const int format, const struct chunk *x,
                         const int m, float *out) {
    const int blocks = TILE_K / block_size(format), registers = block_size(format) / 8;
    const __m512i table = byte_table();
    const uint32_t *bytes = x->bytes;
    const float *scale = x->scale;
    const int32_t *offset = x->offset;
    const uint8_t *tiles = weight->tiles;
    __m512 sum[MAX_GROUPS][MAX_CHUNK];
    clear(sum, groups, m);
    for (int64_t t = 0; t < weight->tiles_count; t++, tiles += tile_bytes(format)) {
        __m512i scales[MAX_GROUPS];
        open_tile(weight, groups, format, tiles, scales);
#pragma GCC unroll 4
        for (int block = 0; block < blocks; block++) {
            __m512i w[MAX_GROUPS][8];
            __m512 ws[MAX_GROUPS];
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++) {
#pragma GCC unroll 4
                for (int r = 0; r < registers; r++) {
                    const uint8_t *from = tiles + g * weight->bytes + (block * registers + r) * 64;
                    const __m512i codes = _mm512_loadu_si512(from);
                    w[g][2 * r] = low_nibbles(table, codes);
                    w[g][2 * r + 1] = high_nibbles(table, codes);
                }
                ws[g] = block_scales(scales[g], format, block);
            }
#pragma GCC unroll 8
            for (int j = 0; j < m; j++) {
                __m512i product[MAX_GROUPS];
                product[0] = product[1] = _mm512_set1_epi32(offset[j]);
#pragma GCC unroll 8
                for (int r = 0; r < 2 * registers; r++) {
                    const __m512i xs = _mm512_set1_epi32((int)bytes[r * m + j]);
#pragma GCC unroll 2
                    for (int g = 0; g < groups; g++) product[g] = _mm512_dpbusd_epi32(product[g], w[g][r], xs);
                }
                const __m512 step = _mm512_set1_ps(scale[j]);
#pragma GCC unroll 2
                for (int g = 0; g < groups; g++) {
                    const __m512 value = _mm512_cvtepi32_ps(product[g]);
                    sum[g][j] = _mm512_fmadd_ps(value, _mm512_mul_ps(ws[g], step), sum[g][j]);
                }
            }
            bytes += 2 * registers * m;
            scale += m;
            offset += m;
        }
    }
    store_sums(sum, groups, m, out);
}

INLINE void dot_floats_of(const struct group *weight, const int groups, const int format, const struct chunk *x,
                          const int m, float *out) {
    const int blocks = TILE_K / block_size(format), registers = block_size(format) / 8;
    const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    const float *floats = x->floats;
    const uint8_t *tiles = weight->tiles;
    __m512 sum[MAX_GROUPS][MAX_CHUNK];
    clear(sum, groups, m);
    for (int64_t t = 0; t < weight->tiles_count; t++, tiles += tile_bytes(format)) {
        __m512i scales[MAX_GROUPS];
        open_tile(weight, groups, format, tiles, scales);
#pragma GCC unroll 4
        for (int block = 0; block < blocks; block++) {
            __m512 part[MAX_GROUPS][MAX_CHUNK];
            clear(part, groups, m);
            for (int r = 0; r < registers; r++) {
                __m512i codes[MAX_GROUPS];
                load_codes(weight, groups, tiles + (block * registers + r) * 64, codes);
#pragma GCC unroll 8
                for (int c = 0; c < 8; c++) { /* vpermps reads the lowest four bits of a lane */
                    __m512 w[MAX_GROUPS];
#pragma GCC unroll 2
                    for (int g = 0; g < groups; g++) {
                        w[g] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes[g], 4 * c), table);
                    }
#pragma GCC unroll 8
                    for (int j = 0; j < m; j++) {
                        const __m512 xs = _mm512_set1_ps(floats[c * m + j]);
#pragma GCC unroll 2
                        for (int g = 0; g < groups; g++) part[g][j] = _mm512_fmadd_ps(w[g], xs, part[g][j]);
                    }
                }
                floats += 8 * m;
            }
            add_block(scales, groups, format, block, m, part, sum);
        }
    }
    store_sums(sum, groups, m, out);
}

#if WIDE
INLINE void dot_pairs_of(const struct group *weight, const int groups, const int format, const struct chunk *x,
                         const int m, float *out) {
    const int blocks = TILE_K / block_size(format), registers = block_size(format) / 8;
    /* the bf16 bits of each e2m1 code, twice: vpermw reads the lowest five bits of a lane */
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, (short)0x8000, (short)0xBF00, (short)0xBF80,
        (short)0xBFC0, (short)0xC000, (short)0xC040, (short)0xC080, (short)0xC0C0));
    const uint32_t *pairs = x->pairs;
    const uint8_t *tiles = weight->tiles;
    __m512 sum[MAX_GROUPS][MAX_CHUNK];
    clear(sum, groups, m);
    for (int64_t t = 0; t < weight->tiles_count; t++, tiles += tile_bytes(format)) {
        __m512i scales[MAX_GROUPS];
        open_tile(weight, groups, format, tiles, scales);
#pragma GCC unroll 4
        for (int block = 0; block < blocks; block++) {
            __m512 part[MAX_GROUPS][MAX_CHUNK];
            clear(part, groups, m);
#pragma GCC unroll 4
            for (int r = 0; r < registers; r++) {
                __m512i codes[MAX_GROUPS];
                load_codes(weight, groups, tiles + (block * registers + r) * 64, codes);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) { /* nibble c of the lower and of the upper word: columns c and c + 4 */
                    __m512i w[MAX_GROUPS];
#pragma GCC unroll 2
                    for (int g = 0; g < groups; g++) {
                        w[g] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes[g], 4 * c), table);
                    }
#pragma GCC unroll 8
                    for (int j = 0; j < m; j++) {
                        const __m512bh xs = (__m512bh)_mm512_set1_epi32((int)pairs[c * m + j]);
#pragma GCC unroll 2
                        for (int g = 0; g < groups; g++) part[g][j] = _mm512_dpbf16_ps(part[g][j], (__m512bh)w[g], xs);
                    }
                }
                pairs += 4 * m;
            }
            add_block(scales, groups, format, block, m, part, sum);
        }
    }
    store_sums(sum, groups, m, out);
}
#endif

/* One copy of the loops for each number of rows, so that sums stay in registers, and one for two groups, where many
 * rows make loads of x the limit. */
#define CASE(name, f, i) \
    case i: \
        name##_of(w, 1, f, x, i, out); \
        break;
#define ALL(name, f) \
    if (w->count == 2 && x->m == MAX_CHUNK) { \
        name##_of(w, 2, f, x, MAX_CHUNK, out); \
        return; \
    } \
    switch (x->m) { \
        CASE(name, f, 1) CASE(name, f, 2) CASE(name, f, 3) CASE(name, f, 4) \
        CASE(name, f, 5) CASE(name, f, 6) CASE(name, f, 7) CASE(name, f, 8) \
    }
BOTH_FORMATS(dot_bytes)
BOTH_FORMATS(dot_floats)
#if WIDE
BOTH_FORMATS(dot_pairs)
#endif

const struct kernels TABLE = {
    .name = TABLE_NAME,
    .rows_at_once = MAX_CHUNK,
    .groups_at_once = 2,
    .has_pairs = WIDE,
    .dot_floats = dot_floats,
#if WIDE
    .dot_pairs = dot_pairs,
    .fill_pairs = fill_pairs,
#endif
    .dot_bytes = dot_bytes,
    ROW_FUNCTIONS,
};
