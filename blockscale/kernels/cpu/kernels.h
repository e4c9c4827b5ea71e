/* What the files of the CPU kernels share: the layout of a weight, the jobs, and the table of one instruction set.
 *
 * A weight [N, K] is cut into groups of 16 rows. A group is one stream of bytes, in the order in which it is read:
 *
 *     header   16 floats, a factor of each row: 1, or NaN where one of the row's block scales is NaN
 *     tiles    ceil(K / 64) of them, each 16 rows x 64 columns:
 *                codes   8 x [16 rows x 4 bytes]: the bytes of 8 columns, as they lie in the row-major weight
 *                scales  NVFP4: [16 rows x 4 blocks], MXFP4: [16 rows x 2 blocks], a byte each
 *     padding  to a multiple of 64 bytes
 *
 * so that a 32-bit lane of a vector register belongs to one row, and one load serves 16 rows. Codes of rows and columns
 * past the weight's end are zero. Scale bytes are made over, so that one shift and one logical operation give a float:
 *
 *     NVFP4   E4M3 with five bits of exponent and no subnormals: 2^(exponent - 31) * (1 + mantissa / 8), which is the
 *             scale times 2^-8
 *     MXFP4   E8M0 as it is: the exponent of a float
 *
 * A block whose scale is zero has zero codes, one whose scale is negative has its codes negated.
 */
#ifndef BLOCKSCALE_CPU_KERNELS_H
#define BLOCKSCALE_CPU_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ROWS = 16, TILE_K = 64, TILE_CODES = ROWS * TILE_K / 2, HEADER = ROWS * 4 };
enum { MAX_CHUNK = 8, MAX_GROUPS = 2, MAX_THREADS = 256 };
enum format { NVFP4 = 0, MXFP4 = 1 };
enum dtype { FP32 = 0, BF16 = 1, FP16 = 2 };
/* How activations enter the product: as they are; int8 with a scale per block; NVFP4, as W4A4 hardware takes them. */
enum activation { EXACT = 0, INT8 = 1, FP4 = 2 };

#define NVFP4_SCALE_UP 256.0f /* undoes the 2^-8 of a stored NVFP4 scale */

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t num_tiles(int64_t k) { return ceil_div(k, TILE_K); }
static inline int block_size(int format) { return format == NVFP4 ? 16 : 32; }
static inline int64_t tile_bytes(int format) { return TILE_CODES + ROWS * TILE_K / block_size(format); }
static inline int64_t group_bytes(int format, int64_t k) {
    return ceil_div(HEADER + num_tiles(k) * tile_bytes(format), 64) * 64;
}

/* Activations of up to MAX_CHUNK rows, interleaved so that the m values that meet one weight lie side by side.
 * With t a tile and j a row of the chunk:
 *   floats   [tiles][64][m]       x
 *   pairs    [tiles][8][4][m]     bf16 x of columns c and c + 4 of each 8, as the two halves of a 32-bit word
 *   bytes    [tiles][8][2][m][4]  int8 x of the even, then the odd columns of each 8
 *   scale    [tiles][blocks][m]   float: x ~= bytes * scale
 *   offset   [tiles][blocks][m]   int32: -12 * the sum of the block's bytes, since weights enter as 2 * e2m1 + 12
 */
struct chunk {
    int m;
    const float *floats;
    const uint32_t *pairs;
    const uint32_t *bytes;
    const float *scale;
    const int32_t *offset;
};

/* Rows of x: element (i, j) at data + (i * stride + j) elements. */
struct rows {
    const void *data;
    int64_t stride;
    int64_t k;
    int dtype;
};

/* Groups whose tiles lie one after another. Two at once share the loads of x. */
struct group {
    const uint8_t *tiles;
    int64_t bytes; /* from one group's tiles to the next group's */
    int64_t tiles_count;
    int count, format;
    const uint8_t *prefetch_end; /* of the bytes that this thread reads next; prefetches go no further */
};

typedef void dot_function(const struct group *w, const struct chunk *x, float *out);

struct kernels {
    const char *name;
    int rows_at_once;   /* of x, at most MAX_CHUNK */
    int groups_at_once; /* 1 or 2 */
    int has_pairs;      /* dot_pairs is there, and the exact product of bf16 uses it */
    /* out[groups][m][16] = the chunk's rows times the rows of groups, without global scale and header. Products of
     * bytes are those of 2 * e2m1, and NVFP4's of 2^-8 of the scale: `store` is given what makes up for it. */
    dot_function *dot_floats, *dot_pairs, *dot_bytes;
    /* The chunk's arrays from rows first .. first + m of x. fill_bytes returns how many of them hold NaN or Inf. */
    void (*fill_floats)(const struct rows *x, int64_t first, int m, float *floats);
    void (*fill_pairs)(const struct rows *x, int64_t first, int m, uint32_t *pairs);
    int (*fill_bytes)(const struct rows *x, int64_t first, int m, int format, uint8_t *bytes, float *scale,
                      int32_t *offset);
    void (*fill_fp4)(const struct rows *x, int64_t first, int m, float global_scale, uint8_t *bytes, float *scale,
                     int32_t *offset);
    /* NVFP4 bytes of one row: packed [k/2], E4M3 scales [k/16] */
    void (*quantize_row)(const struct rows *x, int64_t row, float global_scale, uint8_t *packed, uint8_t *scale);
    /* The bits of the largest magnitude of rows first .. last, NaN and Inf left out: as integers they compare alike */
    uint32_t (*finite_amax_bits)(const struct rows *x, int64_t first, int64_t last);
    /* y[0..n) = out * factor * scale + bias, rounded once to the dtype; bias may be NULL */
    void (*store)(const float *out, const float *factor, float scale, const float *bias, void *y, int dtype, int n);
};

extern const struct kernels kernels_portable;
#ifdef HAVE_AVX2
extern const struct kernels kernels_avx2;
#endif
#ifdef HAVE_AVX2_VNNI
extern const struct kernels kernels_avx2_vnni;
#endif
#ifdef HAVE_AVX512
extern const struct kernels kernels_avx512;
#endif
#ifdef HAVE_AVX512_BF16
extern const struct kernels kernels_avx512_bf16;
#endif

/* The table of that name if this processor can run it, the best one for NULL, else NULL. */
const struct kernels *find_kernels(const char *name);

/* Runs job(state, thread) on up to `threads` threads, this one (thread 0) among them, and on this one alone while
 * another caller's job runs: jobs share out their work by counters. */
void pool_run(void (*job)(void *state, int thread), void *state, int threads);

/* In a loop that waits for another thread */
static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16 | 0x40) : rounded);
}

#define EXPORT __attribute__((visibility("default")))

#endif
