/* Products in plain C, for any processor. Loops run over 16 lanes, 4 rows x 4 bytes as they lie in a tile, so that a
 * compiler makes vector code of them for SSE2, NEON and the like. */
#include "rows.h"

enum { LANES = 16, QUADS = ROWS / 4 };

/* 2 * e2m1 of the low (even columns) and high nibbles (odd columns) of 16 bytes */
static inline void decode_lanes(const uint8_t *codes, int16_t *even, int16_t *odd) {
    for (int high = 0; high < 2; high++) {
        int16_t *out = high ? odd : even;
        for (int l = 0; l < LANES; l++) {
            const int16_t code = (int16_t)(high ? codes[l] >> 4 : codes[l] & 15);
            const int16_t index = code & 7;
            const int16_t above_four = (int16_t)(index > 4 ? index - 4 : 0);
            const int16_t value = (int16_t)(index + above_four + (index == 7 ? 2 : 0)); /* 0 1 2 3 4 6 8 12 */
            out[l] = (int16_t)(code > 7 ? -value : value);
        }
    }
}

static inline float row_scale(const uint8_t *scales, int format, int row, int block) {
    if (format == NVFP4) return float_of((uint32_t)scales[4 * row + block] << 20 | 0x30000000);
    const uint32_t bits = (uint32_t)scales[2 * row + block] << 23;
    return float_of(bits < 0x00400000 ? 0x00400000 : bits); /* 2^-127 is a subnormal */
}

static void dot_floats(const uint8_t *tiles, int64_t tiles_count, int format, const struct chunk *x, float *out) {
    const int m = x->m, slices = block_size(format) / 8, blocks = TILE_K / block_size(format);
    memset(out, 0, sizeof(float) * ROWS * (size_t)m);
    for (int64_t t = 0; t < tiles_count; t++, tiles += tile_bytes(format)) {
        const float *xt = x->floats + t * TILE_K * m;
        for (int unit = 0; unit < QUADS * blocks; unit++) {
            const int quad = unit / blocks, block = unit % blocks;
            float sum[MAX_CHUNK][LANES] = {{0}};
            for (int s = block * slices; s < (block + 1) * slices; s++) {
                int16_t even[LANES], odd[LANES];
                float even_values[LANES], odd_values[LANES];
                decode_lanes(tiles + s * 64 + quad * LANES, even, odd);
                for (int l = 0; l < LANES; l++) {
                    even_values[l] = (float)even[l] * 0.5f;
                    odd_values[l] = (float)odd[l] * 0.5f;
                }
                for (int j = 0; j < m; j++) {
                    float xe[4], xo[4];
                    for (int b = 0; b < 4; b++) {
                        xe[b] = xt[(8 * s + 2 * b) * m + j];
                        xo[b] = xt[(8 * s + 2 * b + 1) * m + j];
                    }
                    for (int l = 0; l < LANES; l++) sum[j][l] += even_values[l] * xe[l & 3];
                    for (int l = 0; l < LANES; l++) sum[j][l] += odd_values[l] * xo[l & 3];
                }
            }
            for (int r = 0; r < 4; r++) {
                const int row = quad * 4 + r;
                const float scale = row_scale(tiles + TILE_CODES, format, row, block);
                for (int j = 0; j < m; j++) {
                    const float *lane = sum[j] + 4 * r;
                    out[j * ROWS + row] += ((lane[0] + lane[1]) + (lane[2] + lane[3])) * scale;
                }
            }
        }
    }
}

static void dot_bytes(const uint8_t *tiles, int64_t tiles_count, int format, const struct chunk *x, float *out) {
    const int m = x->m, slices = block_size(format) / 8, blocks = TILE_K / block_size(format);
    memset(out, 0, sizeof(float) * ROWS * (size_t)m);
    for (int64_t t = 0; t < tiles_count; t++, tiles += tile_bytes(format)) {
        const int8_t *xt = (const int8_t *)x->bytes + t * TILE_K * m;
        for (int unit = 0; unit < QUADS * blocks; unit++) {
            const int quad = unit / blocks, block = unit % blocks;
            int16_t sum[MAX_CHUNK][LANES] = {{0}}; /* at most 8 products of 12 * 127 a lane */
            for (int s = block * slices; s < (block + 1) * slices; s++) {
                int16_t even[LANES], odd[LANES];
                decode_lanes(tiles + s * 64 + quad * LANES, even, odd);
                for (int j = 0; j < m; j++) {
                    const int8_t *xe = xt + (2 * s * m + j) * 4, *xo = xe + m * 4;
                    for (int l = 0; l < LANES; l++) sum[j][l] += (int16_t)(even[l] * xe[l & 3]);
                    for (int l = 0; l < LANES; l++) sum[j][l] += (int16_t)(odd[l] * xo[l & 3]);
                }
            }
            for (int r = 0; r < 4; r++) {
                const int row = quad * 4 + r;
                const float scale = row_scale(tiles + TILE_CODES, format, row, block);
                for (int j = 0; j < m; j++) {
                    const int16_t *lane = sum[j] + 4 * r;
                    const float value = (float)((int32_t)lane[0] + lane[1] + lane[2] + lane[3]);
                    out[j * ROWS + row] += value * (scale * x->scale[(t * blocks + block) * m + j]);
                }
            }
        }
    }
}

const struct kernels kernels_portable = {
    .name = "portable",
    .rows_at_once = MAX_CHUNK,
    .dot_floats = dot_floats,
    .dot_bytes = dot_bytes,
    .fill_floats = fill_floats,
    .fill_bytes = fill_bytes,
    .fill_fp4 = fill_fp4,
    .quantize_row = quantize_row,
    .finite_amax_bits = finite_amax_bits,
    .store = store,
};
