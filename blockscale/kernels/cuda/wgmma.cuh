// Hopper's asynchronous pieces, as thin functions: mbarriers, tensor and bulk copies, warpgroup matrix instructions.
// Names follow the PTX ISA (chapters on mbarrier, cp.async.bulk and wgmma). sm_90a only.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {  // CUtensorMap: opaque, made by cuTensorMapEncodeTiled
  u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarriers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the barrier that lies at the same place in thread block `rank` of the cluster. Without a scope wider than the thread
// block, which would cost a fence of all memory: what was read here was read by wgmma, and has been waited for.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ bool has_passed(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{ .reg .pred p;\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

// WAIT_LIMIT, if defined, is the cycles after which a wait is given up by a trap: for trying out a kernel that may hang.
struct Patience {
#ifdef WAIT_LIMIT
  long long begin = clock64();
  __device__ __forceinline__ void check() const {
    if (clock64() - begin > WAIT_LIMIT) asm volatile("trap;");
  }
#else
  __device__ __forceinline__ void check() const {}
#endif
};

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  const Patience patience;
  while (!has_passed(barrier, parity)) patience.check();
}

// ---- clusters, grids, named barriers, registers ----------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Until everything that the kernels before this one wrote can be seen; nothing to wait for in an ordinary launch.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_later_kernels_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- copies from global to shared memory -----------------------------------------------------------------------------

__device__ __forceinline__ u64 policy_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 policy_evict_normal() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// `bytes` contiguous bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of a 2-D tensor; what lies outside of the tensor arrives as zeros.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same into every thread block of `mask`: same place, and the barrier at the same place.
__device__ __forceinline__ void copy_box_to_all(u32 to, const TensorMap* map, int column, int row, u32 barrier,
                                                unsigned short mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}

// ---- shared memory to registers and back -----------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ u32 load_2(u32 address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}

// Four 8 x 8 matrices of 16-bit elements, each written transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// ---- wgmma: d[64, N] += a[64, 16] b[16, N], a in registers, b in shared memory ---------------------------------------

// b lies as TMA's 128-byte swizzle leaves it: rows of 64 16-bit elements along K, eight rows an atom of 1,024 bytes.
__device__ __forceinline__ u64 operand_of(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
constexpr u64 OPERAND_STEP = 32 >> 4;  // 16 elements further along K

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define LIST_32  \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64 LIST_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_128 LIST_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OUT_8(i)                                                                                                  \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define OUT_32(i) OUT_8(i), OUT_8(i + 8), OUT_8(i + 16), OUT_8(i + 24)
#define WGMMA(N, TYPE, LIST, A0, A1, A2, A3, B, ...)                                                          \
  asm volatile("{ .reg .pred p;\n  setp.eq.u32 p, 0, 0;\n"                                                    \
               "  wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST "}, "               \
               "{%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, 0; }"                                  \
               : __VA_ARGS__                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// Queues one instruction. `a`: fragments of 16 rows a warp, as mma.m16n8k16 takes them.
template <int N, bool IS_FP16>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const u32* a, u64 b) {
  static_assert(N == 64 || N == 128 || N == 256);
  if constexpr (N == 64 && IS_FP16)
    WGMMA("64", "f16", LIST_32, "32", "33", "34", "35", "36", OUT_32(0));
  else if constexpr (N == 64)
    WGMMA("64", "bf16", LIST_32, "32", "33", "34", "35", "36", OUT_32(0));
  else if constexpr (N == 128 && IS_FP16)
    WGMMA("128", "f16", LIST_64, "64", "65", "66", "67", "68", OUT_32(0), OUT_32(32));
  else if constexpr (N == 128)
    WGMMA("128", "bf16", LIST_64, "64", "65", "66", "67", "68", OUT_32(0), OUT_32(32));
  else if constexpr (IS_FP16)
    WGMMA("256", "f16", LIST_128, "128", "129", "130", "131", "132", OUT_32(0), OUT_32(32), OUT_32(64), OUT_32(96));
  else
    WGMMA("256", "bf16", LIST_128, "128", "129", "130", "131", "132", OUT_32(0), OUT_32(32), OUT_32(64), OUT_32(96));
}

#undef WGMMA
#undef OUT_32
#undef OUT_8
