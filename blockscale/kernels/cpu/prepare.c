/* From the row-major weight to groups of 16 rows (kernels.h). Every byte of the result is written. */
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <stdatomic.h>

#include "kernels.h"

struct preparation {
    const uint8_t *packed; /* [n, k/2] */
    const uint8_t *scale;  /* [n, k/block]: E4M3 or E8M0 */
    int64_t n, k;
    int32_t format;
    uint8_t *groups; /* [ceil(n / 16), group_bytes] */
    _Atomic int64_t next;
};

/* An E4M3 magnitude above zero and below NaN, as five bits of exponent (of value * 2^-8, biased by 31) and three of
 * mantissa. */
static uint8_t widen_e4m3(uint8_t code) {
    int exponent = code >> 3, mantissa = code & 7;
    if (exponent == 0) { /* mantissa * 2^-9 */
        exponent = 1;
        while (mantissa < 8) {
            mantissa <<= 1;
            exponent--;
        }
        mantissa &= 7;
    }
    return (uint8_t)((exponent + 16) << 3 | mantissa); /* E4M3's bias is 7: 31 - 7 - 8 = 16 */
}

/* The byte to store for a block's scale, whose reader need not know NaN, zero or a sign. `flip` is to be XORed into the
 * block's codes, which are dropped where `keep` is 0. */
static uint8_t convert_scale(int format, uint8_t scale, uint8_t *flip, uint8_t *keep, int *is_nan) {
    *flip = 0;
    *keep = 0xFF;
    if (format == MXFP4) {
        *is_nan |= scale == 0xFF;
        return scale == 0xFF ? 127 : scale;
    }
    const uint8_t magnitude = scale & 0x7F;
    if (magnitude == 0x7F) {
        *is_nan = 1;
        return 0;
    }
    if (magnitude == 0) {
        *keep = 0;
        return 0;
    }
    if (scale & 0x80) *flip = 0x88;
    return widen_e4m3(magnitude);
}

static int all_zero(const uint8_t *codes, int count) {
    uint8_t any = 0;
    for (int i = 0; i < count; i++) any |= codes[i] & 0x77;
    return any == 0;
}

static void prepare_group(const struct preparation *p, int64_t group) {
    const int64_t bytes = group_bytes(p->format, p->k), stride = tile_bytes(p->format);
    const int size = block_size(p->format), per_tile = TILE_K / size, block_bytes = size / 2;
    const int64_t row_bytes = p->k / 2, row_blocks = p->k / size;
    uint8_t *out = p->groups + group * bytes;
    memset(out, 0, (size_t)bytes);
    if (p->format == MXFP4) { /* 2^0 past the end: 2^-127 is a subnormal, and slow */
        for (int64_t t = 0; t < num_tiles(p->k); t++) memset(out + HEADER + t * stride + TILE_CODES, 127, ROWS * 2);
    }
    for (int row = 0; row < ROWS; row++) {
        const int64_t n = group * ROWS + row;
        int is_nan = 0;
        if (n < p->n) {
            const uint8_t *codes = p->packed + n * row_bytes;
            for (int64_t block = 0; block < row_blocks; block++) {
                uint8_t *tile = out + HEADER + block / per_tile * stride;
                const int within = (int)(block % per_tile);
                uint8_t flip, keep, here[16];
                tile[TILE_CODES + row * per_tile + within] =
                    convert_scale(p->format, p->scale[n * row_blocks + block], &flip, &keep, &is_nan);
                for (int i = 0; i < block_bytes; i++) here[i] = (codes[block * block_bytes + i] ^ flip) & keep;
                if (p->format == MXFP4 && all_zero(here, block_bytes)) tile[TILE_CODES + row * per_tile + within] = 127;
                for (int i = 0; i < block_bytes / 4; i++) {
                    memcpy(tile + (within * block_bytes / 4 + i) * 64 + row * 4, here + 4 * i, 4);
                }
            }
        }
        const uint32_t factor = is_nan ? 0x7FC00000 : 0x3F800000;
        memcpy(out + row * 4, &factor, 4);
    }
}

static void prepare_groups(void *state, int thread) {
    struct preparation *p = state;
    const int64_t groups = ceil_div(p->n, ROWS);
    (void)thread;
    for (int64_t g; (g = atomic_fetch_add(&p->next, 1)) < groups;) prepare_group(p, g);
}

EXPORT int64_t blockscale_group_bytes(int32_t format, int64_t k) { return group_bytes(format, k); }

EXPORT void blockscale_prepare(const uint8_t *packed, const uint8_t *scale, int64_t n, int64_t k, int32_t format,
                               int32_t threads, uint8_t *groups) {
    struct preparation p = {packed, scale, n, k, format, groups, 0};
#if defined(MADV_HUGEPAGE)
    /* 2 MiB pages: prefetchers stop at the end of a page, and fewer translations are missed. A wish, no more. */
    const uintptr_t huge = (uintptr_t)1 << 21, begin = ((uintptr_t)groups + huge - 1) & ~(huge - 1);
    const uintptr_t end = ((uintptr_t)groups + (uintptr_t)(ceil_div(n, ROWS) * group_bytes(format, k))) & ~(huge - 1);
    if (begin < end) (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#endif
    pool_run(prepare_groups, &p, threads);
}
