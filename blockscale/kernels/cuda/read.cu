// Reads `count` 16-byte words and keeps nothing: what it takes is what memory gives.

extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* x, long long count, unsigned* out) {
  const long long step = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned sum = 0;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __ldcs(x + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += step) sum += x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
  if (sum == 0x9E3779B9u) atomicAdd(out, 1u);  // a value the compiler cannot rule out: the loads stay
}
