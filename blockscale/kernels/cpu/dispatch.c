/* Which instruction sets this processor and its operating system offer. */
#include <pthread.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

struct features {
    int avx2, avx2_vnni, avx512, avx512_bf16;
};

static uint64_t saved_by_the_system(void) { /* XCR0: the registers that a context switch keeps */
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static int all(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

static struct features detect(void) {
    struct features found = {0, 0, 0, 0};
    uint32_t a, b, c, d, b7, c7, a71 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    if (!all(c, fma | osxsave | avx | f16c)) return found;
    const uint64_t saved = saved_by_the_system();
    if ((saved & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) return found;
    const uint32_t subleaves = a;
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) a71 = a;
    const uint32_t avx2 = 1u << 5, avx_vnni = 1u << 4, bf16 = 1u << 5;
    found.avx2 = all(b7, avx2);
    found.avx2_vnni = found.avx2 && all(a71, avx_vnni);
    const uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
    const uint32_t vbmi = 1u << 1, vnni = 1u << 11; /* in ECX */
    found.avx512 = found.avx2 && (saved & 0xE6) == 0xE6 && all(b7, f | dq | bw | vl) && all(c7, vnni);
    found.avx512_bf16 = found.avx512 && all(c7, vbmi) && all(a71, bf16);
    return found;
}

/* Asked once: under a hypervisor the instruction takes microseconds. */
static pthread_once_t detected = PTHREAD_ONCE_INIT;
static struct features found;

static void detect_once(void) { found = detect(); }
#endif

const struct kernels *find_kernels(const char *name) {
    const struct kernels *usable[5]; /* best first */
    int count = 0;
#if defined(__x86_64__)
    pthread_once(&detected, detect_once);
#ifdef HAVE_AVX512_BF16
    if (found.avx512_bf16) usable[count++] = &kernels_avx512_bf16;
#endif
#ifdef HAVE_AVX512
    if (found.avx512) usable[count++] = &kernels_avx512;
#endif
#ifdef HAVE_AVX2_VNNI
    if (found.avx2_vnni) usable[count++] = &kernels_avx2_vnni;
#endif
#ifdef HAVE_AVX2
    if (found.avx2) usable[count++] = &kernels_avx2;
#endif
#endif
    usable[count++] = &kernels_portable;
    if (name == NULL) return usable[0];
    for (int i = 0; i < count; i++) {
        if (strcmp(usable[i]->name, name) == 0) return usable[i];
    }
    return NULL;
}
