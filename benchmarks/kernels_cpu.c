/* Timed passes for kernels_cpu.py: every contender reads its copies of a weight once, from memory.
 *
 * Built with the machine's own instructions. A peer's functions have no threads of their own. Those that serve them
 * here spin while they wait, so that nothing is lost on starting them, and sleep once a pass is over, so that they take
 * no core from the next contender. The first call of a pass, which wakes threads, is not timed. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef void (*job_function)(void *state, int thread, int threads);

enum { SPINS = 200000 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static atomic_int generation, unfinished, started, sleepers;
static job_function job;
static void *job_state;
static int job_threads;

static void *wait_for_jobs(void *argument) {
    const int index = (int)(intptr_t)argument;
    int seen = 0;
    for (;;) {
        int now = seen;
        for (long spin = 0; spin < SPINS && (now = atomic_load(&generation)) == seen; spin++) {
        }
        if (now == seen) {
            pthread_mutex_lock(&mutex);
            atomic_fetch_add(&sleepers, 1);
            while ((now = atomic_load(&generation)) == seen) pthread_cond_wait(&wake, &mutex);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&mutex);
        }
        seen = now;
        if (index < job_threads) {
            job(job_state, index, job_threads);
            atomic_fetch_sub(&unfinished, 1);
        }
    }
    return NULL;
}

static void run(job_function function, void *state, int threads) {
    while (atomic_load(&started) < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, wait_for_jobs, (void *)(intptr_t)(atomic_load(&started) + 1))) return;
        pthread_detach(thread);
        atomic_fetch_add(&started, 1);
    }
    job = function;
    job_state = state;
    job_threads = threads;
    atomic_store(&unfinished, threads - 1);
    atomic_fetch_add(&generation, 1);
    if (atomic_load(&sleepers) > 0) {
        pthread_mutex_lock(&mutex);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&mutex);
    }
    function(state, 0, threads);
    while (atomic_load(&unfinished) > 0) {
    }
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* One function called on each of `count` argument blocks, `size` bytes apart: seconds a call. */
double time_calls(int64_t (*function)(const void *), const char *arguments, int64_t size, int64_t count) {
    function(arguments + (count - 1) * size);
    const double begin = seconds();
    for (int64_t i = 0; i < count; i++) function(arguments + i * size);
    return (seconds() - begin) / (double)count;
}

struct reading {
    const char *data;
    int64_t bytes;
    int ahead;
    uint64_t sums[64][8];
};

static void read_share(void *state, int thread, int threads) {
    typedef uint64_t wide __attribute__((vector_size(64)));
    struct reading *r = state;
    const int64_t lines = r->bytes / 256;
    const char *p = r->data + lines * thread / threads * 256, *end = r->data + lines * (thread + 1) / threads * 256;
    const int ahead = r->ahead;
    wide a = {0}, b = {0}, c = {0}, d = {0};
    for (; p < end; p += 256) {
        for (int i = 0; i < 256; i += 64) __builtin_prefetch(p + ahead + i);
        const wide *q = (const wide *)p;
        a ^= q[0], b ^= q[1], c ^= q[2], d ^= q[3];
    }
    a = a ^ b ^ c ^ d;
    memcpy(r->sums[thread], &a, 64);
}

/* Bytes a second that `threads` threads read from memory, prefetching that many bytes ahead; `data` at a multiple of
 * 256. */
double read_bandwidth(const char *data, int64_t bytes, int threads, int ahead) {
    struct reading r = {.data = data, .ahead = ahead};
    r.bytes = 1 << 20;
    run(read_share, &r, threads);
    r.bytes = bytes;
    const double begin = seconds();
    run(read_share, &r, threads);
    return (double)bytes / (seconds() - begin);
}

/* As time_calls, of reading `count` pieces of memory, `size` bytes apart, in that order: what starting and ending a
 * pass over one weight costs a plain read. */
double time_reads(const char *data, int64_t size, const int64_t *order, int64_t count, int threads) {
    struct reading r = {.bytes = size, .ahead = 8192, .data = data + order[count - 1] * size};
    run(read_share, &r, threads);
    const double begin = seconds();
    for (int64_t i = 0; i < count; i++) {
        r.data = data + order[i] * size;
        run(read_share, &r, threads);
    }
    return (seconds() - begin) / (double)count;
}

/* llama.cpp's functions, of a row (vec_dot) or of many interleaved rows (gemv). */
typedef void (*vec_dot)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);
typedef void (*gemv)(int n, float *s, size_t bs, const void *x, const void *y, int nr, int nc);
typedef void (*quantize_row)(const float *x, void *y, int64_t k);

struct peer {
    vec_dot dot;
    gemv many;
    quantize_row quantize;
    const char *weight;
    int64_t n, k, row_bytes;
    const float *x;
    void *quantized;
    float *y;
};

static void peer_share(void *state, int thread, int threads) {
    const struct peer *p = state;
    if (p->many) {
        const int64_t units = p->n / 8, first = units * thread / threads * 8, last = units * (thread + 1) / threads * 8;
        p->many((int)p->k, p->y + first, (size_t)p->n, p->weight + first * p->row_bytes, p->quantized, 1,
                (int)(last - first));
        return;
    }
    for (int64_t n = p->n * thread / threads; n < p->n * (thread + 1) / threads; n++) {
        p->dot((int)p->k, p->y + n, 0, p->weight + n * p->row_bytes, 0, p->quantized, 0, 1);
    }
}

/* As time_calls, of y = W q8_0(x) over `count` copies of W in that order. */
double time_peer(const struct peer *peer, const int64_t *order, int64_t count, int threads) {
    struct peer p = *peer;
    p.weight += order[count - 1] * p.n * p.row_bytes;
    p.quantize(p.x, p.quantized, p.k);
    run(peer_share, &p, threads);
    const double begin = seconds();
    for (int64_t i = 0; i < count; i++) {
        p.weight = peer->weight + order[i] * p.n * p.row_bytes;
        p.quantize(p.x, p.quantized, p.k);
        run(peer_share, &p, threads);
    }
    return (seconds() - begin) / (double)count;
}
