/* A few threads that wait for work. A decoder calls many products of some microseconds each, one after another, so that
 * a worker spins for a while before it sleeps; one that sleeps costs tens of microseconds to wake. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "kernels.h"

enum { MAX_WORKERS = MAX_THREADS - 1, SPINS = 1500, SPINS_BEFORE_YIELD = 4000 };

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER; /* held by the caller whose job the workers do */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static atomic_int sleepers;
static _Atomic uint64_t posted; /* number of the job << 16 | workers it wants */
static atomic_int unfinished;
static int num_workers;
static void (*current_job)(void *, int);
static void *current_state;

static void *worker(void *argument) {
    const int index = (int)(intptr_t)argument; /* from 1; the caller is thread 0 */
    uint64_t seen = 0;
    for (;;) {
        uint64_t now = atomic_load_explicit(&posted, memory_order_acquire);
        for (int spin = 0; now == seen && spin < SPINS; spin++) {
            pause_briefly();
            now = atomic_load_explicit(&posted, memory_order_acquire);
        }
        if (now == seen) {
            pthread_mutex_lock(&mutex);
            atomic_fetch_add(&sleepers, 1);
            while ((now = atomic_load(&posted)) == seen) pthread_cond_wait(&wake, &mutex);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&mutex);
        }
        seen = now;
        if (index <= (int)(now & 0xFFFF)) { /* the job stays until all that it wants have finished */
            current_job(current_state, index);
            atomic_fetch_sub_explicit(&unfinished, 1, memory_order_release);
        }
    }
    return NULL;
}

/* After a fork the child has none of the threads, and locks as they happened to be. */
static void forget_workers(void) {
    num_workers = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&posted, 0);
    atomic_store(&unfinished, 0);
    pthread_mutex_init(&in_use, NULL);
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&wake, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void start_workers(int wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    while (num_workers < wanted) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        const int failed = pthread_create(&thread, &attributes, worker, (void *)(intptr_t)(num_workers + 1));
        pthread_attr_destroy(&attributes);
        if (failed) return; /* fewer threads do the same work */
        num_workers++;
    }
}

void pool_run(void (*job)(void *state, int thread), void *state, int threads) {
    int wanted = threads - 1 < MAX_WORKERS ? threads - 1 : MAX_WORKERS;
    if (wanted <= 0 || pthread_mutex_trylock(&in_use) != 0) {
        job(state, 0);
        return;
    }
    start_workers(wanted);
    if (wanted > num_workers) wanted = num_workers;
    current_job = job;
    current_state = state;
    atomic_store(&unfinished, wanted);
    const uint64_t number = (atomic_load(&posted) >> 16) + 1;
    atomic_store(&posted, number << 16 | (uint64_t)wanted);
    if (atomic_load(&sleepers) > 0) {
        pthread_mutex_lock(&mutex);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&mutex);
    }
    job(state, 0);
    for (int spin = 0; atomic_load_explicit(&unfinished, memory_order_acquire) > 0; spin++) {
        if (spin < SPINS_BEFORE_YIELD) {
            pause_briefly();
        } else {
            sched_yield();
        }
    }
    pthread_mutex_unlock(&in_use);
}
