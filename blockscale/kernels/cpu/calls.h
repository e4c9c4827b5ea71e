/* What the entry points are called with, as Python mirrors it, for files that call one another's. */
#ifndef BLOCKSCALE_CPU_CALLS_H
#define BLOCKSCALE_CPU_CALLS_H

#include "kernels.h"

enum { NO_SUCH_LEVEL = -1, NO_MEMORY = -2 };     /* of linears */
enum { OUT_OF_MEMORY = 1, OUT_OF_BOUNDS = 2 }; /* of attention and of layers */

/* y = x W^T + bias with W in four bits */
struct linear {
    const uint8_t *groups;
    const void *x;     /* [m, k], rows x_stride elements apart */
    const float *bias; /* [n] or NULL */
    void *y;           /* [m, n] */
    const char *level; /* NULL: the best */
    int64_t n, k, m, x_stride;
    float global_scale;   /* of the weight */
    float x_global_scale; /* of activations in NVFP4 */
    int32_t format, dtype, activation, threads;
};

/* The same with W in bfloat16, all else in fp32 */
struct dense {
    const uint16_t *w;
    const float *x, *bias;
    float *y;
    int64_t n, k, m;
    int32_t threads;
};

/* Pages: token t of sequence b lies in page table[b * table_stride + t / page_size], whose rows of D elements stand at
 * page * page_stride + head * head_stride + (t % page_size) * D. */
struct attention {
    const float *q; /* rows of num_heads * D, q_stride apart */
    float *out;     /* [b][num_heads][D] */
    const uint16_t *k, *v;
    const int32_t *table, *lengths;
    const float *sinks; /* [num_heads] or NULL */
    int64_t num_sequences, num_pages, table_width, q_stride, table_stride, page_stride, head_stride;
    int32_t num_heads, num_kv_heads, head_dim, page_size, window, threads;
    float scale, softcap;
};

/* y[m][n] = x / rms(x) * weight, x and y contiguous */
struct norm {
    const float *x, *weight;
    float *y;
    int64_t m, n;
    float epsilon;
    int32_t threads;
};

/* Element j < half of a head turns with element j + half: out = x * cos + (x, its halves swapped) * sin. Elements past
 * 2 * half stay as they are. x and out may be the same. */
struct turn {
    const float *x;         /* element i of head h of token t at t * x_stride + h * head_dim + i */
    float *out;             /* likewise, out_stride */
    const float *cos, *sin; /* [m][2 * half] */
    int64_t m, x_stride, out_stride;
    int32_t num_heads, head_dim, half, threads;
};

/* y[m][n] = gate / (1 + exp(-gate)) * up; row i of x is gate [n], then up [n] */
struct gate {
    const float *x;
    float *y;
    int64_t m, n;
    int32_t threads;
};

/* Keys and values of m tokens, fp32 rows of num_kv_heads * head_dim elements, to their slots (page * page_size + place)
 * in bf16 pages, rounded to the nearest */
struct pages {
    const float *k, *v;
    uint16_t *k_pages, *v_pages;
    const int64_t *slots;
    int64_t m, k_stride, v_stride, num_slots, page_stride, place_stride, head_stride;
    int32_t num_kv_heads, head_dim, page_size;
};

int64_t blockscale_linear(const struct linear *l);
void blockscale_dense(const struct dense *d);
int64_t blockscale_attention(const struct attention *a);
void blockscale_rms_norm(const struct norm *norm);
void blockscale_turn(const struct turn *turn);
int64_t blockscale_write_pages(const struct pages *pages);
void blockscale_gate(const struct gate *gate);

#endif
