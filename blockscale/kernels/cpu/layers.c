/* Whole decoder layers for one new token a sequence, in fp32: at that size the time is that of the calls between the
 * products. Each step is one of the functions that other paths call by themselves, so that a row's numbers are the
 * same on every path and in every batch. */
#include <stdatomic.h>
#include <stdlib.h>

#include "calls.h"
#include "lanes.h"

enum { BFLOAT16 = -1, WORTH_SHARING = 1 << 15 };

/* A weight in four bits, or in bfloat16 where format is BFLOAT16; global_scale may change between calls. */
struct matrix {
    const void *weight;
    const float *bias, *global_scale;
    int64_t n, k;
    int64_t format;
};

struct layer {
    const float *input_norm, *middle_norm, *q_norm, *k_norm, *sinks; /* the last three may be NULL */
    struct matrix qkv, o, gate_up, down;
    int64_t window;
};

/* `x` [m][hidden] is replaced by what comes out of the last layer. `k` and `v` are the pages of each layer. */
struct decode {
    const struct layer *layers;
    uint16_t *const *k, *const *v;
    float *x;
    const float *cos, *sin, *local_cos, *local_sin; /* [m][2 * half]; the local ones for layers with a window */
    const int64_t *slots;                           /* [m]: page * page_size + place */
    const int32_t *table, *lengths;
    int64_t num_layers, m, hidden, inner, num_pages, table_width, table_stride, page_stride, place_stride, head_stride;
    int32_t num_heads, num_kv_heads, head_dim, half, local_half, page_size, threads;
    float epsilon, scale, softcap;
};

struct turn_job {
    const struct turn *turn;
    _Atomic int64_t next;
};

FOR_EVERY_CPU static void turn_row(const struct turn *turn, int64_t row) {
    const int half = turn->half, dim = turn->head_dim;
    const float *cos = turn->cos + row * 2 * half, *sin = turn->sin + row * 2 * half;
    for (int head = 0; head < turn->num_heads; head++) {
        const float *x = turn->x + row * turn->x_stride + (int64_t)head * dim;
        float *out = turn->out + row * turn->out_stride + (int64_t)head * dim;
        for (int i = 0; i < half; i++) {
            const float first = x[i], second = x[i + half];
            out[i] = first * cos[i] + second * sin[i];
            out[i + half] = second * cos[i + half] + first * sin[i + half];
        }
        if (out != x) {
            for (int i = 2 * half; i < dim; i++) out[i] = x[i];
        }
    }
}

static void turn_rows(void *state, int thread) {
    struct turn_job *job = state;
    (void)thread;
    for (int64_t row; (row = atomic_fetch_add(&job->next, 1)) < job->turn->m;) turn_row(job->turn, row);
}

EXPORT void blockscale_turn(const struct turn *turn) {
    struct turn_job job = {.turn = turn};
    const int is_worth = turn->m * turn->num_heads * turn->head_dim >= WORTH_SHARING;
    pool_run(turn_rows, &job, is_worth ? turn->threads : 1);
}

static void write_heads(const struct pages *p, const float *from, uint16_t *to) {
    for (int head = 0; head < p->num_kv_heads; head++) {
        for (int i = 0; i < p->head_dim; i++) to[i] = float_to_bf16(from[i]);
        from += p->head_dim;
        to += p->head_stride;
    }
}

/* Returns 0, or OUT_OF_BOUNDS, and nothing is written then. */
EXPORT int64_t blockscale_write_pages(const struct pages *p) {
    for (int64_t i = 0; i < p->m; i++) {
        if (p->slots[i] < 0 || p->slots[i] >= p->num_slots) return OUT_OF_BOUNDS;
    }
    for (int64_t i = 0; i < p->m; i++) {
        const int64_t page = p->slots[i] / p->page_size, place = p->slots[i] % p->page_size;
        const int64_t at = page * p->page_stride + place * p->place_stride;
        write_heads(p, p->k + i * p->k_stride, p->k_pages + at);
        write_heads(p, p->v + i * p->v_stride, p->v_pages + at);
    }
    return 0;
}

struct gate_job {
    const struct gate *gate;
    _Atomic int64_t next;
};

FOR_EVERY_CPU static void gate_row(const struct gate *gate, int64_t row) {
    const int64_t n = gate->n;
    const float *restrict x = gate->x + row * 2 * n;
    float *restrict y = gate->y + row * n;
    for (int64_t i = 0; i < n; i++) y[i] = x[i] / (1.0f + exp_of(-x[i])) * x[n + i];
}

static void gate_rows(void *state, int thread) {
    struct gate_job *job = state;
    (void)thread;
    for (int64_t row; (row = atomic_fetch_add(&job->next, 1)) < job->gate->m;) gate_row(job->gate, row);
}

EXPORT void blockscale_gate(const struct gate *gate) {
    struct gate_job job = {.gate = gate};
    pool_run(gate_rows, &job, gate->m * gate->n >= WORTH_SHARING ? gate->threads : 1);
}

static int64_t multiply(const struct decode *d, const struct matrix *w, const float *x, float *y) {
    if (w->format == BFLOAT16) {
        const struct dense dense = {w->weight, x, w->bias, y, w->n, w->k, d->m, d->threads};
        blockscale_dense(&dense);
        return 0;
    }
    const struct linear linear = {
        .groups = w->weight, .x = x, .bias = w->bias, .y = y, .level = NULL, .n = w->n, .k = w->k, .m = d->m,
        .x_stride = w->k, .global_scale = *w->global_scale, .x_global_scale = 1.0f, .format = (int32_t)w->format,
        .dtype = FP32, .activation = EXACT, .threads = d->threads,
    };
    return blockscale_linear(&linear);
}

static void norm(const struct decode *d, const float *x, const float *weight, float *y, int64_t m, int64_t n) {
    const struct norm norm = {x, weight, y, m, n, d->epsilon, d->threads};
    blockscale_rms_norm(&norm);
}

static void add(float *x, const float *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] += y[i];
}

static int64_t attention_of(const struct decode *d, const struct layer *layer, int64_t index, float *heads, float *out) {
    const int64_t dim = d->head_dim, keys = d->num_heads * dim, values = keys + d->num_kv_heads * dim;
    const int64_t row = values + d->num_kv_heads * dim;
    const int is_local = layer->window > 0;
    for (int64_t i = 0; i < d->m && layer->q_norm != NULL; i++) {
        norm(d, heads + i * row, layer->q_norm, heads + i * row, d->num_heads, dim);
        norm(d, heads + i * row + keys, layer->k_norm, heads + i * row + keys, d->num_kv_heads, dim);
    }
    const struct turn turn = {
        heads, heads, is_local ? d->local_cos : d->cos, is_local ? d->local_sin : d->sin, d->m, row, row,
        d->num_heads + d->num_kv_heads, d->head_dim, is_local ? d->local_half : d->half, d->threads,
    };
    blockscale_turn(&turn);
    const struct pages pages = {
        .k = heads + keys, .v = heads + values, .k_pages = d->k[index], .v_pages = d->v[index], .slots = d->slots,
        .m = d->m, .k_stride = row, .v_stride = row, .num_slots = d->num_pages * d->page_size,
        .page_stride = d->page_stride, .place_stride = d->place_stride, .head_stride = d->head_stride,
        .num_kv_heads = d->num_kv_heads, .head_dim = d->head_dim, .page_size = d->page_size,
    };
    const int64_t failure = blockscale_write_pages(&pages);
    if (failure) return failure;
    const struct attention attention = {
        .q = heads, .out = out, .k = d->k[index], .v = d->v[index], .table = d->table, .lengths = d->lengths,
        .sinks = layer->sinks, .num_sequences = d->m, .num_pages = d->num_pages, .table_width = d->table_width,
        .q_stride = row, .table_stride = d->table_stride, .page_stride = d->page_stride,
        .head_stride = d->head_stride, .num_heads = d->num_heads, .num_kv_heads = d->num_kv_heads,
        .head_dim = d->head_dim, .page_size = d->page_size, .window = (int32_t)layer->window, .threads = d->threads,
        .scale = d->scale, .softcap = d->softcap,
    };
    return blockscale_attention(&attention);
}

/* Returns 0, or why there is no result. */
EXPORT int64_t blockscale_decode_layers(const struct decode *d) {
    const int64_t attended = (int64_t)d->num_heads * d->head_dim, row = attended + 2 * d->num_kv_heads * d->head_dim;
    float *scratch = malloc((size_t)(d->m * (2 * d->hidden + row + attended + 3 * d->inner)) * sizeof(float));
    if (scratch == NULL) return OUT_OF_MEMORY;
    float *normed = scratch, *result = normed + d->m * d->hidden, *heads = result + d->m * d->hidden;
    float *out = heads + d->m * row, *pair = out + d->m * attended, *gated = pair + d->m * 2 * d->inner;
    const struct gate gate = {pair, gated, d->m, d->inner, d->threads};
    int64_t failure = 0;
    for (int64_t i = 0; i < d->num_layers && failure == 0; i++) {
        const struct layer *layer = d->layers + i;
        norm(d, d->x, layer->input_norm, normed, d->m, d->hidden);
        int64_t failed = multiply(d, &layer->qkv, normed, heads);
        failure = attention_of(d, layer, i, heads, out);
        failed |= multiply(d, &layer->o, out, result);
        add(d->x, result, d->m * d->hidden);
        norm(d, d->x, layer->middle_norm, normed, d->m, d->hidden);
        failed |= multiply(d, &layer->gate_up, normed, pair);
        blockscale_gate(&gate);
        failed |= multiply(d, &layer->down, gated, result);
        add(d->x, result, d->m * d->hidden);
        if (failed) failure = OUT_OF_MEMORY;
    }
    free(scratch);
    return failure;
}
