// One register at a time of fragment-ordered weights, and how tiles are dealt out. Also compiles as host C++.
//
// A word holds eight codes, as the scattered bits of four registers (layouts.py). decode.cuh takes all four out of it;
// `pair_of` takes the one that a lane needs, by rotations that depend on the lane, and leaves the same bits in it.
#pragma once

#include "decode.cuh"

// How far the bits of register p of a word are rotated: all of them, but for the top magnitude bits of register 3.
struct Rotation {
  u32 most, top;
};

DEVICE Rotation rotation_of(int p) {
  const u32 most = p == 0 ? 0 : p == 1 ? 26 : p == 2 ? 6 : 4;
  return {most, p == 3 ? 28 : most};
}

#ifdef __CUDACC__
DEVICE u32 rotated(u32 word, u32 distance) { return rotate_right(word, distance); }
#else  // C++ leaves a shift by 32 undefined
DEVICE u32 rotated(u32 word, u32 distance) { return distance % 32 ? rotate_right(word, distance % 32) : word; }
#endif

template <int TYPE>
DEVICE u32 pair_of(u32 word, Rotation by) {
  if (TYPE == FP16)  // the magnitude three bits higher than in bfloat16
    return (rotated(word, by.most) & 0x80008000u) | (rotated(word, by.most + 29) & 0x06000600u) |
           (rotated(word, by.top + 29) & 0x08000800u);
  return (rotated(word, by.most) & 0x80C080C0u) | (rotated(word, by.top) & 0x01000100u);
}

// The operand registers of a lane for columns 16j..16j+15 of 16 rows, from the words and the two scale bytes (rows g and
// g + 8) of the lane that owns them. `first`, `second`: MXFP4's bytes of the even and the odd block of 16 columns.
template <int TYPE, int FORMAT>
DEVICE void fragment_of(const u32 (&words)[4], u32 bytes, u32 first, u32 second, Rotation rotation, u32* a) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u32 factor, other = 0;
    if (FORMAT == MXFP4)
      mxfp4_factor_pairs<TYPE>(first, second, h, factor, other);
    else
      factor = nvfp4_scale_pair<TYPE>(bytes, h);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // columns 2t, 2t + 1, then 2t + 8, 2t + 9
      u32 pair = multiply_pair<TYPE>(pair_of<TYPE>(words[2 * h + half], rotation), factor);
      if (FORMAT == MXFP4) pair = multiply_pair<TYPE>(pair, other);
      a[2 * half + h] = pair;
    }
  }
}

// The same where the activations lie in the order of the weights, so that a lane needs its own words only: instruction j
// takes columns 16t + 4j + (0..3). `half`: instructions 0 and 1, or 2 and 3. Less than half of the operations.
template <int TYPE, int FORMAT>
DEVICE void own_fragments_of(const u32 (&words)[4], u32 bytes, u32 first, u32 second, int half, u32* a) {
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

// ---- who computes what -----------------------------------------------------------------------------------------------

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
