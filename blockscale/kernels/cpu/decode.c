/* What a decoder does for one new token a sequence besides its linears, in fp32: attention to bf16 pages, RMSNorm and
 * the gate. Each row's numbers are the same whatever rows stand beside it. */
#include <stdatomic.h>
#include <stdlib.h>

#include "calls.h"
#include "lanes.h"

struct attention_job {
    const struct attention *a;
    _Atomic int64_t next;
    atomic_int failed;
};

/* Where the rows of one page and KV head begin, and how many of its tokens from `t` on there are */
INLINED int64_t rows_of(const struct attention *a, int64_t sequence, int kv_head, int t, int length, int *count) {
    const int place = t % a->page_size, left = a->page_size - place;
    const int64_t page = a->table[sequence * a->table_stride + t / a->page_size];
    *count = left < length - t ? left : length - t;
    return page * a->page_stride + kv_head * a->head_stride + (int64_t)place * a->head_dim;
}

/* out[0 .. 16 * count) = sum over tokens of weights[t - begin] * v[t][first ..], divided by `total` */
INLINED void mix(const struct attention *a, int64_t sequence, int kv_head, int begin, int length, const float *weights,
                 float total, int first, int count, float *out) {
    floats sums[4];
    for (int i = 0; i < count; i++) sums[i] = (floats){0};
    for (int t = begin, num; t < length; t += num) {
        const uint16_t *v = a->v + rows_of(a, sequence, kv_head, t, length, &num) + first;
        for (int j = 0; j < num; j++, v += a->head_dim) {
            for (int i = 0; i < count; i++) sums[i] += weights[t - begin + j] * load_bf16(v + i * LANES);
        }
    }
    for (int i = 0; i < count; i++) store_floats(out + first + i * LANES, total == 0 ? (floats){0} : sums[i] / total);
}

FOR_EVERY_CPU static void attend_head(const struct attention *a, int64_t sequence, int head, float *scores) {
    const int kv_head = head / (a->num_heads / a->num_kv_heads), dim = a->head_dim;
    const int length = a->lengths[sequence];
    const int begin = a->window > 0 && length > a->window ? length - a->window : 0;
    const float *q = a->q + sequence * a->q_stride + (int64_t)head * dim;
    float *out = a->out + (sequence * a->num_heads + head) * dim;
    float largest = a->sinks == NULL ? -INFINITY : a->sinks[head];
    for (int t = begin, num; t < length; t += num) {
        const uint16_t *k = a->k + rows_of(a, sequence, kv_head, t, length, &num);
        for (int j = 0; j < num; j++, k += dim) {
            floats sums = {0};
            for (int i = 0; i < dim; i += LANES) sums += load_floats(q + i) * load_bf16(k + i);
            float score = sum_of(sums) * a->scale;
            if (a->softcap > 0) score = a->softcap * tanhf(score / a->softcap);
            scores[t - begin + j] = score;
            if (score > largest || score != score) largest = score;
        }
    }
    float total = a->sinks == NULL ? 0.0f : exp_of(a->sinks[head] - largest);
    for (int t = 0; t < length - begin; t++) scores[t] = exp_of(scores[t] - largest);
    for (int t = 0; t < length - begin; t++) total += scores[t];
    int first = 0;
    for (; first + 4 * LANES <= dim; first += 4 * LANES) {
        mix(a, sequence, kv_head, begin, length, scores, total, first, 4, out);
    }
    for (; first < dim; first += LANES) mix(a, sequence, kv_head, begin, length, scores, total, first, 1, out);
}

static int is_inside(const struct attention *a, int64_t sequence) {
    const int64_t length = a->lengths[sequence], pages = ceil_div(length, a->page_size);
    if (length < 0 || pages > a->table_width) return 0;
    for (int64_t i = 0; i < pages; i++) {
        const int32_t page = a->table[sequence * a->table_stride + i];
        if (page < 0 || page >= a->num_pages) return 0;
    }
    return 1;
}

static void attend_heads(void *state, int thread) {
    struct attention_job *job = state;
    const struct attention *a = job->a;
    (void)thread;
    float *scores = NULL;
    int64_t room = 0;
    for (int64_t item; (item = atomic_fetch_add(&job->next, 1)) < a->num_sequences * a->num_heads;) {
        const int64_t length = a->lengths[item / a->num_heads];
        if (!is_inside(a, item / a->num_heads)) {
            atomic_store(&job->failed, OUT_OF_BOUNDS);
            continue;
        }
        if (length > room) {
            free(scores);
            scores = malloc((size_t)length * sizeof *scores);
            room = scores == NULL ? 0 : length;
        }
        if (length > room) {
            atomic_store(&job->failed, OUT_OF_MEMORY);
            continue;
        }
        attend_head(a, item / a->num_heads, (int)(item % a->num_heads), scores);
    }
    free(scores);
}

/* Returns 0, or why there is no result. */
EXPORT int64_t blockscale_attention(const struct attention *a) {
    struct attention_job job = {.a = a};
    pool_run(attend_heads, &job, a->threads);
    return atomic_load(&job.failed);
}

struct norm_job {
    const struct norm *norm;
    _Atomic int64_t next;
};

enum { NORMS_A_PIECE = 16 };

FOR_EVERY_CPU static void norm_rows(const struct norm *norm, int64_t begin, int64_t end) {
    const int64_t n = norm->n, whole = n / LANES * LANES;
    for (int64_t row = begin; row < end; row++) {
        const float *x = norm->x + row * n;
        float *y = norm->y + row * n;
        floats squares = {0};
        for (int64_t i = 0; i < whole; i += LANES) squares += load_floats(x + i) * load_floats(x + i);
        float total = sum_of(squares);
        for (int64_t i = whole; i < n; i++) total += x[i] * x[i];
        const float factor = 1.0f / sqrtf(total / (float)n + norm->epsilon);
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * factor * norm->weight[i];
    }
}

static void norm_work(void *state, int thread) {
    struct norm_job *job = state;
    const int64_t m = job->norm->m;
    (void)thread;
    for (int64_t begin; (begin = atomic_fetch_add(&job->next, NORMS_A_PIECE)) < m;) {
        norm_rows(job->norm, begin, begin + NORMS_A_PIECE < m ? begin + NORMS_A_PIECE : m);
    }
}

EXPORT void blockscale_rms_norm(const struct norm *norm) {
    if (norm->m <= NORMS_A_PIECE) {
        norm_rows(norm, 0, norm->m);
        return;
    }
    struct norm_job job = {.norm = norm};
    pool_run(norm_work, &job, norm->threads);
}
