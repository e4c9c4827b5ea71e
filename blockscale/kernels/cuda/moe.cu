// A few tokens through experts in four bits: products bound by the bytes of the experts that were chosen.
//
// Three uses of one kernel (MODE), and a sum:
//   GATED    h[pair] = act(gate, up) of x[token of the pair], for every pair (token, choice)
//   DOWN     part[pair] = h[pair] times the expert's down weight, fp32; `combine` then sums each token's pairs
//   TOKEN    y[token] at once: a block takes all experts of a token, its warps share them out. For a few tokens,
//            whose experts seldom coincide: no sum is left over, no other launch
//
// WORK. Each block finds the experts that were chosen from topk_ids itself (no launch for sorting, nothing read back)
// and takes an even, contiguous share of the items (8 rows of an expert, row tile), so that it seldom changes the expert
// and with it the activations in its shared memory. Experts without tokens are no items.
//
// WEIGHTS go from row-major memory to registers: a lane owns 32 consecutive columns (16 bytes) of each of its rows per
// step of 128 columns, so that four lanes read 64 bytes of a row. All of a warp's bytes of an item are asked for at
// once, before the previous item is summed and stored. The order of K within a product is free, so the columns of a
// lane become operands without any exchange; activations lie in shared memory in the same order.
//
// PRODUCTS. Weights are the 16-row operand, up to 8 rows of activations the 8-column one. More rows of one expert are
// items of their own, which find the weights in L2. Warps share out K; their sums meet in shared memory and are added
// in a fixed order, as are the choices of a token: the result depends on the operands alone.
//
// PROGRAMMATIC LAUNCH. GATED waits for the kernel ahead before it reads anything and only then lets the next one start.
// So when DOWN or TOKEN starts, all that was written before GATED is there: topk_ids. They read these and ask for
// weights while GATED still works, and wait before they read h.
#include "moe_decode.cuh"
#if defined(__CUDACC__)
#include "pipeline.cuh"

DEVICE uint4 load_once(const uint4* p) {  // not to be kept in L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
template <typename T>
DEVICE u32 load_cached(const T* p) {
  return __ldg(p);
}
DEVICE char* dynamic_shared_memory() {
  extern __shared__ uint4 memory[];
  return (char*)memory;
}
DEVICE float exponential(float v) { return __expf(v); }
#endif

enum { GATED = 0, DOWN = 1, TOKEN = 2 };
constexpr int MAX_COLUMNS = 8;    // rows of activations that one product takes
constexpr int MAX_PARTS = 256;    // of 8 rows, that an expert may have
constexpr int ZERO_BYTES = 2048;  // what lanes without a row read: as many steps as a warp has, at most 8

struct Arguments {
  const u8* packed;           // [E, rows, K/2]
  const u8* scale;            // [E, rows, K/16] or [E, rows, K/32]
  const float* global_scale;  // [E, scales]
  const void* bias;           // [E, rows] or null
  const void* x;              // GATED: [T, K], rows `stride` apart; else h [T * top_k, K]
  const void* ids;            // [T, top_k]
  const float* weights;       // [T, top_k]
  void* out;                  // GATED: h [T * top_k, N]; DOWN: part fp32 [T * top_k, N]; TOKEN: y [T, N]
  long long stride;
  int num_tokens, top_k, num_experts, n, k, scales;
  int is_id_64, is_bias_fp32, is_interleaved, num_sms;
  float alpha, beta, limit;
};

DEVICE int expert_of(const Arguments& a, int pair) {  // -1: none
  const long long id = a.is_id_64 ? ((const long long*)a.ids)[pair] : (long long)((const int*)a.ids)[pair];
  return id >= 0 && id < a.num_experts ? (int)id : -1;
}

template <int TYPE>
DEVICE float bias_of(const Arguments& a, long long index) {
  if (a.bias == nullptr) return 0.0f;
  return a.is_bias_fp32 ? ((const float*)a.bias)[index] : from_half_bits<TYPE>(((const u16*)a.bias)[index]);
}

// NaN passes through: comparisons with it are false.
DEVICE float gated(const Arguments& a, float gate, float up) {
  gate = gate > a.limit ? a.limit : gate;
  up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
  return gate / (1.0f + exponential(-a.alpha * gate)) * (up + a.beta);
}

// Shared memory of a block, in the order of its parts; the launcher computes the same sum.
struct Shared {
  float* sums;   // [2][WK][WR * R][128]
  char* zero;    // ZERO_BYTES of zeros
  char* x;       // [rows][x_stride]
  int* ids;      // [pairs]
  int* count;    // [experts]: rows of each
  int* active;   // [pairs]: groups, expert * MAX_PARTS + which 8 of its rows; TOKEN: unused
  int* rows;     // [2][8]: pairs of the rows in x
  int* num;      // [2]: how many; then the number of groups
};

// Which experts have rows, from the choices of all tokens. Ends in a barrier.
DEVICE void find_active(const Arguments& a, const Shared& s, int num_pairs, int threads) {
  const int thread = threadIdx.x, lane = thread & 31;
  if (num_pairs <= 32) {  // one warp sees them all at once
    if (thread < 32) {
      const int expert = lane < num_pairs ? expert_of(a, lane) : -1;
      if (lane < num_pairs) s.ids[lane] = expert;
      const u32 same = __match_any_sync(~0u, expert);
      const bool first = expert >= 0 && (same & ((1u << lane) - 1)) == 0;
      const u32 firsts = __ballot_sync(~0u, first);
      int parts = first ? (__popc(same) + MAX_COLUMNS - 1) / MAX_COLUMNS : 0, place = 0, total = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {  // 32 pairs are 4 parts of an expert at most
        const u32 mask = __ballot_sync(~0u, parts > i);
        place += __popc(mask & ((1u << lane) - 1));
        total += __popc(mask);
      }
      for (int i = 0; i < parts; i++) s.active[place + i] = expert * MAX_PARTS + i;
      if (lane == 0) s.num[2] = total;
    }
    __syncthreads();
    return;
  }
  for (int e = thread; e < a.num_experts; e += threads) s.count[e] = 0;
  __syncthreads();
  for (int p = thread; p < num_pairs; p += threads) {
    const int expert = expert_of(a, p);
    s.ids[p] = expert;
    if (expert >= 0) atomicAdd(&s.count[expert], 1);
  }
  __syncthreads();
  if (thread < 32) {
    int found = 0;
    for (int e = lane; e - lane < a.num_experts; e += 32) {
      const int parts = e < a.num_experts ? (s.count[e] + MAX_COLUMNS - 1) / MAX_COLUMNS : 0;
      u32 more = __ballot_sync(~0u, parts > 0);
      for (int i = 0; more != 0; i++) {  // seldom more than one
        if (parts > i) s.active[found + __popc(more & ((1u << lane) - 1))] = e * MAX_PARTS + i;
        found += __popc(more);
        more = __ballot_sync(~0u, parts > i + 1);
      }
    }
    if (lane == 0) s.num[2] = found;
  }
  __syncthreads();
}

// The pairs of rows [begin, begin + 8) of an expert, in their order, by one warp.
DEVICE void list_rows(const Shared& s, int expert, int begin, int num_pairs, int parity) {
  const int lane = threadIdx.x & 31;
  int seen = 0;
  for (int p = lane; p - lane < num_pairs && seen < begin + MAX_COLUMNS; p += 32) {
    const bool mine = p < num_pairs && s.ids[p] == expert;
    const u32 mask = __ballot_sync(~0u, mine);
    const int rank = seen + __popc(mask & ((1u << lane) - 1)) - begin;
    if (mine && rank >= 0 && rank < MAX_COLUMNS) s.rows[parity * MAX_COLUMNS + rank] = p;
    seen += __popc(mask);
  }
  if (lane == 0) s.num[parity] = seen - begin < MAX_COLUMNS ? seen - begin : MAX_COLUMNS;
}

// R   row blocks of 16 a warp (GATED: of gate and up in turn)     S   steps of 128 columns a warp and round
// WK  warps along K                                               WR  groups of warps along rows
// BLOCKS  blocks an SM holds at least
template <int TYPE, int FORMAT, int MODE, int R, int S, int WK, int WR, int BLOCKS>
__global__ void __launch_bounds__(WK* WR * 32, BLOCKS) experts(const __grid_constant__ Arguments a) {
  constexpr int THREADS = WK * WR * 32, TILE = MODE == GATED ? 8 * R * WR : 16 * R * WR;
  constexpr int GROUP = FORMAT == NVFP4 ? 16 : 32, SUMS = WK * WR * R * 128;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int wk = warp % WK, wr = warp / WK, num_pairs = a.num_tokens * a.top_k;
  const int steps = (a.k + 127) / 128, slices_each = (steps + S - 1) / S;
  const int slices = MODE == TOKEN ? slices_each * a.top_k : slices_each, rounds = (slices + WK - 1) / WK;
  const int num_tiles = (a.n + TILE - 1) / TILE, weight_rows = MODE == GATED ? 2 * a.n : a.n;
  const int x_stride = slices_each * S * 256 + 64, x_rows = MODE == TOKEN ? a.top_k : min(num_pairs, MAX_COLUMNS);

  Shared s;
  char* const memory = dynamic_shared_memory();
  s.sums = (float*)memory;
  s.zero = (char*)(s.sums + 2 * SUMS);
  s.x = s.zero + ZERO_BYTES;
  s.ids = (int*)(s.x + x_rows * x_stride);
  s.count = s.ids + num_pairs;
  s.active = s.count + a.num_experts;
  s.rows = s.active + num_pairs;
  s.num = s.rows + 2 * MAX_COLUMNS;

  if (MODE == GATED) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }
  for (int i = thread; i < ZERO_BYTES / 16; i += THREADS) ((uint4*)s.zero)[i] = make_uint4(0, 0, 0, 0);
  // A piece of a row of activations into shared memory, in the order of the weights; zeros past K and for no row.
  const int pieces = slices_each * S * 16;
  auto stage = [&](int row, int piece, const u16* from, bool is_row) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (is_row && piece * 8 < a.k) v = *(const uint4*)(from + piece * 8);
    *(uint4*)(s.x + row * x_stride + piece / 16 * 256 + piece % 4 * 64 + piece / 4 % 4 * 16) = natural_order(v);
  };
  const int is_x_there = MODE == GATED && a.num_tokens == 1;  // one token is the first row of all its experts
  if (is_x_there)
    for (int i = thread; i < pieces; i += THREADS) stage(0, i, (const u16*)a.x, true);
  if (MODE == TOKEN) {
    for (int p = thread; p < num_pairs; p += THREADS) s.ids[p] = expert_of(a, p);
    __syncthreads();
  } else {
    find_active(a, s, num_pairs, THREADS);
  }

  // Blocks of one SM take neighbouring shares, so that SMs differ by one item at most.
  const int items = (MODE == TOKEN ? a.num_tokens : s.num[2]) * num_tiles;
  const int per_sm = (gridDim.x + a.num_sms - 1) / a.num_sms;
  const int full = gridDim.x - (per_sm - 1) * a.num_sms;  // SMs with `per_sm` blocks
  const int sm = blockIdx.x % a.num_sms, layer = blockIdx.x / a.num_sms;
  const int share = sm * per_sm + layer - max(0, sm - full);
  const int begin = (int)((long long)items * share / gridDim.x);
  const int end = (int)((long long)items * (share + 1) / gridDim.x);

  uint4 codes[R][S][2];
  u32 scales[R][S][2];
  float factor = 0.0f, factor_up = 0.0f;  // of the weights in registers
  bool is_used = false;                   // this warp has a slice

  // Where the lane's rows lie in an item's tile, in rows of the weight; a tile that reaches past N reads row N - 1.
  const bool is_even = a.k % 128 == 0;
  const int row_step = MODE == GATED && a.is_interleaved ? 2 : 1, up_rows = a.is_interleaved ? 1 : a.n;
  const int lane_row = (MODE == GATED ? wr * (R / 2) : wr * R) * 16 + g;
  const long long code_pitch = a.k / 2, scale_pitch = a.k / GROUP;

  // The weights of a round into registers. `group`: an active group, or a token.
  auto load = [&](int group, int tile, int round) {
    const int slice = round * WK + wk, choice = MODE == TOKEN ? slice / slices_each : 0;
    const int step = (slice - choice * slices_each) * S;
    int expert = -1;
    if (slice < slices) expert = MODE == TOKEN ? s.ids[group * a.top_k + choice] : s.active[group] / MAX_PARTS;
    is_used = expert >= 0;
    if (!is_used) return;
    const long long first = (long long)expert * weight_rows;
    const int lane_k = step * 128 + t * 32, top = tile * TILE + lane_row;
    const bool is_inside = tile * TILE + TILE <= a.n, is_whole = is_even && step + S <= steps;
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int n = top + (MODE == GATED ? r / 2 : r) * 16 + 8 * h;
        if (!is_inside) n = min(n, a.n - 1);
        const long long row = first + n * row_step + (MODE == GATED && r % 2 ? up_rows : 0);
        const u8* const codes_at = a.packed + row * code_pitch + lane_k / 2;
        const u8* const scales_at = a.scale + row * scale_pitch + lane_k / GROUP;
#pragma unroll
        for (int i = 0; i < S; i++) {
          if (is_whole || lane_k + i * 128 < a.k) {
            codes[r][i][h] = load_once((const uint4*)(codes_at + i * 64));
            const u8* const at = scales_at + i * (128 / GROUP);
            scales[r][i][h] = FORMAT == NVFP4 ? load_cached((const u16*)at) : load_cached(at);
          } else {
            codes[r][i][h] = make_uint4(0, 0, 0, 0);
            scales[r][i][h] = 0;
          }
        }
      }
    }
    factor = a.global_scale[expert * a.scales] * natural_factor<TYPE, FORMAT>();
    if (MODE == GATED) factor_up = a.global_scale[expert * a.scales + a.scales - 1] * natural_factor<TYPE, FORMAT>();
    if (MODE == TOKEN) factor *= a.weights[group * a.top_k + choice];
  };

  float sums[R][2][4];
  auto multiply = [&](const char* x) {  // x: the lane's activations at the slice's first step
#pragma unroll
    for (int i = 0; i < S; i++) {
      u32 pairs_of_scales[R][2][2];
#pragma unroll
      for (int r = 0; r < R; r++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (FORMAT == NVFP4) natural_scales<TYPE>(scales[r][i][h], pairs_of_scales[r][h]);
          else natural_mx_factors<TYPE>(scales[r][i][h], pairs_of_scales[r][h][0], pairs_of_scales[r][h][1]);
        }
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const uint4 b = *(const uint4*)(x + i * 256 + w * 64);
#pragma unroll
        for (int r = 0; r < R; r++) {
          u32 p[2][4];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint4 q = codes[r][i][h];
            natural_codes<TYPE>(w == 0 ? q.x : w == 1 ? q.y : w == 2 ? q.z : q.w, p[h]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
              p[h][e] = multiply_pair<TYPE>(p[h][e], pairs_of_scales[r][h][FORMAT == NVFP4 ? w / 2 : 0]);
              if (FORMAT == MXFP4) p[h][e] = multiply_pair<TYPE>(p[h][e], pairs_of_scales[r][h][1]);
            }
          }
          multiply_16x8x16<TYPE>(sums[r][0], p[0][0], p[1][0], p[0][1], p[1][1], b.x, b.y);
          multiply_16x8x16<TYPE>(sums[r][1], p[0][2], p[1][2], p[0][3], p[1][3], b.z, b.w);
        }
      }
    }
  };

  int group = begin / num_tiles, tile = begin % num_tiles;
  if (begin < end) load(group, tile, 0);
  if (MODE != GATED) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }

  int staged = -1, x_parity = 0, parity = 0;
  for (int item = begin; item < end; item++) {
    const int next_tile = tile + 1 < num_tiles ? tile + 1 : 0, next_group = next_tile ? group : group + 1;
    if (group != staged) {
      // Nobody reads s.x: all have passed the barrier before the last item's output.
      x_parity ^= 1;
      if (MODE == TOKEN) {
        if (thread == 0) s.num[x_parity] = a.top_k;
      } else if (warp == 0) {
        list_rows(s, s.active[group] / MAX_PARTS, s.active[group] % MAX_PARTS * MAX_COLUMNS, num_pairs, x_parity);
      }
      __syncthreads();
      const int end_piece = s.num[x_parity] * pieces;
      for (int i = thread + is_x_there * pieces; i < end_piece; i += THREADS) {  // loads of several rows at a time
        const int row = i / pieces;
        const int pair = MODE == TOKEN ? group * a.top_k + row : s.rows[x_parity * MAX_COLUMNS + row];
        const long long offset = MODE == GATED ? pair / a.top_k * a.stride : (long long)pair * a.k;
        stage(row, i - row * pieces, (const u16*)a.x + offset, MODE != TOKEN || s.ids[pair] >= 0);
      }
      __syncthreads();
      staged = group;
    }
    const int num_rows = s.num[x_parity];
    float total[R][4];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[r][e] = sums[r][0][e] = sums[r][1][e] = 0.0f;
    for (int round = 0; round < rounds; round++) {
      if (is_used) {
        const int slice = round * WK + wk, choice = MODE == TOKEN ? slice / slices_each : 0;
        const int row = MODE == TOKEN ? (g == 0 ? choice : -1) : (g < num_rows ? g : -1);
        const int step = (slice - choice * slices_each) * S;
        multiply((row < 0 ? s.zero : s.x + row * x_stride + step * 256) + t * 16);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            total[r][e] += (sums[r][0][e] + sums[r][1][e]) * (MODE == GATED && r % 2 ? factor_up : factor);
            sums[r][0][e] = sums[r][1][e] = 0.0f;
          }
      }
      // The next bytes are on their way while this item is finished.
      const bool is_last = round + 1 == rounds;
      if (!is_last || item + 1 < end)
        load(is_last ? next_group : group, is_last ? next_tile : tile, is_last ? 0 : round + 1);
    }
    parity ^= 1;  // so that one barrier an item is enough
    float* const mine = s.sums + parity * SUMS;
#pragma unroll
    for (int r = 0; r < R; r++)
      ((float4*)mine)[((wk * WR + wr) * R + r) * 32 + lane] =
          make_float4(total[r][0], total[r][1], total[r][2], total[r][3]);
    __syncthreads();

    // One output a thread: element `at` of a row block's 16 x 8.
    for (int i = thread; i < TILE * MAX_COLUMNS; i += THREADS) {
      const int block = i / 128, at = i % 128, column = 2 * (at / 4 % 4) + at % 2;
      const int n = tile * TILE + block * 16 + at / 16 + at / 2 % 2 * 8;
      if (column >= (MODE == TOKEN ? 1 : num_rows) || n >= a.n) continue;
      const float* const here = mine + (MODE == GATED ? 2 * block : block) * 128 + at;
      float sum = 0.0f, sum_up = 0.0f;
#pragma unroll
      for (int w = 0; w < WK; w++) {
        sum += here[w * WR * R * 128];
        if (MODE == GATED) sum_up += here[(w * WR * R + 1) * 128];
      }
      if (MODE == TOKEN) {
        for (int c = 0; c < a.top_k && a.bias != nullptr; c++) {
          const int chosen = s.ids[group * a.top_k + c];
          if (chosen >= 0) sum += a.weights[group * a.top_k + c] * bias_of<TYPE>(a, (long long)chosen * a.n + n);
        }
        ((u16*)a.out)[(long long)group * a.n + n] = to_half_bits<TYPE>(sum);
        continue;
      }
      const long long row = s.rows[x_parity * MAX_COLUMNS + column];
      const long long first = (long long)(s.active[group] / MAX_PARTS) * weight_rows;
      if (MODE == DOWN) {
        ((float*)a.out)[row * a.n + n] = sum + bias_of<TYPE>(a, first + n);
      } else {
        sum += bias_of<TYPE>(a, first + (a.is_interleaved ? 2 * n : n));
        sum_up += bias_of<TYPE>(a, first + (a.is_interleaved ? 2 * n + 1 : n + a.n));
        ((u16*)a.out)[row * a.n + n] = to_half_bits<TYPE>(gated(a, sum, sum_up));
      }
    }
    group = next_group;
    tile = next_tile;
  }
}

// y[t] = sum over the choices of t, in their order, of weights * part; `x` is part. Four columns a thread.
template <int TYPE>
__global__ void __launch_bounds__(128) combine(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int token = blockIdx.x, n = (blockIdx.y * 128 + threadIdx.x) * 4;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int c = 0; c < a.top_k; c++) {
    const int pair = token * a.top_k + c;
    if (expert_of(a, pair) < 0) continue;
    const float weight = a.weights[pair];
    const float* const part = (const float*)a.x + (long long)pair * a.n + n;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (n + i < a.n) sums[i] += weight * part[i];
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (n + i < a.n) ((u16*)a.out)[(long long)token * a.n + n + i] = to_half_bits<TYPE>(sums[i]);
}
