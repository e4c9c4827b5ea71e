/* The entry points: y = x W^T + b over threads, and the NVFP4 quantizer of activations. */
#include <stdatomic.h>
#include <stdlib.h>

#include "calls.h"

enum { SCRATCH_BYTES = 64 << 20, CACHED_BYTES = 256 << 10, BYTES_WORTH_A_THREAD = 24 << 10 };
enum { PIECES_A_THREAD = 8, PREFETCH_BYTES = 8192 };

struct product {
    const struct linear *l;
    const struct kernels *kernels;
    struct rows x;
    int64_t first_row, num_rows, num_chunks; /* of x, in this pass */
    int64_t groups_a_piece, chunks_a_piece, num_pieces;
    int use_pairs;
    float *floats; /* arrays of all chunks, one after another */
    uint32_t *pairs;
    uint8_t *bytes;
    float *scale;
    int32_t *offset;
    int threads;
    _Atomic int64_t next_chunk;
    atomic_int bad_rows, is_filled;
    struct {
        _Alignas(64) _Atomic int64_t next; /* piece; its share of them begins and ends in the order of memory */
    } shares[MAX_THREADS];
};

static int64_t chunk_begin(const struct product *p, int64_t chunk) {
    const int64_t begin = chunk * p->kernels->rows_at_once;
    return begin < p->num_rows ? begin : p->num_rows;
}

static void fill_chunk(struct product *p, int64_t chunk) {
    const struct linear *l = p->l;
    const int64_t begin = chunk_begin(p, chunk), first = p->first_row + begin, tiles = num_tiles(l->k);
    const int64_t values = begin * tiles * TILE_K, blocks = begin * tiles * (TILE_K / block_size(l->format));
    const int m = (int)(chunk_begin(p, chunk + 1) - begin);
    int bad = 0;
    if (l->activation == EXACT && p->use_pairs) {
        p->kernels->fill_pairs(&p->x, first, m, p->pairs + values / 2);
    } else if (l->activation == EXACT) {
        p->kernels->fill_floats(&p->x, first, m, p->floats + values);
    } else if (l->activation == INT8) {
        bad = p->kernels->fill_bytes(&p->x, first, m, l->format, p->bytes + values, p->scale + blocks,
                                     p->offset + blocks);
    } else {
        p->kernels->fill_fp4(&p->x, first, m, l->x_global_scale, p->bytes + values, p->scale + blocks,
                             p->offset + blocks);
    }
    if (bad) atomic_fetch_add(&p->bad_rows, bad);
}

static void fill_chunks(void *state, int thread) {
    struct product *p = state;
    (void)thread;
    for (int64_t c; (c = atomic_fetch_add(&p->next_chunk, 1)) < p->num_chunks;) fill_chunk(p, c);
}

static void store_group(const struct product *p, int64_t group, int64_t first_row, int m, const float *out) {
    const struct linear *l = p->l;
    const int64_t first_n = group * ROWS, size = l->dtype == FP32 ? 4 : 2;
    const int n = l->n - first_n < ROWS ? (int)(l->n - first_n) : ROWS;
    static const float halves[] = {[EXACT] = 1.0f, [INT8] = 0.5f, [FP4] = 0.25f};
    const float powers = halves[l->activation] * (l->format == NVFP4 ? NVFP4_SCALE_UP : 1.0f);
    const float scale = powers * (l->activation == FP4 ? l->global_scale * l->x_global_scale : l->global_scale);
    float factor[ROWS];
    memcpy(factor, l->groups + group * group_bytes(l->format, l->k), sizeof(factor));
    for (int j = 0; j < m; j++) {
        char *y = (char *)l->y + ((first_row + j) * l->n + first_n) * size;
        p->kernels->store(out + j * ROWS, factor, scale, l->bias == NULL ? NULL : l->bias + first_n, y, l->dtype, n);
    }
}

/* One or two groups times a chunk. */
static void multiply_groups(const struct product *p, int64_t group, int count, int64_t chunk,
                            const uint8_t *prefetch_end) {
    const struct linear *l = p->l;
    const int64_t begin = chunk_begin(p, chunk), tiles = num_tiles(l->k), bytes = group_bytes(l->format, l->k);
    const int64_t values = begin * tiles * TILE_K, blocks = begin * tiles * (TILE_K / block_size(l->format));
    const struct group w = {l->groups + group * bytes + HEADER, bytes, tiles, count, l->format, prefetch_end};
    const struct chunk x = {
        .m = (int)(chunk_begin(p, chunk + 1) - begin),
        .floats = p->floats + values,
        .pairs = p->pairs + values / 2,
        .bytes = (const uint32_t *)(p->bytes + values),
        .scale = p->scale + blocks,
        .offset = p->offset + blocks,
    };
    float out[MAX_GROUPS * MAX_CHUNK * ROWS];
    if (l->activation != EXACT) {
        p->kernels->dot_bytes(&w, &x, out);
    } else if (p->use_pairs) {
        p->kernels->dot_pairs(&w, &x, out);
    } else {
        p->kernels->dot_floats(&w, &x, out);
    }
    for (int g = 0; g < count; g++) store_group(p, group + g, p->first_row + begin, x.m, out + g * x.m * ROWS);
}

/* A piece is some groups times some chunks. Its groups stay in the cache while the chunks pass over them. */
static void multiply_piece(const struct product *p, int64_t piece, const uint8_t *prefetch_end) {
    const int64_t groups = ceil_div(p->l->n, ROWS), across = ceil_div(groups, p->groups_a_piece);
    const int64_t group = piece % across * p->groups_a_piece, chunk = piece / across * p->chunks_a_piece;
    const int64_t group_end = group + p->groups_a_piece < groups ? group + p->groups_a_piece : groups;
    const int64_t chunk_end = chunk + p->chunks_a_piece < p->num_chunks ? chunk + p->chunks_a_piece : p->num_chunks;
    for (int64_t c = chunk; c < chunk_end; c++) {
        const int most = chunk_begin(p, c + 1) - chunk_begin(p, c) == MAX_CHUNK ? p->kernels->groups_at_once : 1;
        for (int64_t g = group; g < group_end;) {
            const int count = group_end - g < most ? (int)(group_end - g) : most;
            multiply_groups(p, g, count, c, prefetch_end);
            g += count;
        }
    }
}

static int64_t share_begin(const struct product *p, int share) { return p->num_pieces * share / p->threads; }

/* Where a piece of a product with a single chunk begins. */
static const uint8_t *piece_memory(const struct product *p, int64_t piece) {
    const int64_t groups = ceil_div(p->l->n, ROWS), group = piece * p->groups_a_piece;
    return p->l->groups + (group < groups ? group : groups) * group_bytes(p->l->format, p->l->k);
}

/* Asks for the first bytes of a thread's share. Memory takes as long to answer as x takes to be filled in. */
static void prefetch_share(const struct product *p, int thread) {
    const uint8_t *begin = piece_memory(p, share_begin(p, thread)), *end = piece_memory(p, share_begin(p, thread + 1));
    for (int64_t i = 0; i < PREFETCH_BYTES && i < end - begin; i += 64) __builtin_prefetch(begin + i);
}

/* Each thread takes the pieces of its own share, which are one stream of memory, then what others have left of theirs.
 * Which thread computes a result changes no bit of it. */
static void multiply_pieces(void *state, int thread) {
    struct product *p = state;
    for (int i = 0; i < p->threads; i++) {
        const int share = (thread + i) % p->threads;
        const int64_t end = share_begin(p, share + 1);
        /* the many chunks of x find all but the first bytes of a piece in the cache */
        const uint8_t *prefetch_end = p->num_chunks > 1 ? NULL : piece_memory(p, end);
        for (int64_t piece; (piece = atomic_fetch_add(&p->shares[share].next, 1)) < end;) {
            multiply_piece(p, piece, prefetch_end);
        }
    }
}

/* The same for a few rows of x, which thread 0 fills in while the others wait for their weights. */
static void fill_and_multiply(void *state, int thread) {
    struct product *p = state;
    prefetch_share(p, thread);
    if (thread == 0) {
        fill_chunk(p, 0);
        atomic_store_explicit(&p->is_filled, 1, memory_order_release);
    } else {
        while (!atomic_load_explicit(&p->is_filled, memory_order_acquire)) pause_briefly();
    }
    multiply_pieces(p, thread);
}

static int64_t at_least(int64_t value, int64_t least) { return value > least ? value : least; }

static void plan_pieces(struct product *p) {
    const int threads = p->threads;
    const int64_t groups = ceil_div(p->l->n, ROWS), bytes = group_bytes(p->l->format, p->l->k);
    const int64_t least = p->num_rows < MAX_CHUNK ? 1 : p->kernels->groups_at_once;
    const int64_t fair = at_least(groups / ((int64_t)threads * PIECES_A_THREAD), least);
    const int64_t cached = at_least(CACHED_BYTES / bytes, 1);
    p->chunks_a_piece = p->num_chunks;
    p->groups_a_piece = p->num_chunks > 1 && cached < fair ? cached : fair;
    if (groups < 4 * threads) { /* too few rows of the weight to share: share those of x as well */
        p->chunks_a_piece = at_least(p->num_chunks / (4 * (int64_t)threads), 1);
    }
    p->num_pieces = ceil_div(groups, p->groups_a_piece) * ceil_div(p->num_chunks, p->chunks_a_piece);
    for (int i = 0; i < threads; i++) atomic_store(&p->shares[i].next, share_begin(p, i));
}

/* Rows first .. first + count of x, whose scratch `p` holds. */
static void multiply_pass(struct product *p, int64_t first, int64_t count) {
    const int64_t work = ceil_div(p->l->n, ROWS) * group_bytes(p->l->format, p->l->k) * count;
    const int64_t worth = at_least(work / BYTES_WORTH_A_THREAD, 1);
    const int64_t allowed = p->l->threads < MAX_THREADS ? p->l->threads : MAX_THREADS;
    p->threads = (int)at_least(worth < allowed ? worth : allowed, 1);
    p->first_row = first;
    p->num_rows = count;
    p->num_chunks = ceil_div(count, p->kernels->rows_at_once);
    atomic_store(&p->next_chunk, 0);
    atomic_store(&p->is_filled, 0);
    plan_pieces(p);
    if (p->num_chunks == 1) {
        pool_run(fill_and_multiply, p, p->threads);
        return;
    }
    pool_run(fill_chunks, p, p->threads);
    pool_run(multiply_pieces, p, p->threads);
}

/* Returns how many rows of x hold NaN or Inf, which INT8 cannot carry (0 for the others), or one of the errors. */
EXPORT int64_t blockscale_linear(const struct linear *l) {
    const struct kernels *kernels = find_kernels(l->level);
    if (kernels == NULL) return NO_SUCH_LEVEL;
    if (l->m == 0 || l->n == 0) return 0;
    struct product p;
    memset(&p, 0, offsetof(struct product, shares));
    p.l = l;
    p.kernels = kernels;
    p.x = (struct rows){l->x, l->x_stride, l->k, l->dtype};
    p.use_pairs = l->activation == EXACT && kernels->has_pairs && l->dtype == BF16;
    const int64_t padded = num_tiles(l->k) * TILE_K, blocks = padded / block_size(l->format);
    const int64_t value_bytes = l->activation != EXACT ? 1 : p.use_pairs ? 2 : 4;
    const int64_t row_bytes = padded * value_bytes + (l->activation != EXACT ? blocks * 8 : 0);
    int64_t rows = at_least(SCRATCH_BYTES / row_bytes / MAX_CHUNK * MAX_CHUNK, MAX_CHUNK);
    if (rows > l->m) rows = l->m;
    uint8_t *scratch = NULL;
    if (posix_memalign((void **)&scratch, 64, (size_t)(rows * row_bytes)) != 0) return NO_MEMORY;
    p.floats = (float *)scratch;
    p.pairs = (uint32_t *)scratch;
    p.bytes = scratch;
    p.scale = (float *)(scratch + rows * padded);
    p.offset = (int32_t *)(p.scale + rows * blocks);
    for (int64_t first = 0; first < l->m; first += rows) {
        multiply_pass(&p, first, l->m - first < rows ? l->m - first : rows);
    }
    free(scratch);
    return atomic_load(&p.bad_rows);
}

struct quantization {
    const struct kernels *kernels;
    struct rows x;
    int64_t m;
    float global_scale;
    uint8_t *packed, *scale;
    _Atomic int64_t next;
    _Atomic uint32_t amax;
};

enum { ROWS_A_PIECE = 4 };

static void quantize_rows(void *state, int thread) {
    struct quantization *q = state;
    (void)thread;
    for (int64_t first; (first = atomic_fetch_add(&q->next, ROWS_A_PIECE)) < q->m;) {
        for (int64_t row = first; row < q->m && row < first + ROWS_A_PIECE; row++) {
            q->kernels->quantize_row(&q->x, row, q->global_scale, q->packed + row * (q->x.k / 2),
                                     q->scale + row * (q->x.k / 16));
        }
    }
}

static void find_amax(void *state, int thread) {
    struct quantization *q = state;
    (void)thread;
    for (int64_t first; (first = atomic_fetch_add(&q->next, ROWS_A_PIECE)) < q->m;) {
        const int64_t last = first + ROWS_A_PIECE < q->m ? first + ROWS_A_PIECE : q->m;
        const uint32_t here = q->kernels->finite_amax_bits(&q->x, first, last);
        uint32_t known = atomic_load(&q->amax);
        while (here > known && !atomic_compare_exchange_weak(&q->amax, &known, here)) {
        }
    }
}

/* packed [m, k/2] and scale [m, k/16] of x [m, k]. */
EXPORT int64_t blockscale_quantize(const void *x, int64_t x_stride, int64_t m, int64_t k, int32_t dtype,
                                   float global_scale, const char *level, int32_t threads, uint8_t *packed,
                                   uint8_t *scale) {
    struct quantization q = {find_kernels(level), {x, x_stride, k, dtype}, m, global_scale, packed, scale, 0, 0};
    if (q.kernels == NULL) return NO_SUCH_LEVEL;
    pool_run(quantize_rows, &q, threads);
    return 0;
}

/* The largest finite magnitude of x [m, k]. */
EXPORT int64_t blockscale_amax(const void *x, int64_t x_stride, int64_t m, int64_t k, int32_t dtype, const char *level,
                               int32_t threads, float *amax) {
    struct quantization q = {.kernels = find_kernels(level), .x = {x, x_stride, k, dtype}, .m = m};
    if (q.kernels == NULL) return NO_SUCH_LEVEL;
    pool_run(find_amax, &q, threads);
    const uint32_t bits = atomic_load(&q.amax);
    memcpy(amax, &bits, 4);
    return 0;
}

/* The name of the kernels that run for `level`, NULL if this processor cannot. */
EXPORT const char *blockscale_level(const char *level) {
    const struct kernels *kernels = find_kernels(level);
    return kernels == NULL ? NULL : kernels->name;
}
