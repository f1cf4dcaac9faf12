// The arithmetic of paged attention: one tile of 128 positions, from 0, 128, 256, ... on, for a few rows.
//
// What a row gets from a tile does not depend on the rows beside it: its scores are sums over the dims in order, its
// weights come from its own largest score, and its weighted values are summed over its own visible positions in order.
#pragma once
#include <limits>

#include "simd.h"

namespace llmc::LLMC_ISA {

// Loops over accumulators have to be unrolled before anything else, or GCC keeps copies of them in memory.
#define LLMC_UNROLL _Pragma("GCC unroll 8")

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

// Key blocks that are scored for all rows before the next ones: what stays in the nearest cache.
constexpr int kKeyBlocks = kTileBlocks / 2;

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

// Few rows (decode) wait for memory: while they use one page they fetch the one that comes next.
constexpr bool fetches_ahead(int rows) { return rows <= 4; }
LLMC_INLINE void fetch(const void* p) { __builtin_prefetch(p); }

// scores[r][16 b ..] = q[r] . keys of block b, for R rows and B blocks. q is [R][dims], scores [R][kTile]. ahead: B
// pages that are read next.
template <class T, int R, int B>
void score_rows(const float* q, std::int64_t dims, const T* const* keys, const T* const* ahead, float* scores) {
  f32x16 sum[R][B];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int b = 0; b < B; ++b) sum[r][b] = zero();
  }
  const auto add = [&](std::int64_t d, const f32x16(&k)[B]) {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      const f32x16 x = broadcast(q[r * dims + d]);
      LLMC_UNROLL
      for (int b = 0; b < B; ++b) sum[r][b] = fmadd(x, k[b], sum[r][b]);
    }
  };
  f32x16 k[B], odd[B];
  if constexpr (std::is_same_v<T, bf16>) {
    std::int64_t d = 0;
    for (; d + 1 < dims; d += 2) {
      LLMC_UNROLL
      for (int b = 0; b < B; ++b) split_pairs(keys[b] + d * kLanes, k[b], odd[b]);
      if constexpr (fetches_ahead(R)) {
        LLMC_UNROLL
        for (int b = 0; b < B; ++b) fetch(ahead[b] + d * kLanes);
      }
      add(d, k);
      add(d + 1, odd);
    }
    if (d < dims) {
      LLMC_UNROLL
      for (int b = 0; b < B; ++b) split_pairs(keys[b] + d * kLanes, k[b], odd[b]);
      add(d, k);
    }
  } else {
    for (std::int64_t d = 0; d < dims; ++d) {
      LLMC_UNROLL
      for (int b = 0; b < B; ++b) k[b] = load(keys[b] + d * kLanes);
      if constexpr (fetches_ahead(R)) {
        LLMC_UNROLL
        for (int b = 0; b < B; ++b) fetch(ahead[b] + d * kLanes);
      }
      add(d, k);
    }
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int b = 0; b < B; ++b) store(scores + r * kTile + b * kLanes, sum[r][b]);
  }
}

// out[r][..] += sum over positions begin .. end - 1 of weights[r][j] * value j, V vectors of dims from dim on. The
// values of a block are [16][dims]; the last vector of `dims` may be partial. weights is [R][kTile], out
// [R][out_stride].
template <class T, int R, int V, bool kPartial>
void weigh_vectors(const float* weights, const T* const* values, const T* const* ahead, std::int64_t dims,
                   std::int64_t dim, int begin, int end, float* out, std::int64_t out_stride) {
  const int lanes = static_cast<int>(dims - dim);
  f32x16 sum[R][V];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int n = 0; n < V; ++n) sum[r][n] = load(out + r * out_stride + dim + n * kLanes);
  }
  for (int j = begin; j < end;) {
    const int stop = std::min(end, (j / kLanes + 1) * kLanes);
    const T* value = values[j / kLanes] + j % kLanes * dims + dim;
    const T* next = ahead[j / kLanes] + j % kLanes * dims + dim;
    for (; j < stop; ++j, value += dims, next += dims) {
      if constexpr (fetches_ahead(R)) {
        for (std::size_t n = 0; n < V * kLanes * sizeof(T); n += 64)
          fetch(reinterpret_cast<const std::byte*>(next) + n);
      }
      f32x16 x[V];
      LLMC_UNROLL
      for (int n = 0; n < V; ++n) x[n] = kPartial ? load(value, lanes) : load(value + n * kLanes);
      LLMC_UNROLL
      for (int r = 0; r < R; ++r) {
        const f32x16 w = broadcast(weights[r * kTile + j]);
        LLMC_UNROLL
        for (int n = 0; n < V; ++n) sum[r][n] = fmadd(w, x[n], sum[r][n]);
      }
    }
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int n = 0; n < V; ++n) store(out + r * out_stride + dim + n * kLanes, sum[r][n]);
  }
}

template <class T, int R>
void weigh_rows(const float* weights, const T* const* values, const T* const* ahead, std::int64_t dims, int begin,
                int end, float* out, std::int64_t out_stride) {
  constexpr int kWide = vectors_for(R);
  std::int64_t d = 0;
  const auto run = [&]<int V>(std::integral_constant<int, V>) {
    for (; d + V * kLanes <= dims; d += V * kLanes) {
      weigh_vectors<T, R, V, false>(weights, values, ahead, dims, d, begin, end, out, out_stride);
    }
  };
  run(std::integral_constant<int, kWide>());
  if constexpr (kWide > 4) run(std::integral_constant<int, 4>());
  if constexpr (kWide > 2) run(std::integral_constant<int, 2>());
  if constexpr (kWide > 1) run(std::integral_constant<int, 1>());
  if (d < dims) weigh_vectors<T, R, 1, true>(weights, values, ahead, dims, d, begin, end, out, out_stride);
}

// The blocks first .. last - 1 of a tile, scored for R rows.
template <class T, int R>
void score_blocks(const float* q, std::int64_t dims, const T* const* keys, const T* const* ahead, int first, int last,
                  float* scores) {
  constexpr int kWide = vectors_for(R);
  int b = first;
  const auto run = [&]<int B>(std::integral_constant<int, B>) {
    for (; b + B <= last; b += B) score_rows<T, R, B>(q, dims, keys + b, ahead + b, scores + b * kLanes);
  };
  run(std::integral_constant<int, kWide>());
  if constexpr (kWide > 4) run(std::integral_constant<int, 4>());
  if constexpr (kWide > 2) run(std::integral_constant<int, 2>());
  if constexpr (kWide > 1) run(std::integral_constant<int, 1>());
}

// The same, for any number of rows up to kRowBlock.
template <class T>
struct RowKernels {
  using Score = void (*)(const float*, std::int64_t, const T* const*, const T* const*, int, int, float*);
  using Weigh = void (*)(const float*, const T* const*, const T* const*, std::int64_t, int, int, float*, std::int64_t);
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

constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 0, within 2e-7; 0 below -150, 1 at 0. Weights are powers of two of logits times log2(e): 12 operations
// for each score in place of 20 for the exponential of simd.h, which would take a fifth of the time of prefill.
LLMC_INLINE f32x16 power_of_two(f32x16 x) {
  x = max(broadcast(-160.0f), x);
  const f32x16 n = round_even(x);
  return scale_by_power(polynomial(x - n, 1.0f, 0.693147f, 0.24022242f, 0.055507336f, 0.009671513f, 0.0013264727f), n);
}

// How a score becomes a logit. All that is kept of logits is in units of log(2).
struct Logit {
  float scale, softcap, slope;  // softcap and slope: 0 if there is none
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
  if (logit.softcap != 0) x = tanh(x * (1.0f / logit.softcap)) * logit.softcap;
  return x * kLog2e;
}

// Turns the scores of the visible positions begin .. end - 1 into weights, relative to the largest logit; distance is
// that of the tile's position 0 from the row's own, j - i. Plain scores are scaled on the way, others beforehand.
LLMC_INLINE void soften(float* scores, int begin, int end, const Logit& logit, float distance, float& top,
                        float& total) {
  const f32x16 absent = broadcast(kNothing);
  const int first = begin / kLanes * kLanes;
  const bool plain = logit.plain();
  f32x16 largest = absent;
  for (int j = first; j < end; j += kLanes) {
    f32x16 x = load(scores + j);
    if (!plain) {
      x = logit_of_scores(x, logit, distance + static_cast<float>(j));
      store(scores + j, x);
    }
    if (j < begin || j + kLanes > end) {
      x = select(mask_first(end - j) & ~mask_first(begin - j), x, absent);
      store(scores + j, x);
    }
    largest = max(largest, x);
  }
  const float scale = plain ? logit.scale * kLog2e : 1.0f;
  top = reduce_max(largest) * scale;
  const f32x16 factor = broadcast(scale), least = broadcast(-top);
  f32x16 sum = zero();
  for (int j = first; j < end; j += kLanes) {
    const f32x16 weight = power_of_two(fmadd(load(scores + j), factor, least));
    sum = sum + weight;
    store(scores + j, weight);
  }
  total = reduce_add(sum);
}

// Adds what the rows have seen in a tile to what they have seen before it. Tiles are added in ascending order, whoever
// computed them; one in which a row sees nothing leaves that row as it is.
inline void add_tile(const Seen& seen, const Seen& tile, std::int64_t rows, std::int64_t width) {
  alignas(64) float before[kLanes], now[kLanes];
  for (std::int64_t first = 0; first < rows; first += kLanes) {
    const f32x16 old_largest = load(seen.largest + first), new_largest = load(tile.largest + first);
    const f32x16 old_sum = load(seen.sum + first), new_sum = load(tile.sum + first);
    const mask16 sees = new_sum != zero();
    const f32x16 largest = max(old_largest, new_largest);
    const f32x16 old_factor = power_of_two(old_largest - largest), new_factor = power_of_two(new_largest - largest);
    store(seen.largest + first, select(sees, largest, old_largest));
    store(seen.sum + first, select(sees, fmadd(old_sum, old_factor, new_sum * new_factor), old_sum));
    store(before, old_factor);
    store(now, new_factor);
    const std::uint32_t bits = mask_bits(sees);
    for (int r = 0; r < kLanes && first + r < rows; ++r) {
      if (!(bits >> r & 1)) continue;
      float* values = seen.values + (first + r) * width;
      const float* more = tile.values + (first + r) * width;
      for (std::int64_t d = 0; d < width; d += kLanes) {
        store(values + d, fmadd(load(values + d), broadcast(before[r]), load(more + d) * now[r]));
      }
    }
  }
}

}  // namespace llmc::LLMC_ISA
