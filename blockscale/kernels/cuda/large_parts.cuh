// What linear_large.cu computes with plain integers: operands out of the weights' words, and how tiles are dealt out.
// Also compiles as host C++, with decode.cuh's two multiplications supplied.
#pragma once

#include "decode.cuh"

// The operand registers of a lane for two wgmmas of 16 rows x 16 columns, from its own 32 codes and two scale bytes (rows
// g and g + 8) of a subtile of 16 x 64: instruction j takes columns 16t + 4j + (0..3). `half`: instructions 0 and 1, or
// 2 and 3. `first`, `second`: the scale bytes of the even and the odd block of 16 columns (MXFP4).
template <int TYPE, int FORMAT>
DEVICE void fragments_of(const u32 (&words)[4], u32 bytes, u32 first, u32 second, int half, u32* a) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u32 factor, other = 0, pairs[4];
    if (FORMAT == MXFP4)
      mxfp4_factor_pairs<TYPE>(first, second, h, factor, other);
    else
      factor = nvfp4_scale_pair<TYPE>(bytes, h);
    decode_word<TYPE, FORMAT>(words[2 * h + half], factor, other, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[4 * (i / 2) + 2 * (i % 2) + h] = pairs[i];
  }
}

// `tiles` output tiles of `steps` steps along K are dealt to `workers`. The first `waves` times everybody gets a whole
// tile; the steps of the tiles left over are dealt out evenly, so that a tile may be computed in parts by neighbours
// (stream-K: Osama et al., 2023). A worker's parts lie before those of the worker numbered one lower: whoever finishes
// a tile then waits for lower numbers only, which the hardware starts first.
struct Deal {
  int tiles, steps, workers, waves;
};

struct Part {
  int tile, begin, end;  // steps [begin, end) of a tile; none left: begin == end
};

DEVICE long long dealt_begin(Deal d, int place) {
  const long long units = (long long)(d.tiles - d.waves * d.workers) * d.steps;
  return units > 0 ? units * place / d.workers : 0;
}

// The i-th part of a worker.
DEVICE Part part_of(Deal d, int worker, int i) {
  if (i < d.waves) {
    const int tile = i * d.workers + worker;
    return {tile, 0, tile < d.tiles ? d.steps : 0};
  }
  const int place = d.workers - 1 - worker;
  const long long begin = dealt_begin(d, place), end = dealt_begin(d, place + 1);
  const long long tile = begin / d.steps + (i - d.waves), first = tile * d.steps;
  const long long from = begin > first ? begin - first : 0, to = end - first < d.steps ? end - first : d.steps;
  return {(int)tile + d.waves * d.workers, (int)from, (int)(to > from ? to : from)};
}

// Tiles go along rows in bands of `band` token tiles, so that tiles computed at the same time share operands in L2.
struct Place {
  int row, token;
};

DEVICE Place place_of(int tile, int row_tiles, int token_tiles, int band) {
  const int first = tile / (row_tiles * band) * band, rest = tile - first * row_tiles;
  const int width = token_tiles - first < band ? token_tiles - first : band;
  return {rest / width, first + rest % width};
}
