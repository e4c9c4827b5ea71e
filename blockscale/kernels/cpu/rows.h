/* What surrounds the products, in plain C: reading rows of x, quantizing them, rounding results. Each instruction set's
 * file includes this, so that the compiler makes its own vector code of it. Built without contraction of a * b + c:
 * the order of the quantizer's operations is that of formats/, to the bit. */
#ifndef BLOCKSCALE_CPU_ROWS_H
#define BLOCKSCALE_CPU_ROWS_H

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum { AHEAD = 8192 }; /* bytes that prefetches run ahead of the loads */

INLINE void prefetch_tile(const uint8_t *tiles, const uint8_t *end, int format) {
    if ((uintptr_t)tiles + AHEAD >= (uintptr_t)end) return;
    for (int i = 0; i < tile_bytes(format); i += 64) __builtin_prefetch(tiles + AHEAD + i, 0, 3);
}

static inline float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    /* as a float whose exponent is 112 too low, which one exact product corrects, subnormals included */
    const uint32_t number = bits_of(float_of(magnitude << 13) * 0x1p112f);
    const uint32_t special = (magnitude << 13) | 0x7F800000;
    return float_of(sign | (magnitude >= 0x7C00 ? special : number));
}

static inline uint16_t float_to_half(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    /* normal: drop 13 bits, half to even, exponent 112 lower; what carries past the largest becomes Inf by itself */
    const uint32_t normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    /* subnormal: the adder rounds to multiples of 2^-24 */
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
    half = magnitude >= 0x47800000 ? 0x7C00 : half;
    half = magnitude > 0x7F800000 ? 0x7E00 : half;
    return (uint16_t)(sign | half);
}

/* out[0..TILE_K) = x[row][column ..], zero past the end */
static inline void load_tile(const struct rows *x, int64_t row, int64_t column, float *out) {
    const int64_t start = row * x->stride + column;
    const int valid = x->k - column < TILE_K ? (int)(x->k - column) : TILE_K;
    if (x->dtype == FP32) {
        memcpy(out, (const float *)x->data + start, 4 * (size_t)valid);
    } else {
        uint16_t raw[TILE_K] = {0};
        memcpy(raw, (const uint16_t *)x->data + start, 2 * (size_t)valid);
        if (x->dtype == BF16) {
            for (int i = 0; i < TILE_K; i++) out[i] = float_of((uint32_t)raw[i] << 16);
        } else {
            for (int i = 0; i < TILE_K; i++) out[i] = half_to_float(raw[i]);
        }
    }
    for (int i = valid; i < TILE_K; i++) out[i] = 0.0f;
}

static inline uint32_t largest_bits(const float *values, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        const uint32_t magnitude = bits_of(values[i]) & 0x7FFFFFFF;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

static uint32_t finite_amax_bits(const struct rows *x, int64_t first, int64_t last) {
    float values[TILE_K];
    uint32_t largest = 0;
    for (int64_t row = first; row < last; row++) {
        for (int64_t column = 0; column < x->k; column += TILE_K) {
            load_tile(x, row, column, values);
            for (int i = 0; i < TILE_K; i++) {
                const uint32_t bits = bits_of(values[i]) & 0x7FFFFFFF, magnitude = bits < 0x7F800000 ? bits : 0;
                largest = magnitude > largest ? magnitude : largest;
            }
        }
    }
    return largest;
}

static void fill_floats(const struct rows *x, int64_t first, int m, float *floats) {
    float values[TILE_K];
    for (int j = 0; j < m; j++) {
        for (int64_t column = 0; column < x->k; column += TILE_K) {
            load_tile(x, first + j, column, values);
            float *out = floats + column * m + j;
            for (int i = 0; i < TILE_K; i++) out[i * m] = values[i];
        }
    }
}

static inline void fill_pairs(const struct rows *x, int64_t first, int m, uint32_t *pairs) { /* x is bf16 */
    for (int j = 0; j < m; j++) {
        const uint16_t *row = (const uint16_t *)x->data + (first + j) * x->stride;
        for (int64_t column = 0; column < x->k; column += TILE_K) {
            uint16_t values[TILE_K] = {0};
            const int valid = x->k - column < TILE_K ? (int)(x->k - column) : TILE_K;
            memcpy(values, row + column, 2 * (size_t)valid);
            uint32_t *out = pairs + column / 2 * m + j;
            for (int i = 0; i < TILE_K / 8; i++) {
                for (int c = 0; c < 4; c++) {
                    out[(4 * i + c) * m] = values[8 * i + c] | (uint32_t)values[8 * i + c + 4] << 16;
                }
            }
        }
    }
}

/* Bytes of one tile of row j to their places in the chunk: of each 8, the even columns, then the odd ones. */
static inline void place_bytes(const int8_t *values, int m, int j, uint8_t *out) {
    for (int i = 0; i < TILE_K / 8; i++) {
        const int8_t *v = values + 8 * i;
        const int8_t ordered[8] = {v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7]};
        memcpy(out + ((2 * i) * m + j) * 4, ordered, 4);
        memcpy(out + ((2 * i + 1) * m + j) * 4, ordered + 4, 4);
    }
}

static inline void place_block(const int8_t *values, int count, float scale, float *scales, int32_t *offset) {
    int32_t sum = 0;
    for (int i = 0; i < count; i++) sum += values[i];
    *scales = scale;
    *offset = -12 * sum;
}

/* int8 with a scale of amax / 127 per block. A block with NaN or Inf gets a scale of NaN. */
static int fill_bytes(const struct rows *x, int64_t first, int m, int format, uint8_t *bytes, float *scale,
                      int32_t *offset) {
    const int size = block_size(format), blocks = TILE_K / size;
    const float magic = 0x1.8p23f; /* added and taken away: rounds to an integer, half to even */
    int bad_rows = 0;
    for (int j = 0; j < m; j++) {
        int bad = 0;
        for (int64_t tile = 0; tile < num_tiles(x->k); tile++) {
            float values[TILE_K];
            int8_t rounded[TILE_K];
            load_tile(x, first + j, tile * TILE_K, values);
            for (int b = 0; b < blocks; b++) {
                float *v = values + b * size;
                const uint32_t amax = largest_bits(v, size);
                const int64_t place = (tile * blocks + b) * m + j;
                /* 127 / amax would overflow below 2^-120: such blocks are scaled up first, exactly */
                const float up = amax < bits_of(0x1p-100f) ? 0x1p100f : 1.0f;
                const float largest = float_of(amax) * up;
                const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
                const int is_bad = amax >= 0x7F800000;
                bad |= is_bad;
                for (int i = 0; i < size; i++) {
                    const float q = (v[i] * up) * inverse + magic;
                    rounded[b * size + i] = (int8_t)(is_bad ? 0 : (int32_t)(bits_of(q) - bits_of(magic)));
                }
                const float step = is_bad ? float_of(0x7FC00000) : largest / 127.0f / up;
                place_block(rounded + b * size, size, step, scale + place, offset + place);
            }
            place_bytes(rounded, m, j, bytes + tile * TILE_K * m);
        }
        bad_rows += bad;
    }
    return bad_rows;
}

/* The E4M3 code of a value in 2^-9 .. 448, nearest, half to even. */
static inline uint8_t encode_e4m3(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120u << 3);
    const uint32_t subnormal = bits_of(value + 0x1.8p14f) - bits_of(0x1.8p14f); /* multiples of 2^-9 */
    return (uint8_t)(value < 0x1p-6f ? subnormal : normal);
}

static inline float decode_e4m3(uint8_t code) { /* of a code without sign */
    return code == 0x7F ? float_of(0x7FC00000) : float_of((uint32_t)code << 20) * 0x1p120f;
}

/* formats/nvfp4.py: block_scale_from_amax. NaN keeps its sign; a block that holds NaN or Inf has none. */
static inline uint8_t block_scale(float amax, float global_scale) {
    if (bits_of(amax) >= 0x7F800000) return 0x7F;
    float scale = amax / (6.0f * global_scale);
    scale = (scale == 0.0f || amax == 0.0f) ? 1.0f : scale;
    if (scale != scale) return (uint8_t)(bits_of(scale) >> 24 | 0x7F);
    scale = scale < 0x1p-9f ? 0x1p-9f : scale;
    return scale > 448.0f ? 0x7E : encode_e4m3(scale);
}

/* formats/nvfp4.py: encode_packed. Codes of the 16 values; e2m1's ties go to the even code. All are 7 where the block
 * holds NaN or Inf. */
static inline void encode_block(const float *values, float amax, uint8_t scale, float global_scale, uint8_t *codes) {
    const int is_broken = bits_of(amax) >= 0x7F800000;
    const float step = decode_e4m3(scale & 0x7F) * global_scale;
    int32_t code[16];
    for (int i = 0; i < 16; i++) {
        const float q = values[i] / step;
        const float t = float_of(bits_of(q) & 0x7FFFFFFF);
        const int32_t magnitude = !(t <= 0.25f) + !(t < 0.75f) + !(t <= 1.25f) + !(t < 1.75f) + !(t <= 2.5f) +
                                  !(t < 3.5f) + !(t <= 5.0f); /* NaN is 7 */
        code[i] = magnitude | (q < 0.0f ? 8 : 0);
    }
    for (int i = 0; i < 16; i++) codes[i] = (uint8_t)(is_broken ? 7 : code[i]);
}

static void quantize_row(const struct rows *x, int64_t row, float global_scale, uint8_t *packed, uint8_t *scale) {
    for (int64_t column = 0; column < x->k; column += TILE_K) {
        float values[TILE_K];
        load_tile(x, row, column, values);
        const int blocks = (int)((x->k - column < TILE_K ? x->k - column : TILE_K) / 16);
        for (int b = 0; b < blocks; b++) {
            uint8_t codes[16];
            const float amax = float_of(largest_bits(values + 16 * b, 16));
            const uint8_t s = block_scale(amax, global_scale);
            encode_block(values + 16 * b, amax, s, global_scale, codes);
            uint8_t *out = packed + (column + 16 * b) / 2;
            for (int i = 0; i < 8; i++) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
            scale[column / 16 + b] = s;
        }
    }
}

/* NVFP4 as bytes that stand for 2 * e2m1, with the block scale, which is NaN where the block holds NaN or Inf. */
static void fill_fp4(const struct rows *x, int64_t first, int m, float global_scale, uint8_t *bytes, float *scale,
                     int32_t *offset) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (int j = 0; j < m; j++) {
        for (int64_t tile = 0; tile < num_tiles(x->k); tile++) {
            float values[TILE_K];
            int8_t steps[TILE_K];
            load_tile(x, first + j, tile * TILE_K, values);
            for (int b = 0; b < TILE_K / 16; b++) {
                uint8_t codes[16];
                const float amax = float_of(largest_bits(values + 16 * b, 16));
                const uint8_t s = block_scale(amax, global_scale);
                const int64_t place = (tile * (TILE_K / 16) + b) * m + j;
                encode_block(values + 16 * b, amax, s, global_scale, codes);
                for (int i = 0; i < 16; i++) steps[16 * b + i] = doubled[codes[i]];
                place_block(steps + 16 * b, 16, decode_e4m3(s & 0x7F), scale + place, offset + place);
            }
            place_bytes(steps, m, j, bytes + tile * TILE_K * m);
        }
    }
}

static void store(const float *out, const float *factor, float scale, const float *bias, void *y, int dtype, int n) {
    float value[ROWS];
    uint16_t half[ROWS];
    float added[ROWS] = {0};
    if (bias != NULL) memcpy(added, bias, 4 * (size_t)n);
    for (int i = 0; i < ROWS; i++) value[i] = out[i] * factor[i] * scale;
    if (bias != NULL) {
        for (int i = 0; i < ROWS; i++) value[i] += added[i];
    }
    if (dtype == FP32) {
        memcpy(y, value, 4 * (size_t)n);
    } else {
        if (dtype == BF16) {
            for (int i = 0; i < ROWS; i++) half[i] = float_to_bf16(value[i]);
        } else {
            for (int i = 0; i < ROWS; i++) half[i] = float_to_half(value[i]);
        }
        memcpy(y, half, 2 * (size_t)n);
    }
}

/* What the functions of this file are in the table of an instruction set. */
#define ROW_FUNCTIONS \
    .fill_floats = fill_floats, .fill_bytes = fill_bytes, .fill_fp4 = fill_fp4, .quantize_row = quantize_row, \
    .finite_amax_bits = finite_amax_bits, .store = store

/* A product for either format, each a constant in its copy of the loops; ALL chooses by the number of rows. */
#define BOTH_FORMATS(name) \
    static void name(const struct group *w, const struct chunk *x, float *out) { \
        if (w->format == NVFP4) { \
            ALL(name, NVFP4) \
        } else { \
            ALL(name, MXFP4) \
        } \
    }

#endif
