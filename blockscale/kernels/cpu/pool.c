/* A few threads that wait for work. A decoder calls many products of some microseconds each, one after another, so that
 * a worker spins for a while before it sleeps; one that sleeps costs tens of microseconds to wake.
 *
 * A job has a ticket for each worker it wants. The caller takes back those that nobody has taken when its own part is
 * done: it waits for workers at work, never for one that still wakes up. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "kernels.h"

enum { MAX_WORKERS = MAX_THREADS - 1, SPINS = 4000, SPINS_BEFORE_YIELD = 4000 };

static const uint64_t TICKETS = 0xFFFF;

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER; /* held by the caller whose job the workers do */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static atomic_int sleepers;
static _Atomic uint64_t posted; /* number of the job << 16 | tickets left */
static atomic_int finished;
static int num_workers;
static void (*current_job)(void *, int);
static void *current_state;

static int has_ticket(uint64_t word) { return (word & TICKETS) != 0; }

static void wait_for_ticket(void) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (has_ticket(atomic_load_explicit(&posted, memory_order_relaxed))) return;
        pause_briefly();
    }
    pthread_mutex_lock(&mutex);
    atomic_fetch_add(&sleepers, 1);
    while (!has_ticket(atomic_load(&posted))) pthread_cond_wait(&wake, &mutex);
    atomic_fetch_sub(&sleepers, 1);
    pthread_mutex_unlock(&mutex);
}

static void *worker(void *argument) {
    (void)argument;
    for (;;) {
        uint64_t now = atomic_load(&posted);
        if (!has_ticket(now)) {
            wait_for_ticket();
        } else if (atomic_compare_exchange_weak(&posted, &now, now - 1)) { /* the job now stays until this is counted */
            current_job(current_state, (int)(now & TICKETS));
            atomic_fetch_add_explicit(&finished, 1, memory_order_release);
        }
    }
    return NULL;
}

/* After a fork the child has none of the threads, and locks as they happened to be. */
static void forget_workers(void) {
    num_workers = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&posted, 0);
    atomic_store(&finished, 0);
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
        const int failed = pthread_create(&thread, &attributes, worker, NULL);
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
    atomic_store(&finished, 0);
    const uint64_t number = (atomic_load(&posted) >> 16) + 1;
    atomic_store(&posted, number << 16 | (uint64_t)wanted);
    if (atomic_load(&sleepers) > 0) {
        pthread_mutex_lock(&mutex);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&mutex);
    }
    job(state, 0);
    const int taken = wanted - (int)(atomic_fetch_and(&posted, ~TICKETS) & TICKETS);
    for (int spin = 0; atomic_load_explicit(&finished, memory_order_acquire) < taken; spin++) {
        if (spin < SPINS_BEFORE_YIELD) {
            pause_briefly();
        } else {
            sched_yield();
        }
    }
    pthread_mutex_unlock(&in_use);
}
