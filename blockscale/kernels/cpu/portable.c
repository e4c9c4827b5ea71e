/* Products in plain C, for any processor. Vectors of 16 bytes, which gcc and clang map to SSE2, NEON and the like. */
#include "rows.h"


enum { QUADS = ROWS / 4 };

/* Of 4 rows: a lane of `words` is half of a row's 8 columns, one of `ints` a row. */
typedef int16_t words __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));
typedef float floats __attribute__((vector_size(16)));

/* 2 * e2m1 (0 1 2 3 4 6 8 12, and a sign) of the codes in the lanes. Comparisons give -1 or 0. */
#define DECODE(type, code) \
    type index = (code) & 7, minus = (code) > 7; \
    type value = index + ((index - 4) & (index > 4)) + (2 & (index == 7)); \
    return (value ^ minus) - minus

INLINE words decode_words(words codes, int nibble) {
    const words code = (codes >> (4 * nibble)) & 15;
    DECODE(words, code);
}

INLINE ints decode_ints(ints codes, int nibble) {
    const ints code = (codes >> (4 * nibble)) & 15;
    DECODE(ints, code);
}

INLINE float row_scale(const uint8_t *scales, int format, int row, int block) {
    if (format == NVFP4) return float_of((uint32_t)scales[4 * row + block] << 20 | 0x30000000);
    const uint32_t bits = (uint32_t)scales[2 * row + block] << 23;
    return float_of(bits < 0x00400000 ? 0x00400000 : bits); /* 2^-127 is a subnormal */
}

INLINE floats quad_scales(const uint8_t *scales, int format, int quad, int block) {
    floats result;
    for (int r = 0; r < 4; r++) result[r] = row_scale(scales, format, 4 * quad + r, block);
    return result;
}

static void store_sums(floats (*sum)[QUADS], int m, float *out) {
    for (int j = 0; j < m; j++) memcpy(out + j * ROWS, sum[j], sizeof(sum[j]));
}

INLINE void dot_floats_of(const struct group *w, const int format, const struct chunk *x, const int m, float *out) {
    const int slices = block_size(format) / 8, blocks = TILE_K / block_size(format);
    const uint8_t *tiles = w->tiles;
    floats total[MAX_CHUNK][QUADS] = {{{0}}};
    for (int64_t t = 0; t < w->tiles_count; t++, tiles += tile_bytes(format)) {
        for (int block = 0; block < blocks; block++) {
            floats sum[MAX_CHUNK][QUADS] = {{{0}}};
            for (int s = block * slices; s < (block + 1) * slices; s++) {
                const float *xs = x->floats + (t * TILE_K + 8 * s) * m;
                for (int quad = 0; quad < QUADS; quad++) {
                    ints codes;
                    memcpy(&codes, tiles + s * 64 + quad * 16, 16);
                    for (int c = 0; c < 8; c++) {
                        const floats value = __builtin_convertvector(decode_ints(codes, c), floats);
                        for (int j = 0; j < m; j++) sum[j][quad] += value * xs[c * m + j];
                    }
                }
            }
            for (int quad = 0; quad < QUADS; quad++) { /* values are doubled */
                const floats scale = quad_scales(tiles + TILE_CODES, format, quad, block) * 0.5f;
                for (int j = 0; j < m; j++) total[j][quad] += sum[j][quad] * scale;
            }
        }
    }
    store_sums(total, m, out);
}

INLINE void dot_bytes_of(const struct group *w, const int format, const struct chunk *x, const int m, float *out) {
    const int slices = block_size(format) / 8, blocks = TILE_K / block_size(format);
    const uint8_t *tiles = w->tiles;
    floats total[MAX_CHUNK][QUADS] = {{{0}}};
    for (int64_t t = 0; t < w->tiles_count; t++, tiles += tile_bytes(format)) {
        for (int block = 0; block < blocks; block++) {
            words sum[MAX_CHUNK][QUADS] = {{{0}}}; /* at most 16 products of 12 * 127 a lane */
            for (int s = block * slices; s < (block + 1) * slices; s++) {
                words xs[MAX_CHUNK][4]; /* columns c and c + 4 in turn */
                for (int j = 0; j < m; j++) {
                    const int8_t *even = (const int8_t *)x->bytes + ((t * TILE_K / 4 + 2 * s) * m + j) * 4;
                    for (int c = 0; c < 4; c++) {
                        const int8_t *from = even + (c & 1) * 4 * m + c / 2;
                        const int16_t a = from[0], b = from[2];
                        xs[j][c] = (words){a, b, a, b, a, b, a, b};
                    }
                }
                for (int quad = 0; quad < QUADS; quad++) {
                    words codes;
                    memcpy(&codes, tiles + s * 64 + quad * 16, 16);
                    for (int c = 0; c < 4; c++) {
                        const words value = decode_words(codes, c);
                        for (int j = 0; j < m; j++) sum[j][quad] += value * xs[j][c];
                    }
                }
            }
            for (int quad = 0; quad < QUADS; quad++) {
                const floats scale = quad_scales(tiles + TILE_CODES, format, quad, block);
                for (int j = 0; j < m; j++) {
                    floats value;
                    for (int r = 0; r < 4; r++) value[r] = (float)(sum[j][quad][2 * r] + sum[j][quad][2 * r + 1]);
                    total[j][quad] += value * (scale * x->scale[(t * blocks + block) * m + j]);
                }
            }
        }
    }
    store_sums(total, m, out);
}

/* Copies of the loops for one row, so that sums stay in registers. */
#define FUNCTION(name) \
    static void name(const struct group *w, const struct chunk *x, float *out) { \
        if (x->m > 1) { \
            name##_of(w, w->format, x, x->m, out); \
        } else if (w->format == NVFP4) { \
            name##_of(w, NVFP4, x, 1, out); \
        } else { \
            name##_of(w, MXFP4, x, 1, out); \
        } \
    }
FUNCTION(dot_floats)
FUNCTION(dot_bytes)

const struct kernels kernels_portable = {
    .name = "portable",
    .rows_at_once = MAX_CHUNK,
    .groups_at_once = 1,
    .dot_floats = dot_floats,
    .dot_bytes = dot_bytes,
    ROW_FUNCTIONS,
};
