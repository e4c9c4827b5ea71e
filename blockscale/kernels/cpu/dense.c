/* Weights in bfloat16 times activations in fp32: y[m][n] = sum_k x[m][k] * w[n][k] + bias[n], sums in fp32.
 *
 * Sixteen partial sums a product, element k in sum k mod 16, added up in one fixed order: the same bytes for any number
 * of threads and for any batch that a row of x comes in. */
#include <stdatomic.h>

#include "calls.h"
#include "lanes.h"

enum { ROWS_OF_X = 8, ROWS_OF_W = 32, PIECES_A_THREAD = 8 };
enum { AHEAD = 4096 }; /* elements of w that prefetches run ahead: further than the processor's own */

struct dense_job {
    const struct dense *d;
    int64_t piece; /* rows of w */
    _Atomic int64_t next;
};

/* `count` is known where this is inlined, so that the sums stay in registers */
INLINED void dot(const struct dense *d, int64_t row, int64_t first, int count) {
    const uint16_t *w = d->w + row * d->k;
    const float *x = d->x + first * d->k;
    const int64_t whole = d->k / LANES * LANES;
    floats sums[ROWS_OF_X];
    for (int j = 0; j < count; j++) sums[j] = (floats){0};
    for (int64_t i = 0; i < whole; i += LANES) {
        __builtin_prefetch(w + i + AHEAD);
        const floats values = load_bf16(w + i);
        for (int j = 0; j < count; j++) sums[j] += load_floats(x + j * d->k + i) * values;
    }
    for (int j = 0; j < count; j++) {
        float total = sum_of(sums[j]);
        for (int64_t i = whole; i < d->k; i++) total += x[j * d->k + i] * float_of((uint32_t)w[i] << 16);
        d->y[(first + j) * d->n + row] = d->bias == NULL ? total : total + d->bias[row];
    }
}

FOR_EVERY_CPU static void dense_rows(const struct dense *d, int64_t begin, int64_t end) {
    int64_t first = 0;
    for (; first + ROWS_OF_X <= d->m; first += ROWS_OF_X) {
        for (int64_t row = begin; row < end; row++) dot(d, row, first, ROWS_OF_X);
    }
    for (; first < d->m; first++) {
        for (int64_t row = begin; row < end; row++) dot(d, row, first, 1);
    }
}

static void dense_work(void *state, int thread) {
    struct dense_job *job = state;
    (void)thread;
    for (int64_t begin; (begin = atomic_fetch_add(&job->next, job->piece)) < job->d->n;) {
        const int64_t end = begin + job->piece;
        dense_rows(job->d, begin, end < job->d->n ? end : job->d->n);
    }
}

/* For one row of x pieces are long streams of memory; for more, what a cache holds while the rows pass over it. */
EXPORT void blockscale_dense(const struct dense *d) {
    const int64_t fair = d->n / ((int64_t)(d->threads > 0 ? d->threads : 1) * PIECES_A_THREAD);
    struct dense_job job = {.d = d, .piece = d->m == 1 && fair > ROWS_OF_W ? fair : ROWS_OF_W};
    pool_run(dense_work, &job, d->threads);
}
