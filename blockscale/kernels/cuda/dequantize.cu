// Whole weights and activations from one format to another, at the speed of memory: fragment-ordered 4-bit weights
// (layouts.py) to bfloat16, float16 or E4M3, and activations to E4M3 with a scale per row. E4M3 needs sm_89.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "decode.cuh"

namespace {

constexpr int TILE_BYTES = 2304, TILE_CODES = 2048;  // 32 rows x 128 columns
constexpr int WARPS = 8;
constexpr float E4M3_MAX = 448.f;

// Sixteen weights of a row, global scale apart, exact in fp32.
template <int FORMAT>
__device__ __forceinline__ void decode_block(u32 word0, u32 word1, u32 factor, u32 other, float (&v)[16]) {
  const u32 words[2] = {word0, word1};
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    u32 pairs[4];
    decode_word<BF16, FORMAT>(words[w], factor, other, pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      v[8 * w + 2 * p] = __uint_as_float(pairs[p] << 16) * weight_factor<FORMAT>();
      v[8 * w + 2 * p + 1] = __uint_as_float(pairs[p] & 0xFFFF0000u) * weight_factor<FORMAT>();
    }
  }
}

// The 2 x 16 weights of this lane in subtile (kt, r): rows 16 r + g and 16 r + 8 + g, columns 64 kt + 16 t + (0..15).
template <int FORMAT, class Use>
__device__ __forceinline__ void for_blocks_of_tile(const unsigned char* tile, Use use) {
  const int lane = threadIdx.x & 31;
  const uint2 mine = *(const uint2*)(tile + TILE_CODES + lane * 8);
  uint2 beside = mine;  // MXFP4's factors lie in both blocks of a scale
  if (FORMAT == MXFP4) beside = *(const uint2*)(tile + TILE_CODES + (lane ^ 1) * 8);
#pragma unroll
  for (int kt = 0; kt < 2; ++kt) {
    const u32 own = kt ? mine.y : mine.x, near = kt ? beside.y : beside.x;
    const u32 even = threadIdx.x & 1 ? near : own, odd = threadIdx.x & 1 ? own : near;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 q = __ldcs((const uint4*)(tile + (kt * 2 + r) * 512) + lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 factor, other = 0;
        if constexpr (FORMAT == MXFP4)
          mxfp4_factor_pairs<BF16>(even, odd, r * 2 + h, factor, other);
        else
          factor = nvfp4_scale_pair<BF16>(own, r * 2 + h);
        float v[16];
        decode_block<FORMAT>(h ? q.z : q.x, h ? q.w : q.y, factor, other, v);
        use(r * 16 + h * 8 + lane / 4, kt * 64 + lane % 4 * 16, v);
      }
    }
  }
}

__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

// a / b, rounded to nearest as a division would be, with one correction (Markstein) instead of one division each.
__device__ __forceinline__ float divide(float a, float b, float inverse) {
  const float q = a * inverse;
  return fmaf(fmaf(-q, b, a), inverse, q);
}

template <int TYPE>
__device__ __forceinline__ float to_float(u32 bits16) {
  if constexpr (TYPE == FP16) return __half2float(__ushort_as_half((unsigned short)bits16));
  return __uint_as_float(bits16 << 16);
}

// Of a warp's share of a row, or of a lane's: NaN stays NaN, as torch's amax has it.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

}  // namespace

// out[n, k] of 16 bits = weight, rounded once. A warp a tile, 64 columns at a time through shared memory: what is written
// to memory together then lies together.
template <int TYPE, int FORMAT>
__global__ void __launch_bounds__(WARPS * 32)
    dequantize_16(const unsigned char* __restrict__ tiles, unsigned short* __restrict__ out,
                  const float* __restrict__ global_scale, int n, int k, int column_tiles, long long num_tiles) {
  __shared__ uint4 staging[WARPS][32][8];  // [row][eight columns], the latter xor row % 8 against bank conflicts
  const long long tile = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (tile >= num_tiles) return;
  const int first_row = (int)(tile / column_tiles) * 32, first_column = (int)(tile % column_tiles) * 128;
  const int lane = threadIdx.x & 31;
  uint4(&mine)[32][8] = staging[threadIdx.x / 32];
  const float scale = *global_scale;
  int blocks = 0;
  for_blocks_of_tile<FORMAT>(tiles + tile * TILE_BYTES, [&](int row, int column, const float(&v)[16]) {
    u32 o[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] = round_pair<TYPE>(v[2 * i] * scale, v[2 * i + 1] * scale);
    const int piece = column % 64 / 8;
    mine[row][piece ^ row % 8] = make_uint4(o[0], o[1], o[2], o[3]);
    mine[row][piece + 1 ^ row % 8] = make_uint4(o[4], o[5], o[6], o[7]);
    if (++blocks % 4) return;  // the four rows of a lane
    __syncwarp();
    const int m = first_column + column / 64 * 64 + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i * 4 + lane / 8;
      if (first_row + r < n && m < k) *(uint4*)(out + (size_t)(first_row + r) * k + m) = mine[r][lane % 8 ^ r % 8];
    }
    __syncwarp();
  });
}

// row_scale[n] = amax of the row / 448, global scale apart, and 1 for a row of zeros. A thread block 32 rows.
template <int FORMAT>
__global__ void __launch_bounds__(WARPS * 32)
    find_row_scales(const unsigned char* __restrict__ tiles, float* __restrict__ row_scale, int n, int column_tiles) {
  __shared__ float of_warp[WARPS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  float amax[4] = {0.f, 0.f, 0.f, 0.f};  // rows g, g + 8, g + 16, g + 24
  for (int column = warp; column < column_tiles; column += WARPS) {
    const unsigned char* tile = tiles + ((size_t)blockIdx.x * column_tiles + column) * TILE_BYTES;
    for_blocks_of_tile<FORMAT>(tile, [&](int row, int, const float(&v)[16]) {
#pragma unroll
      for (int i = 0; i < 16; ++i) amax[row / 8] = larger(fabsf(v[i]), amax[row / 8]);
    });
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    amax[i] = larger(amax[i], __shfl_xor_sync(~0u, amax[i], 1));
    amax[i] = larger(amax[i], __shfl_xor_sync(~0u, amax[i], 2));
    if (lane % 4 == 0) of_warp[warp][i * 8 + lane / 4] = amax[i];
  }
  __syncthreads();
  const int row = blockIdx.x * 32 + lane;
  if (warp == 0 && row < n) {
    float a = of_warp[0][lane];
    for (int w = 1; w < WARPS; ++w) a = larger(a, of_warp[w][lane]);
    row_scale[row] = a == 0.f ? 1.f : __fdiv_rn(a, E4M3_MAX);
  }
}

// out[n, k] of E4M3 = weight / row_scale, global scale apart.
template <int FORMAT>
__global__ void __launch_bounds__(WARPS * 32)
    dequantize_e4m3(const unsigned char* __restrict__ tiles, unsigned char* __restrict__ out,
                    const float* __restrict__ row_scale, int n, int k, int column_tiles, long long num_tiles) {
  const long long tile = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (tile >= num_tiles) return;
  const int first_row = (int)(tile / column_tiles) * 32, first_column = (int)(tile % column_tiles) * 128;
  for_blocks_of_tile<FORMAT>(tiles + tile * TILE_BYTES, [&](int row, int column, const float(&v)[16]) {
    row += first_row, column += first_column;
    if (row >= n || column >= k) return;
    const float scale = row_scale[row], inverse = __frcp_rn(scale);
    u32 o[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      o[i] = e4m3_pair(divide(v[4 * i], scale, inverse), divide(v[4 * i + 1], scale, inverse)) |
             e4m3_pair(divide(v[4 * i + 2], scale, inverse), divide(v[4 * i + 3], scale, inverse)) << 16;
    *(uint4*)(out + (size_t)row * k + column) = make_uint4(o[0], o[1], o[2], o[3]);
  });
}

// out[m, k] of E4M3 = x / scale[m], scale = amax of the row / 448, and 1 for a row of zeros. A thread block a row.
template <int TYPE>
__global__ void __launch_bounds__(WARPS * 32)
    quantize_rows_e4m3(const unsigned short* __restrict__ x, long long stride, unsigned char* __restrict__ out,
                       float* __restrict__ scale, int k) {
  __shared__ float of_warp[WARPS];
  constexpr int KEPT = 4;  // pieces of eight that a thread keeps in registers: 8,192 columns; later ones are read again
  const uint4* row = (const uint4*)(x + blockIdx.x * stride);
  const int pieces = k / 8, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  uint4 kept[KEPT];
  float amax = 0.f;
  auto see = [&](uint4 v) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      amax = larger(fabsf(to_float<TYPE>(w[i] & 0xFFFF)), amax);
      amax = larger(fabsf(to_float<TYPE>(w[i] >> 16)), amax);
    }
  };
#pragma unroll
  for (int j = 0; j < KEPT; ++j) {
    const int i = threadIdx.x + j * WARPS * 32;
    kept[j] = i < pieces ? row[i] : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int j = 0; j < KEPT; ++j) see(kept[j]);
  for (int i = threadIdx.x + KEPT * WARPS * 32; i < pieces; i += WARPS * 32) see(row[i]);
#pragma unroll
  for (int i = 16; i; i /= 2) amax = larger(amax, __shfl_xor_sync(~0u, amax, i));
  if (lane == 0) of_warp[warp] = amax;
  __syncthreads();
  amax = of_warp[0];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) amax = larger(amax, of_warp[w]);
  const float step = amax == 0.f ? 1.f : __fdiv_rn(amax, E4M3_MAX), inverse = __frcp_rn(step);
  if (threadIdx.x == 0) scale[blockIdx.x] = step;

  uint2* to = (uint2*)(out + (size_t)blockIdx.x * k);
  auto put = [&](int i, uint4 v) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    u32 o[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      o[e] = e4m3_pair(divide(to_float<TYPE>(w[e] & 0xFFFF), step, inverse),
                       divide(to_float<TYPE>(w[e] >> 16), step, inverse));
    to[i] = make_uint2(o[0] | o[1] << 16, o[2] | o[3] << 16);
  };
#pragma unroll
  for (int j = 0; j < KEPT; ++j) {
    const int i = threadIdx.x + j * WARPS * 32;
    if (i < pieces) put(i, kept[j]);
  }
  for (int i = threadIdx.x + KEPT * WARPS * 32; i < pieces; i += WARPS * 32) put(i, row[i]);
}
