// y[M, N] = x[M, K] * W[N, K]^T * global_scale + bias for small M, bound by reading W: sm_90.
//
// WORK. A tile is ROW_BLOCKS * WARP_ROWS row blocks of 16 weight rows times (a part of) K. Blocks take tiles in turn
//   (persistent). In a block, COMPUTE warps form WARP_ROWS groups; a group owns ROW_BLOCKS row blocks, its warps split K.
// WEIGHTS. Each compute warp has a private ring of SLOTS slots with an mbarrier each, refilled by its lane 0 soon after
//   the warp holds the slot in registers: no barrier of the block inside the main loop. A slot is ROW_UNITS x
//   COLUMN_UNITS units of 32 rows x 128 columns (the tiles of layouts.py, 2304 contiguous bytes).
// ACTIVATIONS. The block's part of x lies in shared memory for good, brought by bulk copies in chunks of K with a
//   barrier each, queued ahead of most of the weights. Rows are 16 bytes apart modulo 128: loads meet no bank twice.
// MATRIX INSTRUCTIONS. Weights are the 16-row operand, so that M <= 8 costs one instruction per 16 x 16 weights.
// SUMS. Warps leave their sums in shared memory; separate epilogue warps add them, so that compute warps go straight on
//   to the next tile. K may be split over blocks too (`split`): over those of a cluster, whose partial sums travel
//   through distributed shared memory, or over any number of blocks through a workspace, where the last to arrive adds
//   all in fixed order. Sums never depend on timing.
// CLUSTERS without a split share x: each block brings some of its rows and multicasts them.
// GRID. blockIdx.x is the part of K, blockIdx.y the first tile; clusters lie along x if they split K, else along y.
// PROGRAMMATIC LAUNCH. With `is_programmatic` all slots are filled before waiting for the kernel ahead.
#include "pipeline.cuh"

struct Arguments {
  const u8* weight;       // [N'/32][K'/128][2304]
  const u8* x;            // rows of K 16-bit floats, row_bytes apart
  u16* y;                 // [M, N]
  const void* bias;       // [N] or null
  float4* workspace;      // [tiles][EPILOGUE][split][...] partial sums, if the workspace is used
  u32* arrived;           // [tiles][EPILOGUE], zero before and after
  const float* global_scale;
  u64 row_bytes;
  int m, n, k;                          // 8 * (COLUMN_BLOCKS - 1) < m <= 8 * COLUMN_BLOCKS
  int num_row_units, num_column_units;  // N'/32, K'/128: the latter a multiple of COLUMN_UNITS
  int num_tiles, tiles_per_block;       // the latter rounded up
  int steps_per_part, longer_parts;     // slots of K: the first `longer_parts` parts have one more
  int split, cluster;                   // blocks that share a tile's K, blocks of a cluster
  int is_programmatic, is_bias_fp32;
  u32 zero;                             // 0, which the compiler does not know
};

constexpr int UNIT_BYTES = 2304, UNIT_CODE_BYTES = 2048, UNIT_COLUMNS = 128, LANE_BLOCK_BYTES = 512;
constexpr int X_BARRIERS = 16;  // chunks of x with a barrier of their own; later chunks share the last one

// Both sizes below are computed by linear_small.py, too.
template <int ROW_UNITS, int COLUMN_UNITS, int COLUMN_BLOCKS, int COMPUTE, int SLOTS, int WARP_ROWS>
struct Plan {
  static constexpr int ROW_BLOCKS = 2 * ROW_UNITS;
  static constexpr int TILE_BLOCKS = ROW_BLOCKS * WARP_ROWS;            // row blocks of a tile
  static constexpr int EPILOGUE = TILE_BLOCKS < 4 ? TILE_BLOCKS : 4;    // epilogue warps
  static constexpr int OWN_BLOCKS = TILE_BLOCKS / EPILOGUE;             // row blocks an epilogue warp finishes
  static constexpr int THREADS = (COMPUTE + EPILOGUE) * 32;
  static constexpr int K_WARPS = COMPUTE / WARP_ROWS;                   // warps of a group, which split K
  static constexpr int SLOT_BYTES = ROW_UNITS * COLUMN_UNITS * UNIT_BYTES;
  static constexpr int RING_BYTES = COMPUTE * SLOTS * SLOT_BYTES;
  static constexpr int SUM_BYTES = K_WARPS * TILE_BLOCKS * COLUMN_BLOCKS * LANE_BLOCK_BYTES;
  static constexpr int SLOT_X_BYTES = COLUMN_UNITS * UNIT_COLUMNS * 2;  // of a row of x
  static constexpr int ZERO_BYTES = 512;                                // read by lanes whose row of x does not exist
  // Independent chains of matrix instructions hide their latency where there are few accumulators.
  static constexpr int CHAINS = ROW_BLOCKS * COLUMN_BLOCKS <= 2 ? 4 : ROW_BLOCKS * COLUMN_BLOCKS == 4 && ROW_BLOCKS < 4 ? 2 : 1;
};

// One unit row block of a slot held in registers, times all of x: 16 rows x 64 columns, four matrix instructions.
template <int TYPE, int FORMAT, int COLUMN_BLOCKS, int CHAINS>
DEVICE void multiply_subtile(const uint4& codes, const u32 (&scales)[2], int scale_index,
                             const uint4 (&x)[COLUMN_BLOCKS][2], u32 zero, float (&sums)[CHAINS][COLUMN_BLOCKS][4]) {
  u32 top, top_other = 0, bottom, bottom_other = 0;  // scales of row g and of row g + 8
  if constexpr (FORMAT == NVFP4) {
    top = nvfp4_scale_pair<TYPE>(scales[0], scale_index);
    bottom = nvfp4_scale_pair<TYPE>(scales[0], scale_index + 1);
  } else {
    mxfp4_factor_pairs<TYPE>(scales[0], scales[1], scale_index, top, top_other);
    mxfp4_factor_pairs<TYPE>(scales[0], scales[1], scale_index + 1, bottom, bottom_other);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 a[4], b[4];
    decode_word<TYPE, FORMAT>(half ? codes.y : codes.x, top, top_other, a, 64 + zero, 16 + zero);
    decode_word<TYPE, FORMAT>(half ? codes.w : codes.z, bottom, bottom_other, b, 64 + zero, 16 + zero);
#pragma unroll
    for (int i = 0; i < COLUMN_BLOCKS; i++) {
      multiply_16x8x16<TYPE>(sums[half * 2 % CHAINS][i], a[0], b[0], a[1], b[1], x[i][half].x, x[i][half].y);
      multiply_16x8x16<TYPE>(sums[(half * 2 + 1) % CHAINS][i], a[2], b[2], a[3], b[3], x[i][half].z, x[i][half].w);
    }
  }
}

template <int TYPE, int FORMAT, int ROW_UNITS, int COLUMN_UNITS, int COLUMN_BLOCKS, int COMPUTE, int SLOTS,
          int WARP_ROWS, int BLOCKS_PER_SM>
__global__ void __launch_bounds__(Plan<ROW_UNITS, COLUMN_UNITS, COLUMN_BLOCKS, COMPUTE, SLOTS, WARP_ROWS>::THREADS,
                                  BLOCKS_PER_SM)
    linear_small(const __grid_constant__ Arguments args) {
  using P = Plan<ROW_UNITS, COLUMN_UNITS, COLUMN_BLOCKS, COMPUTE, SLOTS, WARP_ROWS>;
  constexpr int CHAINS = P::CHAINS, K_WARPS = P::K_WARPS;
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane >> 2, t = lane & 3;

  // This block's part of K, in steps of a slot, and its tiles: first, first + stride, ...
  const int part = blockIdx.x, first_tile = blockIdx.y, tile_stride = gridDim.y, num_tiles = args.num_tiles;
  const int own_steps = args.steps_per_part + (part < args.longer_parts);
  const int step_begin = part * args.steps_per_part + min(part, args.longer_parts), step_end = step_begin + own_steps;
  const bool is_shared_x = args.cluster > 1 && args.split == 1, is_cluster_split = args.cluster > 1 && args.split > 1;

  // Shared memory: rings | sums of the warps | zeros | barriers | x | sums of the other block of the cluster
  float4* sums = (float4*)(shared + P::RING_BYTES);  // [K_WARPS][TILE_BLOCKS][COLUMN_BLOCKS][32]
  u8* zeros = shared + P::RING_BYTES + P::SUM_BYTES;
  u64* barriers = (u64*)(zeros + P::ZERO_BYTES);
  const u32 x_barrier = shared_address(barriers + COMPUTE * SLOTS);
  const int num_receive_barriers = is_cluster_split ? args.tiles_per_block * P::EPILOGUE : 0;
  u8* x_rows = (u8*)(barriers + ((COMPUTE * SLOTS + X_BARRIERS + num_receive_barriers + 15) & ~15));
  // The same in every block: blocks of a cluster reach into each other's memory behind x.
  const int x_stride = (args.steps_per_part + (args.longer_parts > 0)) * P::SLOT_X_BYTES + 16;
  const int x_begin = step_begin * P::SLOT_X_BYTES;                      // byte of a row of x
  const int x_bytes = min(own_steps * P::SLOT_X_BYTES, args.k * 2 - x_begin);  // of it that exist
  float4* received = (float4*)(x_rows + args.m * x_stride);
  const int chunk_bytes = K_WARPS * P::SLOT_X_BYTES;                     // of x: one step of each warp
  const int num_chunks = (x_bytes + chunk_bytes - 1) / chunk_bytes;
  allow_next_kernel();

  if (warp < COMPUTE) {
    const u32 ring = shared_address(shared) + warp * SLOTS * P::SLOT_BYTES;
    const u32 ring_barrier = shared_address(barriers) + warp * SLOTS * 8;
    const u64 policy = read_once_policy();
    const int group = warp / K_WARPS, k_warp = warp % K_WARPS;
    // What to fetch next: a step of a tile. Lane 0 does the fetching.
    int next_step = step_begin + k_warp, next_tile = next_step < step_end ? first_tile : num_tiles;
    // `nothing` is 0 made from what was read of the slot last. A refill must not be on its way before all reads of the
    // slot have returned: stores of other warps can hold up reads for longer than a copy takes. With
    // more than one slot it is sent after the first columns are multiplied, when nobody has to wait for that any more.
    auto fetch = [&](int slot, u32 nothing) {
      if (next_tile >= num_tiles) return;
      if (lane == 0) {
        barrier_expect(ring_barrier + slot * 8, P::SLOT_BYTES);
#pragma unroll
        for (int r = 0; r < ROW_UNITS; r++) {
          // Row units past the end are read as the last one; their rows are not stored.
          const int row = min((next_tile * WARP_ROWS + group) * ROW_UNITS + r, args.num_row_units - 1);
          const u32 unit = row * args.num_column_units + next_step * COLUMN_UNITS + nothing;
          constexpr int BYTES = COLUMN_UNITS * UNIT_BYTES;
          copy_bulk_streaming(ring + slot * P::SLOT_BYTES + r * BYTES, args.weight + (u64)unit * UNIT_BYTES, BYTES,
                              ring_barrier + slot * 8, policy);
        }
      }
      next_step += K_WARPS;
      if (next_step >= step_end) {
        next_step = step_begin + k_warp;
        next_tile += tile_stride;
      }
    };
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < SLOTS; i++) barrier_init(ring_barrier + i * 8, 1);
      barrier_init_fence();
    }
    // In an ordinary launch x goes into the queue of copies after the first slot, not after all of them.
    const int early = args.is_programmatic ? SLOTS : 1;
#pragma unroll 1
    for (int i = 0; i < early; i++) fetch(i, 0);
    // What lies beyond K in the rows of x is zero: weights there are padding, and 0 * NaN would be NaN.
    if (threadIdx.x < P::ZERO_BYTES / 16) ((uint4*)zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    if (x_bytes < own_steps * P::SLOT_X_BYTES) {
#pragma unroll 1
      for (int row = warp; row < args.m; row += COMPUTE)
#pragma unroll 1
        for (int i = x_bytes + lane * 16; i < own_steps * P::SLOT_X_BYTES; i += 512)
          *(uint4*)(x_rows + row * x_stride + i) = make_uint4(0, 0, 0, 0);
    }
    if (args.cluster > 1) cluster_arrive();
    if (is_shared_x) cluster_wait();
    else __syncthreads();
#pragma unroll 1
    for (int i = early; i < SLOTS; i++) fetch(i, 0);

    // Where this lane finds its row of x in each block of 8 rows: only in the last block may there be none.
    const int last_row = (COLUMN_BLOCKS - 1) * 8 + g;
    const bool has_last = last_row < args.m;
    const u32 x_first = shared_address(x_rows) + g * x_stride + t * 32;
    const u32 x_last = has_last ? shared_address(x_rows) + last_row * x_stride + t * 32 : shared_address(zeros) + t * 32;
    const int last_step_bytes = has_last ? P::SLOT_X_BYTES : 0;
    int slot = 0;
    u32 phase = 0;
#pragma unroll 1
    for (int tile = first_tile; tile < num_tiles; tile += tile_stride) {
      float accumulators[P::ROW_BLOCKS][CHAINS][COLUMN_BLOCKS][4] = {};
      int chunk = 0;
#pragma unroll 1
      for (int step = step_begin + k_warp; step < step_end; step += K_WARPS, chunk++) {
        if (tile == first_tile) barrier_wait(x_barrier + min(chunk, X_BARRIERS - 1) * 8, 0);
        barrier_wait(ring_barrier + slot * 8, phase);
        const u32 units = ring + slot * P::SLOT_BYTES;
        uint4 codes[ROW_UNITS * COLUMN_UNITS][4];
        u32 scales[ROW_UNITS * COLUMN_UNITS][2][2];  // [column half of the unit][MXFP4: even, odd block]
#pragma unroll
        for (int u = 0; u < ROW_UNITS * COLUMN_UNITS; u++) {
#pragma unroll
          for (int i = 0; i < 4; i++) codes[u][i] = load_shared_16(units + u * UNIT_BYTES + i * 512 + lane * 16);
          const u32 at = units + u * UNIT_BYTES + UNIT_CODE_BYTES;
          if constexpr (FORMAT == NVFP4) {
            const uint2 v = load_shared_8(at + lane * 8);
            scales[u][0][0] = v.x, scales[u][1][0] = v.y;
          } else {
            const uint4 v = load_shared_16(at + (lane & ~1) * 8);
            scales[u][0][0] = v.x, scales[u][1][0] = v.y, scales[u][0][1] = v.z, scales[u][1][1] = v.w;
          }
        }
        __syncwarp();
        const u32 nothing = codes[ROW_UNITS * COLUMN_UNITS - 1][3].w & args.zero;
        if (SLOTS == 1) fetch(slot, nothing);  // the ring is empty: waiting for the reads costs less than a late refill

        const u32 x_here = x_first + (step - step_begin) * P::SLOT_X_BYTES;
        const u32 x_last_here = x_last + (step - step_begin) * last_step_bytes;
#pragma unroll
        for (int c = 0; c < COLUMN_UNITS; c++) {
#pragma unroll
          for (int kt = 0; kt < 2; kt++) {
            uint4 x[COLUMN_BLOCKS][2];
#pragma unroll
            for (int i = 0; i < COLUMN_BLOCKS; i++) {
              const u32 row = i == COLUMN_BLOCKS - 1 ? x_last_here : x_here + i * 8 * x_stride;
              x[i][0] = load_shared_16(row + (c * 2 + kt) * 128);
              x[i][1] = load_shared_16(row + (c * 2 + kt) * 128 + 16);
            }
#pragma unroll
            for (int r = 0; r < P::ROW_BLOCKS; r++) {
              const int u = r / 2 * COLUMN_UNITS + c;
              multiply_subtile<TYPE, FORMAT>(codes[u][kt * 2 + r % 2], scales[u][kt], r % 2 * 2, x, args.zero,
                                                      accumulators[r]);
            }
            if (SLOTS > 1 && c == 0 && kt == 0) fetch(slot, nothing);
          }
        }
        if (++slot == SLOTS) slot = 0, phase ^= 1;
      }
      if (tile != first_tile) named_wait(2, P::THREADS);  // the epilogue has read the sums of the tile before
#pragma unroll
      for (int r = 0; r < P::ROW_BLOCKS; r++)
#pragma unroll
        for (int i = 0; i < COLUMN_BLOCKS; i++) {
          const float(&first)[4] = accumulators[r][0][i];
          float4 v = make_float4(first[0], first[1], first[2], first[3]);
#pragma unroll
          for (int c = 1; c < CHAINS; c++) {
            const float(&a)[4] = accumulators[r][c][i];
            v = make_float4(v.x + a[0], v.y + a[1], v.z + a[2], v.w + a[3]);
          }
          sums[((k_warp * P::TILE_BLOCKS + group * P::ROW_BLOCKS + r) * COLUMN_BLOCKS + i) * 32 + lane] = v;
        }
      named_arrive(1, P::THREADS);
    }
    return;
  }

  // ---- epilogue warps
  constexpr int OWN = P::OWN_BLOCKS * COLUMN_BLOCKS;  // 16 x 8 results of this warp
  const int e = warp - COMPUTE;
  auto load_x = [&] {
    wait_for_previous_kernel();
    const u32 in_cluster = is_shared_x ? args.cluster - 1 : 0;  // a power of two less one
#pragma unroll 1
    for (int chunk = 0, at = 0; at < x_bytes; chunk++, at += chunk_bytes) {
      const u32 bytes = min(chunk_bytes, x_bytes - at), barrier = x_barrier + min(chunk, X_BARRIERS - 1) * 8;
#pragma unroll 1
      for (int row = lane; row < args.m; row += 32) {
        if (((row ^ blockIdx.y) & in_cluster) != 0) continue;
        const u8* from = args.x + row * args.row_bytes + x_begin + at;
        const u32 to = shared_address(x_rows) + row * x_stride + at;
        if (is_shared_x) copy_bulk_multicast(to, from, bytes, barrier, (u16)((1 << args.cluster) - 1));
        else copy_bulk(to, from, bytes, barrier);
      }
    }
  };
  if (e == 0) {
    if (lane == 0) {
#pragma unroll 1
      for (int i = 0; i < min(num_chunks, X_BARRIERS); i++) barrier_init(x_barrier + i * 8, 1);
      barrier_init_fence();
#pragma unroll 1
      for (int i = 0; i < min(num_chunks, X_BARRIERS); i++) {
        const int end = i == X_BARRIERS - 1 ? x_bytes : min(x_bytes, (i + 1) * chunk_bytes);
        barrier_expect(x_barrier + i * 8, (end - i * chunk_bytes) * args.m);
      }
    }
    __syncwarp();
    if (!args.is_programmatic && !is_shared_x) load_x();
  }
  // In a cluster that splits K, rank `finisher` finishes the row blocks of this warp; the others send their sums there.
  const int warps_per_rank = args.split < P::EPILOGUE ? P::EPILOGUE / args.split : 1;
  const int finisher = is_cluster_split ? e / warps_per_rank : part;
  const u32 receive_barrier = x_barrier + (X_BARRIERS + e) * 8;  // of tile i: i * EPILOGUE further on
  if (is_cluster_split && finisher == part && lane == 0) {
#pragma unroll 1
    for (int i = 0; i < args.tiles_per_block; i++) barrier_init(receive_barrier + i * P::EPILOGUE * 8, 1);
    barrier_init_fence();
#pragma unroll 1
    for (int i = 0; i < args.tiles_per_block; i++)
      barrier_expect(receive_barrier + i * P::EPILOGUE * 8, (args.split - 1) * OWN * LANE_BLOCK_BYTES);
  }
  __syncwarp();
  if (args.cluster > 1) cluster_arrive();
  if (is_shared_x) cluster_wait();
  else __syncthreads();
  if (e == 0 && (args.is_programmatic || is_shared_x)) load_x();
  else wait_for_previous_kernel();
  if (is_cluster_split) cluster_wait();

  const float scale = *args.global_scale * weight_factor<FORMAT>();
  const int finished = warps_per_rank * OWN;  // results that one rank of the cluster finishes
#pragma unroll 1
  for (int tile = first_tile, own = 0; tile < num_tiles; tile += tile_stride, own++) {
    named_wait(1, P::THREADS);
    float4 v[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      v[i] = sums[(e * OWN + i) * 32 + lane];
#pragma unroll
      for (int w = 1; w < K_WARPS; w++) {
        const float4 u = sums[(w * P::TILE_BLOCKS * COLUMN_BLOCKS + e * OWN + i) * 32 + lane];
        v[i] = make_float4(v[i].x + u.x, v[i].y + u.y, v[i].z + u.z, v[i].w + u.w);
      }
    }
    if (tile + tile_stride < num_tiles) named_arrive(2, P::THREADS);

    if (is_cluster_split) {
      const int offset = (e - finisher * warps_per_rank) * OWN;
      const int sender = part < finisher ? part : part - 1;  // its place among those that send
      float4* place = received + (own * (args.split - 1) * finished + offset) * 32 + lane;
      const u32 barrier = receive_barrier + own * P::EPILOGUE * 8;
      if (finisher != part) {
        const u32 to = remote_address(shared_address(place + sender * finished * 32), finisher);
        const u32 to_barrier = remote_address(barrier, finisher);
#pragma unroll
        for (int i = 0; i < OWN; i++) store_remote(to + i * LANE_BLOCK_BYTES, v[i], to_barrier);
        continue;
      }
      barrier_wait(barrier, 0);
      for (int s = 0; s < args.split - 1; s++)
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          const float4 u = place[(s * finished + i) * 32];
          v[i] = make_float4(v[i].x + u.x, v[i].y + u.y, v[i].z + u.z, v[i].w + u.w);
        }
    } else if (args.split > 1) {
      float4* place = args.workspace + (u64)(tile * P::EPILOGUE + e) * args.split * OWN * 32 + lane;
#pragma unroll
      for (int i = 0; i < OWN; i++) __stcg(place + (part * OWN + i) * 32, v[i]);
      __threadfence();
      __syncwarp();
      u32 before = 0;
      if (lane == 0) before = atomicAdd(args.arrived + tile * P::EPILOGUE + e, 1u);
      if (__shfl_sync(~0u, before, 0) != args.split - 1) continue;
      __threadfence();
#pragma unroll
      for (int i = 0; i < OWN; i++) v[i] = __ldcg(place + i * 32);
      for (int s = 1; s < args.split; s++)  // in this order, whoever came last
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          const float4 u = __ldcg(place + (s * OWN + i) * 32);
          v[i] = make_float4(v[i].x + u.x, v[i].y + u.y, v[i].z + u.z, v[i].w + u.w);
        }
      if (lane == 0) args.arrived[tile * P::EPILOGUE + e] = 0;
    }

#pragma unroll
    for (int r = 0; r < P::OWN_BLOCKS; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int n = (tile * P::TILE_BLOCKS + e * P::OWN_BLOCKS + r) * 16 + h * 8 + g;
        if (n >= args.n) continue;
        float bias = 0.f;
        if (args.bias)
          bias = args.is_bias_fp32 ? ((const float*)args.bias)[n] : from_half_bits<TYPE>(((const u16*)args.bias)[n]);
#pragma unroll
        for (int i = 0; i < COLUMN_BLOCKS; i++) {
          const float4 u = v[r * COLUMN_BLOCKS + i];
          const int m = i * 8 + 2 * t;
          u16* out = args.y + (u64)m * args.n + n;
          if (m < args.m) out[0] = to_half_bits<TYPE>(fmaf(h ? u.z : u.x, scale, bias));
          if (m + 1 < args.m) out[args.n] = to_half_bits<TYPE>(fmaf(h ? u.w : u.y, scale, bias));
        }
      }
  }
  // A block must not end while copies into its shared memory are on their way.
  if (e == 0)
    for (int i = 0; i < min(num_chunks, X_BARRIERS); i++) barrier_wait(x_barrier + i * 8, 0);
}
