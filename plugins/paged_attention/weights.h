// From scores to weights, tile by tile: 128 positions from 0, 128, 256, ... on.
//
// What a row gets from a tile does not depend on the rows beside it: its weights are relative to its own largest logit
// in that tile, and tiles are added up in ascending order.
#pragma once
#include <limits>

#include "simd.h"

namespace llmc::LLMC_ISA {

constexpr int kTile = 128;
constexpr int kLanes = 16;
constexpr int kTileBlocks = kTile / kLanes;

LLMC_INLINE void fetch(const void* p) { __builtin_prefetch(p); }

constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 0, within 2e-7; 1 at 0, and 2^-126 from there down: results below would be subnormal, which costs 150
// cycles each. Weights are powers of two of logits times log2(e): 12 operations for each score in place of 20 for the
// exponential of simd.h, which would take a fifth of the time of prefill.
LLMC_INLINE f32x16 power_of_two(f32x16 x) {
  x = max(broadcast(-126.0f), x);
  const f32x16 n = round_even(x);
  return scale_by_power(polynomial(x - n, 1.0f, 0.693147f, 0.24022242f, 0.055507336f, 0.009671513f, 0.0013264727f), n);
}

// How a score becomes a logit. All that is kept of logits is in units of log(2).
struct Logit {
  float scale, softcap, slope;  // softcap and slope: 0 if there is none
  float shift = 0;              // of a row, added to its scores * scale; only where there is a softcap
  bool plain() const { return softcap == 0 && slope == 0 && scale > 0; }
};

// What rows have seen so far: their largest logits, the sums of their weights relative to those (0: nothing seen), and
// the weighted values beside, [rows][width]. The arrays are padded to a multiple of 16.
struct Seen {
  float *largest, *sum, *values;
};

constexpr float kNothing = -std::numeric_limits<float>::infinity();  // larger than no logit

// The logits of a vector of scores whose first one is that of a key `distance` behind the query (j - i).
LLMC_INLINE f32x16 logit_of_scores(f32x16 scores, const Logit& logit, float distance) {
  alignas(64) static constexpr float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 x = scores * logit.scale;
  if (logit.slope != 0) x = x + (load(kIndex) + distance) * logit.slope;
  if (logit.softcap != 0) x = tanh((x + broadcast(logit.shift)) * (1.0f / logit.softcap)) * logit.softcap;
  return x * kLog2e;
}

// Which lanes of the vector at j are among begin .. end - 1.
LLMC_INLINE mask16 lanes_between(int begin, int end, int j) { return mask_first(end - j) & ~mask_first(begin - j); }

// Replaces the scores of R rows [R][kTile] by logits where these are no plain multiples, and those of invisible
// positions by -inf. All rows see the positions begin .. end - 1; first and last are those bounds in whole vectors or
// more. distance is that of the tile's position 0 from the rows' own, j - i. Gives each row's largest logit, and
// returns what scores are still to be multiplied with.
template <int R>
LLMC_INLINE float find_largest(float* scores, int begin, int end, int first, int last, const Logit& logit,
                               float distance, float* top) {
  const f32x16 absent = broadcast(kNothing);
  const bool plain = logit.plain();
  f32x16 largest[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) largest[r] = absent;
  for (int j = first; j < last; j += kLanes) {
    const bool partial = j < begin || j + kLanes > end;
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      float* place = scores + r * kTile + j;
      f32x16 x = load(place);
      if (!plain) x = logit_of_scores(x, logit, distance + static_cast<float>(j));
      if (partial) x = select(lanes_between(begin, end, j), x, absent);
      if (partial || !plain) store(place, x);
      largest[r] = max(largest[r], x);
    }
  }
  const float scale = plain ? logit.scale * kLog2e : 1.0f;
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) top[r] = reduce_max(largest[r]) * scale;
  return scale;
}

// Turns the scores of R rows into weights: powers relative to the largest logit, and their sums. Several rows at a time
// hide what one row waits for.
template <int R>
LLMC_INLINE void soften(float* scores, int begin, int end, const Logit& logit, float distance, float* top,
                        float* total) {
  const int first = begin / kLanes * kLanes;
  const f32x16 factor = broadcast(find_largest<R>(scores, begin, end, first, end, logit, distance, top));
  f32x16 sum[R], least[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) sum[r] = zero(), least[r] = broadcast(-top[r]);
  for (int j = first; j < end; j += kLanes) {
    const bool partial = j < begin || j + kLanes > end;
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      f32x16 weight = power_of_two(fmadd(load(scores + r * kTile + j), factor, least[r]));
      if (partial) weight = select(lanes_between(begin, end, j), weight, zero());
      sum[r] = sum[r] + weight;
      store(scores + r * kTile + j, weight);
    }
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) total[r] = reduce_add(sum[r]);
}

// Adds up largest logits and sums of 16 rows, from row `first` on, of what they have seen before a tile and in it, and
// gives the factors of the values. Those of a row that sees nothing of the tile are 1 and 0. Which rows see something?
LLMC_INLINE mask16 join_sums(const Seen& seen, const Seen& tile, std::int64_t first, float* before, float* now) {
  const f32x16 old_largest = load(seen.largest + first), new_largest = load(tile.largest + first);
  const f32x16 old_sum = load(seen.sum + first), new_sum = load(tile.sum + first);
  const mask16 sees = new_sum != zero();
  const f32x16 largest = max(old_largest, new_largest);
  const f32x16 old_factor = power_of_two(old_largest - largest), new_factor = power_of_two(new_largest - largest);
  store(seen.largest + first, select(sees, largest, old_largest));
  store(seen.sum + first, select(sees, fmadd(old_sum, old_factor, new_sum * new_factor), old_sum));
  store(before, select(sees, old_factor, broadcast(1.0f)));
  store(now, select(sees, new_factor, zero()));
  return sees;
}

// Adds what the rows have seen in a tile to what they have seen before it. Tiles are added in ascending order, whoever
// computed them; one in which a row sees nothing leaves that row as it is.
inline void add_tile(const Seen& seen, const Seen& tile, std::int64_t rows, std::int64_t width) {
  alignas(64) float before[kLanes], now[kLanes];
  for (std::int64_t first = 0; first < rows; first += kLanes) {
    const std::uint32_t bits = mask_bits(join_sums(seen, tile, first, before, now));
    for (int r = 0; r < kLanes && first + r < rows; ++r) {
      if (!(bits >> r & 1)) continue;
      float* values = seen.values + (first + r) * width;
      const float* added = tile.values + (first + r) * width;
      for (std::int64_t d = 0; d < width; d += kLanes) {
        store(values + d, fmadd(load(values + d), broadcast(before[r]), load(added + d) * now[r]));
      }
    }
  }
}

}  // namespace llmc::LLMC_ISA
