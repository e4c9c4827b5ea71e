// Runs a CUDA kernel on the host, one block after the other: every thread of a block is a coroutine that gives way at
// barriers and warp-wide operations. For tests of kernels that use plain loads, shared memory, __syncthreads, votes and
// the 16x8x16 matrix instruction. Included before the kernel's source, whose device intrinsics it supplies.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

typedef unsigned int u32;
typedef unsigned short u16;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Dim { int x, y; };
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int __popc(u32 v) { return __builtin_popcount(v); }

// --- the block that runs
struct Operands { u32 word[6]; };
struct Warp {
  Operands given[2][32];  // by parity of the generation: a lane may be one operation ahead
  int arrived = 0, generation = 0;
};
struct Coroutine {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Dim index;
  bool is_done = false;
};
static ucontext_t scheduler;
static std::vector<Coroutine> coroutines;
static std::vector<Warp> warps;
static Coroutine* current;
static int block_arrived, block_generation;
static std::function<void()> body;
static std::vector<uint4> block_memory;
static Dim blockIdx, gridDim;
#define threadIdx (current->index)

static void give_way() { swapcontext(&current->context, &scheduler); }

static void __syncthreads() {
  const int generation = block_generation;
  if (++block_arrived == (int)coroutines.size()) {
    block_arrived = 0;
    block_generation++;
  }
  while (block_generation == generation) give_way();
}

// What every lane of the warp gave.
static const Operands* exchange(const Operands& mine) {
  Warp& warp = warps[threadIdx.x / 32];
  const int generation = warp.generation;
  warp.given[generation & 1][threadIdx.x % 32] = mine;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    warp.generation++;
  }
  while (warp.generation == generation) give_way();
  return warp.given[generation & 1];
}

static u32 __ballot_sync(u32, bool vote) {
  const Operands* all = exchange({{vote}});
  u32 mask = 0;
  for (int i = 0; i < 32; i++) mask |= all[i].word[0] << i;
  return mask;
}
static u32 __match_any_sync(u32, int value) {
  const Operands* all = exchange({{(u32)value}});
  u32 mask = 0;
  for (int i = 0; i < 32; i++) mask |= (u32)(all[i].word[0] == (u32)value) << i;
  return mask;
}
static int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}

// --- numbers
static float fp32(u32 bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
static u32 bits32(float v) {
  u32 bits;
  memcpy(&bits, &v, 4);
  return bits;
}
static float half_value(int type, u32 bits) {
  if (type == 0) return fp32(bits << 16);
  _Float16 v;
  const u16 low = (u16)bits;
  memcpy(&v, &low, 2);
  return (float)v;
}
static u32 half_bits(int type, float v) {
  if (type == 0) return v != v ? 0x7FFFu : (bits32(v) + 0x7FFFu + (bits32(v) >> 16 & 1)) >> 16;
  const _Float16 h = (_Float16)v;
  u16 bits;
  memcpy(&bits, &h, 2);
  return bits;
}
static u32 multiply_halves(int type, u32 a, u32 b) {
  const float low = half_value(type, a & 0xFFFF) * half_value(type, b & 0xFFFF);
  const float high = half_value(type, a >> 16) * half_value(type, b >> 16);
  return (half_bits(type, low) & 0xFFFF) | half_bits(type, high) << 16;
}
static inline u32 multiply_bf16x2(u32 a, u32 b) { return multiply_halves(0, a, b); }
static inline u32 multiply_f16x2(u32 a, u32 b) { return multiply_halves(1, a, b); }
template <int TYPE>
static u16 to_half_bits(float v) { return (u16)half_bits(TYPE, v); }
template <int TYPE>
static float from_half_bits(u16 v) { return half_value(TYPE, v); }

template <int TYPE>
static void multiply_16x8x16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const Operands* all = exchange({{a0, a1, a2, a3, b0, b1}});
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) {
    const int column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const int half = k / 8, other = k % 8 / 2, shift = k % 2 * 16;
      const float a = half_value(TYPE, all[g * 4 + other].word[2 * half + i / 2] >> shift & 0xFFFF);
      c[i] += a * half_value(TYPE, all[column * 4 + other].word[4 + half] >> shift & 0xFFFF);
    }
  }
}

// --- memory and launches
static uint4 load_once(const uint4* p) { return *p; }
template <typename T>
static u32 load_cached(const T* p) { return *p; }
static char* dynamic_shared_memory() { return (char*)block_memory.data(); }
static float exponential(float v) { return std::exp(v); }
static void wait_for_previous_kernel() {}
static void allow_next_kernel() {}

static void enter() {
  body();
  current->is_done = true;
  give_way();
}

// Every block of a grid; shared memory begins as NaN. Returns bytes written past the end of shared memory: 0 or more.
static int run_grid(Dim grid, int threads, int shared_bytes, std::function<void()> kernel) {
  constexpr int GUARD = 4096, STACK = 64 << 10;
  body = std::move(kernel);
  gridDim = grid;
  int past = 0;
  for (int block = 0; block < grid.x * grid.y; block++) {
    blockIdx = {block % grid.x, block / grid.x};
    block_memory.assign((shared_bytes + GUARD + 15) / 16, {~0u, ~0u, ~0u, ~0u});
    warps.assign((threads + 31) / 32, Warp());
    coroutines.clear();
    coroutines.resize(threads);
    block_arrived = 0;
    for (int i = 0; i < threads; i++) {
      Coroutine& c = coroutines[i];
      c.index = {i, 0};
      c.stack.reset(new char[STACK]);
      getcontext(&c.context);
      c.context.uc_stack.ss_sp = c.stack.get();
      c.context.uc_stack.ss_size = STACK;
      c.context.uc_link = nullptr;
      makecontext(&c.context, enter, 0);
    }
    for (bool any = true; any;) {
      any = false;
      for (Coroutine& c : coroutines) {
        if (c.is_done) continue;
        any = true;
        current = &c;
        swapcontext(&scheduler, &c.context);
      }
    }
    const unsigned char* bytes = (const unsigned char*)block_memory.data();
    for (int i = shared_bytes; i < shared_bytes + GUARD; i++) past += bytes[i] != 0xFF;
  }
  return past;
}
