// The arithmetic of paged attention: one tile of 128 positions, from 0, 128, 256, ... on, for a few rows.
//
// What a row gets from a tile does not depend on the rows beside it: its scores are sums over the dims in order, its
// weights come from its own largest score, and its weighted values are summed over its own visible positions in order.
#pragma once
#include <limits>

#include "simd.h"

namespace llmc::LLMC_ISA {

constexpr int kTile = 128;
constexpr int kLanes = 16;
constexpr int kTileBlocks = kTile / kLanes;

// Rows that share a load, and how many accumulators the registers hold.
#if defined(__AVX512F__)
constexpr int kRowBlock = 6, kAccumulators = 24;
#elif defined(__AVX2__)
constexpr int kRowBlock = 6, kAccumulators = 6;
#else
constexpr int kRowBlock = 3, kAccumulators = 3;
#endif

// Vectors that R rows take at a time: 8, 4, 2 or 1.
constexpr int vectors_for(int rows) {
  int n = 8;
  while (n > 1 && n * rows > kAccumulators) n /= 2;
  return n;
}

LLMC_INLINE void split_pairs(const bf16* p, f32x16& even, f32x16& odd) {
  const bf16x32 pairs = load_pairs(p);
#if defined(__AVX512F__)
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs.v, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
#elif defined(__AVX2__)
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(pairs.hi, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(pairs.lo, high)), _mm256_castsi256_ps(_mm256_and_si256(pairs.hi, high))};
#else
  even = pair_even(pairs);
  odd = pair_odd(pairs);
#endif
}

// Elements of one key block: [key_dim][16], or pairs of dims as [ceil(key_dim / 2)][16][2].
template <class T>
constexpr std::int64_t key_block_size(std::int64_t dims) {
  return (std::is_same_v<T, bf16> ? (dims + 1) / 2 * 2 : dims) * kLanes;
}

// scores[r][16 b ..] = q[r] . keys of block b, for R rows and B blocks. q is [R][dims], scores [R][kTile].
template <class T, int R, int B>
void score_rows(const float* q, std::int64_t dims, const T* const* keys, float* scores) {
  f32x16 sum[R][B];
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) sum[r][b] = zero();
  }
  const auto add = [&](std::int64_t d, const f32x16(&k)[B]) {
    for (int r = 0; r < R; ++r) {
      const f32x16 x = broadcast(q[r * dims + d]);
      for (int b = 0; b < B; ++b) sum[r][b] = fmadd(x, k[b], sum[r][b]);
    }
  };
  f32x16 k[B], odd[B];
  if constexpr (std::is_same_v<T, bf16>) {
    std::int64_t d = 0;
    for (; d + 1 < dims; d += 2) {
      for (int b = 0; b < B; ++b) split_pairs(keys[b] + d * kLanes, k[b], odd[b]);
      add(d, k);
      add(d + 1, odd);
    }
    if (d < dims) {
      for (int b = 0; b < B; ++b) split_pairs(keys[b] + d * kLanes, k[b], odd[b]);
      add(d, k);
    }
  } else {
    for (std::int64_t d = 0; d < dims; ++d) {
      for (int b = 0; b < B; ++b) k[b] = load(keys[b] + d * kLanes);
      add(d, k);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) store(scores + r * kTile + b * kLanes, sum[r][b]);
  }
}

// out[r][..] += sum over positions begin .. end - 1 of weights[r][j] * value j, V vectors of dims from dim on. The
// values of a block are [16][dims]; the last vector of `dims` may be partial. weights is [R][kTile], out
// [R][out_stride].
template <class T, int R, int V, bool kPartial>
void weigh_vectors(const float* weights, const T* const* values, std::int64_t dims, std::int64_t dim, int begin,
                   int end, float* out, std::int64_t out_stride) {
  const int lanes = static_cast<int>(dims - dim);
  f32x16 sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < V; ++n) sum[r][n] = load(out + r * out_stride + dim + n * kLanes);
  }
  for (int j = begin; j < end;) {
    const int stop = std::min(end, (j / kLanes + 1) * kLanes);
    const T* value = values[j / kLanes] + j % kLanes * dims + dim;
    for (; j < stop; ++j, value += dims) {
      f32x16 x[V];
      for (int n = 0; n < V; ++n) x[n] = kPartial ? load(value, lanes) : load(value + n * kLanes);
      for (int r = 0; r < R; ++r) {
        const f32x16 w = broadcast(weights[r * kTile + j]);
        for (int n = 0; n < V; ++n) sum[r][n] = fmadd(w, x[n], sum[r][n]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < V; ++n) store(out + r * out_stride + dim + n * kLanes, sum[r][n]);
  }
}

template <class T, int R>
void weigh_rows(const float* weights, const T* const* values, std::int64_t dims, int begin, int end, float* out,
                std::int64_t out_stride) {
  constexpr int kWide = vectors_for(R);
  std::int64_t d = 0;
  const auto run = [&]<int V>(std::integral_constant<int, V>) {
    for (; d + V * kLanes <= dims; d += V * kLanes) {
      weigh_vectors<T, R, V, false>(weights, values, dims, d, begin, end, out, out_stride);
    }
  };
  run(std::integral_constant<int, kWide>());
  if constexpr (kWide > 4) run(std::integral_constant<int, 4>());
  if constexpr (kWide > 2) run(std::integral_constant<int, 2>());
  if constexpr (kWide > 1) run(std::integral_constant<int, 1>());
  if (d < dims) weigh_vectors<T, R, 1, true>(weights, values, dims, d, begin, end, out, out_stride);
}

// The blocks first .. last - 1 of a tile, scored for R rows. keys has kTileBlocks entries, all of them readable.
template <class T, int R>
void score_blocks(const float* q, std::int64_t dims, const T* const* keys, int first, int last, float* scores) {
  constexpr int kWide = vectors_for(R);
  for (int b = first / kWide * kWide; b < last; b += kWide) {
    score_rows<T, R, kWide>(q, dims, keys + b, scores + b * kLanes);
  }
}

// The same, for any number of rows up to kRowBlock.
template <class T>
struct RowKernels {
  using Score = void (*)(const float*, std::int64_t, const T* const*, int, int, float*);
  using Weigh = void (*)(const float*, const T* const*, std::int64_t, int, int, float*, std::int64_t);
#if defined(__AVX2__)
  static constexpr Score score[kRowBlock + 1] = {nullptr,
                                                 score_blocks<T, 1>,
                                                 score_blocks<T, 2>,
                                                 score_blocks<T, 3>,
                                                 score_blocks<T, 4>,
                                                 score_blocks<T, 5>,
                                                 score_blocks<T, 6>};
  static constexpr Weigh weigh[kRowBlock + 1] = {nullptr,          weigh_rows<T, 1>, weigh_rows<T, 2>, weigh_rows<T, 3>,
                                                 weigh_rows<T, 4>, weigh_rows<T, 5>, weigh_rows<T, 6>};
#else
  static constexpr Score score[kRowBlock + 1] = {nullptr, score_blocks<T, 1>, score_blocks<T, 2>, score_blocks<T, 3>};
  static constexpr Weigh weigh[kRowBlock + 1] = {nullptr, weigh_rows<T, 1>, weigh_rows<T, 2>, weigh_rows<T, 3>};
#endif
};

// How a score becomes a logit.
struct Logit {
  float scale, softcap, slope;  // softcap 0: none
};

// What a row has seen so far: its largest logit, the sum of its weights relative to that, and the weighted values
// beside.
struct Seen {
  float largest = -std::numeric_limits<float>::infinity(), sum = 0;  // sum 0: nothing
};

// Turns the scores of the visible positions begin .. end - 1 into weights exp(logit - largest); distance is that of the
// tile's position 0 from the row's own, j - i.
LLMC_INLINE Seen soften(float* scores, int begin, int end, const Logit& logit, float distance) {
  alignas(64) static constexpr float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const f32x16 absent = broadcast(-std::numeric_limits<float>::infinity());
  const int first = begin / kLanes * kLanes;
  f32x16 largest = absent;
  for (int j = first; j < end; j += kLanes) {
    f32x16 x = load(scores + j) * logit.scale;
    if (logit.slope != 0) {
      x = x + (load(kIndex) + (distance + static_cast<float>(j))) * logit.slope;
    }
    if (logit.softcap != 0) x = tanh(x * (1.0f / logit.softcap)) * logit.softcap;
    if (begin > j) x = select(mask_first(begin - j), absent, x);
    if (end < j + kLanes) x = select(mask_first(end - j), x, absent);
    largest = max(largest, x);
    store(scores + j, x);
  }
  const float top = reduce_max(largest);
  f32x16 sum = zero();
  for (int j = first; j < end; j += kLanes) {
    const f32x16 weight = exp(load(scores + j) - top);
    sum = sum + weight;
    store(scores + j, weight);
  }
  return {top, reduce_add(sum)};
}

// Adds a tile's result to what the rows have seen: tiles are added in ascending order, whoever computed them.
LLMC_INLINE void add_seen(Seen& seen, float* values, const Seen& tile, const float* tile_values, std::int64_t width) {
  if (tile.sum == 0) return;
  const float largest = seen.largest > tile.largest ? seen.largest : tile.largest;
  alignas(64) float factor[16] = {seen.largest - largest, tile.largest - largest};
  store(factor, exp(load(factor)));
  seen.largest = largest;
  seen.sum = seen.sum * factor[0] + tile.sum * factor[1];
  for (std::int64_t d = 0; d < width; d += kLanes) {
    store(values + d, fmadd(load(values + d), broadcast(factor[0]), load(tile_values + d) * factor[1]));
  }
}

}  // namespace llmc::LLMC_ISA
