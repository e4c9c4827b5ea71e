// Linear layer with 4-bit weights for many tokens on sm_90a: y[M, N] = x[M, K] * weight[N, K]^T * global_scale + bias.
//
// Computed as y^T = weight * x^T, so that the weights are wgmma's operand from registers: they are read from shared
// memory as 4-bit codes, decoded by each warp for its own 16 rows, and never written back. Activations are the operand
// from shared memory. A lane's codes are 16 consecutive columns; so that it need not exchange them with its neighbours,
// the columns of the activations are brought into the same order beforehand, by `order_activations`.
//
// A thread block is one warpgroup that copies (one warp for activations through a tensor map, one for weights) and two
// that multiply, each 64 * BLOCKS rows by TOKENS tokens. Both kinds of copies have a ring of stages. A cluster of two
// thread blocks works on neighbouring rows and the same tokens: each fetches half of the activations for both, since
// reading them from L2 is what would limit the kernel.
//
// While a group of four wgmmas runs, the warp decodes the weights of the next one, two instructions' worth at a time: a
// warp that queues all four first stands still until the last of them may begin.
// Tiles, or parts of tiles along K, are dealt out by `part_of`. The thread block that begins a tile finishes it: it adds
// the others' partial sums, in the order of K, so that results do not depend on timing.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "large_parts.cuh"
#include "wgmma.cuh"

namespace {

constexpr int TILE_BYTES = 2304, TILE_CODES = 2048;  // 32 rows x 128 columns (layouts.py)
constexpr int COPIERS = 128, MULTIPLIERS = 256, THREADS = COPIERS + MULTIPLIERS;
constexpr int STAGING_TOKENS = 64, STAGING_BYTES = 64 * STAGING_TOKENS * 2;  // per multiplying warpgroup

struct Args {
  const unsigned char* tiles;  // [row_tiles32, steps, TILE_BYTES]
  void* y;                     // [m, n], 16-bit
  const float* global_scale;   // one
  const float* bias_fp32;      // [n], at most one of the two
  const void* bias;            // [n], the type of y
  float* partials;             // [grid][accumulators / 4][MULTIPLIERS][4]
  u32* flags;                  // [grid], zeros: order_activations clears them
  int m, n, row_tiles32;
  int row_tiles, token_tiles, band;  // in tiles of a cluster
  Deal deal;
};

template <int BLOCKS_, int TOKENS_, int CLUSTER_, int TYPE_, int FORMAT_, int X_STAGES_, int W_STAGES_>
struct Shape {
  static constexpr int BLOCKS = BLOCKS_, TOKENS = TOKENS_, CLUSTER = CLUSTER_;
  static constexpr int TYPE = TYPE_, FORMAT = FORMAT_;
  static constexpr int X_STAGES = X_STAGES_, W_STAGES = W_STAGES_;
  static constexpr int ROWS = 128 * BLOCKS, ROW_TILES = ROWS / 32;
  static constexpr int X_BYTES = TOKENS * 128;            // a stage: 64 columns
  static constexpr int W_BYTES = ROW_TILES * TILE_BYTES;  // a stage: 128 columns
  static constexpr int ACCUMULATORS = BLOCKS * TOKENS / 2;
  // From an address that is a multiple of 1,024:
  static constexpr int W_AT = X_STAGES * X_BYTES, STAGING_AT = W_AT + W_STAGES * W_BYTES;
  static constexpr int BARRIERS_AT = STAGING_AT + 2 * STAGING_BYTES;
  static constexpr int SHARED_BYTES = BARRIERS_AT + 2 * (X_STAGES + W_STAGES) * 8 + 1024;
};

// A ring of stages, each with a barrier that says full and one that says empty.
template <int STAGES>
struct Ring {
  u32 barriers;
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ explicit Ring(u32 at) : barriers(at) {}
  __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
  __device__ __forceinline__ u32 empty() const { return barriers + (STAGES + stage) * 8; }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

template <class S>
__device__ __forceinline__ void copy_activations(const TensorMap& map, const Args& a, u32 base, u32 rank, int worker) {
  Ring<S::X_STAGES> ring(base + S::BARRIERS_AT);
  wait_for_earlier_kernels();
  for (int i = 0;; ++i) {
    const Part part = part_of(a.deal, worker, i);
    if (part.begin == part.end) break;
    const int token = place_of(part.tile, a.row_tiles, a.token_tiles, a.band).token * S::TOKENS;
    for (int column = part.begin * 128; column < part.end * 128; column += 64) {
      wait(ring.empty(), ring.parity ^ 1);
      arrive_expecting(ring.full(), S::X_BYTES);
      const u32 to = base + ring.stage * S::X_BYTES;
      if constexpr (S::CLUSTER == 1) {
        copy_box(to, &map, column, token, ring.full());
      } else {
        const u32 share = S::TOKENS / S::CLUSTER * rank;
        copy_box_to_all(to + share * 128, &map, column, token + share, ring.full(), (1 << S::CLUSTER) - 1);
      }
      ring.next();
    }
  }
}

template <class S>
__device__ __forceinline__ void copy_weights(const Args& a, u32 base, u32 rank, int worker, int lane) {
  Ring<S::W_STAGES> ring(base + S::BARRIERS_AT + 2 * S::X_STAGES * 8);
  // Weights that are read once shall not drive the activations out of L2.
  const u64 policy = a.token_tiles == 1 ? policy_evict_first() : policy_evict_normal();
  for (int i = 0;; ++i) {
    const Part part = part_of(a.deal, worker, i);
    if (part.begin == part.end) break;
    const Place place = place_of(part.tile, a.row_tiles, a.token_tiles, a.band);
    const int first = (place.row * S::CLUSTER + rank) * S::ROW_TILES;
    const int tiles = max(0, min(S::ROW_TILES, a.row_tiles32 - first));  // rows beyond the weight are not fetched
    const unsigned char* from = a.tiles + ((size_t)(first + lane) * a.deal.steps + part.begin) * TILE_BYTES;
    for (int step = part.begin; step < part.end; ++step, from += TILE_BYTES) {
      wait(ring.empty(), ring.parity ^ 1);
      if (lane == 0) arrive_expecting(ring.full(), tiles * TILE_BYTES);
      __syncwarp();
      if (lane < tiles)
        copy_bytes(base + S::W_AT + ring.stage * S::W_BYTES + lane * TILE_BYTES, from, TILE_BYTES, ring.full(), policy);
      ring.next();
    }
  }
}

// What a lane reads of 16 rows x 64 columns, not decoded yet. `scales`: those of its rows in this quad's first block.
template <class S>
struct Raw {
  uint4 codes;
  u32 bytes, other;  // scales; MXFP4: those of the even and the odd block

  __device__ __forceinline__ void load(u32 codes_at, u32 scales_at) {
    const u32 t = threadIdx.x & 3;
    codes = load_16(codes_at);
    bytes = load_2(scales_at + (S::FORMAT == MXFP4 ? t & 2 : t) * 8);
    if constexpr (S::FORMAT == MXFP4) other = load_2(scales_at + (t | 1) * 8);
  }

  // The fragments of instructions 2 * half and 2 * half + 1.
  __device__ __forceinline__ void decode(u32* a, int half) const {
    fragments_of<S::TYPE, S::FORMAT>({codes.x, codes.y, codes.z, codes.w}, bytes, bytes, other, half, a);
  }
};

// Where the partial sums of a thread block lie, from this thread's first on: accumulators in coalesced order.
template <class S>
__device__ __forceinline__ float4* partials_of(const Args& a, int block) {
  return (float4*)a.partials + (size_t)block * (S::ACCUMULATORS / 4) * MULTIPLIERS + (threadIdx.x - COPIERS);
}

template <class S>
__device__ __forceinline__ void give_partials(const float (&d)[S::BLOCKS][S::TOKENS / 2], const Args& a) {
  float4* to = partials_of<S>(a, blockIdx.x);
#pragma unroll
  for (int b = 0; b < S::BLOCKS; ++b)
#pragma unroll
    for (int i = 0; i < S::TOKENS / 2; i += 4, to += MULTIPLIERS)
      __stcg(to, make_float4(d[b][i], d[b][i + 1], d[b][i + 2], d[b][i + 3]));
  __threadfence();
  named_sync(1, MULTIPLIERS);
  if (threadIdx.x == COPIERS) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(a.flags + blockIdx.x) : "memory");
}

template <class S>
__device__ __forceinline__ void take_partials(float (&d)[S::BLOCKS][S::TOKENS / 2], const Args& a, int worker, u32 rank,
                                              int tile) {
  const long long tile_end = (long long)(tile - a.deal.waves * a.deal.workers + 1) * a.deal.steps;
  for (int place = a.deal.workers - worker; dealt_begin(a.deal, place) < tile_end; ++place) {
    if (dealt_begin(a.deal, place) == dealt_begin(a.deal, place + 1)) continue;
    const int block = (a.deal.workers - 1 - place) * S::CLUSTER + rank;
    if (threadIdx.x == COPIERS) {
      const Patience patience;
      for (u32 is_there = 0; !is_there; patience.check())
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_there) : "l"(a.flags + block) : "memory");
      __threadfence();
    }
    named_sync(1, MULTIPLIERS);
    const float4* from = partials_of<S>(a, block);
#pragma unroll
    for (int b = 0; b < S::BLOCKS; ++b)
#pragma unroll
      for (int i = 0; i < S::TOKENS / 2; i += 4, from += MULTIPLIERS) {
        const float4 v = __ldcg(from);
        d[b][i] += v.x, d[b][i + 1] += v.y, d[b][i + 2] += v.z, d[b][i + 3] += v.w;
      }
  }
}

// Scales, adds the bias, rounds, and writes the tile through shared memory, 64 tokens at a time.
template <class S>
__device__ __forceinline__ void write_tile(const float (&d)[S::BLOCKS][S::TOKENS / 2], const Args& a, u32 staging,
                                           int first_row, int first_token, int group) {
  constexpr int TYPE = S::TYPE;
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  const float scale = *a.global_scale * weight_factor<S::FORMAT>();
  const bool is_aligned = a.n % 8 == 0;
  unsigned short* y = (unsigned short*)a.y;
#pragma unroll
  for (int b = 0; b < S::BLOCKS; ++b) {
    const int rows = first_row + b * 64;
    float bias[2] = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = rows + warp * 16 + h * 8 + lane / 4;
      if (row < a.n) {
        if (a.bias_fp32) bias[h] = a.bias_fp32[row];
        if (a.bias) bias[h] = TYPE == FP16 ? __half2float(((const __half*)a.bias)[row])
                                      : __bfloat162float(((const __nv_bfloat16*)a.bias)[row]);
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < S::TOKENS / STAGING_TOKENS; ++chunk) {
#pragma unroll
      for (int c = 0; c < STAGING_TOKENS / 8; c += 2) {  // two columns of 8 x 8 matrices, of two matrices each
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* v = &d[b][(chunk * STAGING_TOKENS / 8 + c + i / 2) * 4 + i % 2 * 2];
          r[i] = round_pair<TYPE>(fmaf(v[0], scale, bias[i % 2]), fmaf(v[1], scale, bias[i % 2]));
        }
        const int token = c * 8 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
        store_transposed(staging + token * 128 + (piece ^ token % 8) * 16, r[0], r[1], r[2], r[3]);
      }
      named_sync(2 + group, 128);
#pragma unroll
      for (int i = 0; i < STAGING_TOKENS / 16; ++i) {
        const int token = i * 16 + thread / 8, piece = thread % 8;
        const uint4 v = load_16(staging + token * 128 + (piece ^ token % 8) * 16);
        const int row = rows + piece * 8, m = first_token + chunk * STAGING_TOKENS + token;
        if (m < a.m && row < a.n) {
          unsigned short* to = y + (size_t)m * a.n + row;
          if (is_aligned) {
            *(uint4*)to = v;
          } else {
            const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 8; ++e)
              if (row + e < a.n) to[e] = (unsigned short)(w[e / 2] >> e % 2 * 16);
          }
        }
      }
      named_sync(2 + group, 128);
    }
  }
}

// A stage of activations may be overwritten, by any thread block of the cluster.
template <class S>
__device__ __forceinline__ void release(u32 barrier, int lane) {
  if (lane < S::CLUSTER) {
    if constexpr (S::CLUSTER == 1)
      arrive(barrier);
    else
      arrive_at(barrier, lane);
  }
}

template <class S>
__device__ __forceinline__ void multiply(const Args& a, u32 base, u32 rank, int worker) {
  constexpr int TOKENS = S::TOKENS, BLOCKS = S::BLOCKS;
  const int group = threadIdx.x / 128 - 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  Ring<S::X_STAGES> x(base + S::BARRIERS_AT);
  Ring<S::W_STAGES> w(base + S::BARRIERS_AT + 2 * S::X_STAGES * 8);
  // Of the 16 rows of this warp in block b: tile (4 * (group * BLOCKS + b) + warp) / 2, half warp % 2 of it.
  const u32 in_stage = (2 * group * BLOCKS + warp / 2) * TILE_BYTES;
  const u32 codes_at = in_stage + warp % 2 * 512 + lane * 16;
  const u32 scales_at = in_stage + TILE_CODES + warp % 2 * 2 + lane / 4 * 32;

  for (int i = 0;; ++i) {
    const Part part = part_of(a.deal, worker, i);
    if (part.begin == part.end) break;
    float d[BLOCKS][TOKENS / 2];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int k = 0; k < TOKENS / 2; ++k) d[b][k] = 0.f;
    // Groups of four instructions: 64 rows and 64 columns. Between the halves of one, the next one is decoded.
    constexpr int GROUPS = 2 * BLOCKS;  // of a stage of weights
    u32 fragments[2][16];
    u32 done = 0;  // the stage of activations that the group before the last one reads
    Raw<S> raw;
    auto load_group = [&](int g) {
      const u32 stage = base + S::W_AT + w.stage * S::W_BYTES + g % BLOCKS * 2 * TILE_BYTES;
      raw.load(stage + codes_at + g / BLOCKS * 1024, stage + scales_at + g / BLOCKS * 4);
    };
    wait(w.full(), w.parity);
    load_group(0);
    raw.decode(fragments[0], 0);
    raw.decode(fragments[0] + 8, 1);

#pragma unroll 1
    for (int step = part.begin; step < part.end; ++step) {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        constexpr int LAST = GROUPS - 1;
        const int b = g % BLOCKS;
        u32(&now)[16] = fragments[g & 1], (&next)[16] = fragments[~g & 1];
        const bool has_next = g < LAST || step + 1 < part.end;
        if (g == LAST) {  // this stage of weights has been read
          __syncwarp();
          if (lane == 0) arrive(w.empty());
          w.next();
          if (has_next) wait(w.full(), w.parity);
        }
        if (has_next) load_group((g + 1) % GROUPS);
        if (b == 0) wait(x.full(), x.parity);
        const u64 operand = operand_of(base + x.stage * S::X_BYTES);
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 2 * half; j < 2 * half + 2; ++j)
            wgmma<TOKENS, S::TYPE == FP16>(d[b], now + 4 * j, operand + j * OPERAND_STEP);
          wgmma_commit();
          wgmma_wait<2>();  // the same half of the group before has read its fragments
          if (has_next) raw.decode(next + 8 * half, half);
        }
        if (b == 0) {  // all of the group before has read its activations
          if (done != 0) release<S>(done, lane);
          done = x.empty();
        }
        if (b == BLOCKS - 1) x.next();
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int k = 0; k < TOKENS / 2; ++k) asm volatile("" : "+f"(d[b][k])::"memory");  // not read before the wait
    release<S>(done, lane);

    if (i == 0) wait_for_earlier_kernels();  // they may still read what is written below
    if (part.begin > 0) {
      give_partials<S>(d, a);
    } else {
      if (part.end < a.deal.steps) take_partials<S>(d, a, worker, rank, part.tile);
      const Place place = place_of(part.tile, a.row_tiles, a.token_tiles, a.band);
      const int first_row = (place.row * S::CLUSTER + rank) * S::ROWS + group * 64 * BLOCKS;
      write_tile<S>(d, a, base + S::STAGING_AT + group * STAGING_BYTES, first_row, place.token * TOKENS, group);
    }
  }
}

}  // namespace

template <int BLOCKS, int TOKENS, int CLUSTER, int TYPE, int FORMAT, int X_STAGES, int W_STAGES>
__global__ void __launch_bounds__(THREADS, 1)
    linear_large(const __grid_constant__ TensorMap x, const __grid_constant__ Args a) {
  using S = Shape<BLOCKS, TOKENS, CLUSTER, TYPE, FORMAT, X_STAGES, W_STAGES>;
  static_assert(S::SHARED_BYTES <= 232448 && S::W_BYTES % 128 == 0);
  extern __shared__ unsigned char shared[];
  const u32 base = (shared_address(shared) + 1023) & ~1023u;  // the swizzle counts in atoms of 1,024 bytes
  const u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
  const int worker = blockIdx.x / CLUSTER, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 x_barriers = base + S::BARRIERS_AT, w_barriers = x_barriers + 2 * X_STAGES * 8;

  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i) {
      barrier_init(x_barriers + i * 8, 1);
      barrier_init(x_barriers + (X_STAGES + i) * 8, MULTIPLIERS / 32 * CLUSTER);
    }
    for (int i = 0; i < W_STAGES; ++i) {
      barrier_init(w_barriers + i * 8, 1);
      barrier_init(w_barriers + (W_STAGES + i) * 8, MULTIPLIERS / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_sync();
  let_later_kernels_begin();

  if (warp < COPIERS / 32) {
    give_registers<40>();
    if (warp == 0 && lane == 0) copy_activations<S>(x, a, base, rank, worker);
    if (warp == 1) copy_weights<S>(a, base, rank, worker, lane);
    __syncwarp();
  } else {
    take_registers<232>();
    multiply<S>(a, base, rank, worker);
  }
  // A thread block whose shared memory the other one still writes to or arrives at must not end.
  if constexpr (CLUSTER > 1) cluster_sync();
}

// Activations [m, k] with their columns in the order of the weights' fragments: of each 64, which are 4 x 8 pairs,
// the transpose. out[m, padded_k], zeros beyond k. A thread 16 bytes of `out`. Also clears the flags of the product.
extern "C" __global__ void __launch_bounds__(256)
    order_activations(const u32* __restrict__ x, long long stride, u32* __restrict__ out, int m, int k, int padded_k,
                      u32* __restrict__ flags, int num_flags) {
  wait_for_earlier_kernels();
  let_later_kernels_begin();
  const int pieces = padded_k / 8;
  const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  if (i < num_flags) flags[i] = 0;
  const int row = (int)(i / pieces), piece = (int)(i % pieces);
  if (row >= m) return;
  const int pair = piece / 8 * 32 + piece % 8;
  const u32* from = x + row * (stride / 2);
  u32 v[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) v[t] = pair + 8 * t < k / 2 ? __ldg(from + pair + 8 * t) : 0;
  ((uint4*)out)[i] = make_uint4(v[0], v[1], v[2], v[3]);
}
