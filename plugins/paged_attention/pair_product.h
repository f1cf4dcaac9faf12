// Products of pairs of 16-bit numbers with vector instructions: of bf16 into float32, or of integers into int32.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include "pair_pages.h"
#include "tile.h"

namespace llmc::LLMC_ISA {

// Vectors that R rows take at a time: beside the sums there has to be room for them.
constexpr int pair_vectors_for(int rows) { return rows <= 3 ? 8 : rows <= kRowBlock ? 4 : 2; }

// Rows that are weighed together where values are multiplied as they are stored: their pairs are formed once for all.
constexpr int kStoredRows = 8;

// 16 sums. They are stored as they are, integers where floats else stand.
template <class Number>
struct PairSums {
  f32x16 v = zero();

  LLMC_INLINE void add(__m512i x, __m512i y) { v = dot_pairs(v, {x}, {y}); }
  LLMC_INLINE void load_from(const float* p) { v = load(p); }
  LLMC_INLINE void store_to(float* p) const { store(p, v); }
  LLMC_INLINE f32x16 times(float) const { return v; }
};
template <>
struct PairSums<std::int16_t> {
  __m512i v = _mm512_setzero_si512();

  LLMC_INLINE void add(__m512i x, __m512i y) { v = _mm512_dpwssd_epi32(v, x, y); }
  LLMC_INLINE void load_from(const float* p) { v = _mm512_loadu_si512(p); }
  LLMC_INLINE void store_to(float* p) const { _mm512_storeu_si512(p, v); }
  LLMC_INLINE f32x16 times(float factor) const { return f32x16{_mm512_cvtepi32_ps(v)} * factor; }
};

template <class Number>
LLMC_INLINE __m512i repeat_pair(const Number* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}

// Which of the pages that are read next are fetched meanwhile, first .. last - 1. Rows that take several passes over
// the keys fetch a share with each: else the first pass waits for memory, which has nothing to do in the others.
struct Share {
  int first = 0, last = kTileBlocks;
};

// The keys of a tile as pairs of dims: blocks [depth / 2][16][2]. kAhead: `ahead`, which are read next, are fetched,
// for few rows, which wait for memory.
template <class N, bool kFetches>
struct PairedKeys {
  using Number = N;
  static constexpr bool kAhead = kFetches, kShares = kFetches;
  const N *const *blocks, *const *ahead;
  Share share = {};

  LLMC_INLINE __m512i at(int b, std::int64_t d) const { return _mm512_loadu_si512(blocks[b] + d * kLanes); }
};

// The keys as they are stored, of 8 bits.
template <class T, class N>
struct StoredKeys {
  using Number = N;
  static constexpr bool kAhead = true, kShares = false;
  const T *const *blocks, *const *ahead;

  LLMC_INLINE __m512i at(int b, std::int64_t d) const { return load_key_pairs(blocks[b], d); }
};

// sum[r][b] = q[r] . keys of block first + b, for R rows and B blocks. q is [R][depth], depth even.
template <class Keys, int R, int B>
LLMC_INLINE void dot_keys(const typename Keys::Number* q, std::int64_t depth, const Keys& keys, int first,
                          PairSums<typename Keys::Number> (&sum)[R][B]) {
  // Fetched behind the products of a pair of dims, bf16 comes 1.05 to 1.2 times as fast as fetched among them; codes,
  // which are computed on for longer, do not.
  constexpr bool kFetches = Keys::kAhead && fetches_ahead(R);
  [[maybe_unused]] int from = 0, to = 0;
  if constexpr (Keys::kShares) from = std::max(first, keys.share.first), to = std::min(first + B, keys.share.last);
  for (std::int64_t d = 0; d < depth; d += 2) {
    __m512i x[R];
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) x[r] = repeat_pair(q + r * depth + d);
    LLMC_UNROLL
    for (int b = 0; b < B; ++b) {
      const __m512i k = keys.at(first + b, d);
      if constexpr (kFetches && !Keys::kShares) fetch(keys.ahead[first + b] + d * kLanes);
      LLMC_UNROLL
      for (int r = 0; r < R; ++r) sum[r][b].add(x[r], k);
    }
    if constexpr (kFetches && Keys::kShares) {
      for (int b = from; b < to; ++b) fetch(keys.ahead[b] + d * kLanes);
    }
  }
}

// The same, stored in scores [R][kTile].
template <class Keys, int R, int B>
void score_pairs(const typename Keys::Number* q, std::int64_t depth, const Keys& keys, int first, float* scores) {
  PairSums<typename Keys::Number> sum[R][B];
  dot_keys(q, depth, keys, first, sum);
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int b = 0; b < B; ++b) sum[r][b].store_to(scores + r * kTile + (first + b) * kLanes);
  }
}

// Where 16 dims of a pair of positions stand in a tile of values [8][dims / 16][8 pairs][16 dims][2].
LLMC_INLINE std::int64_t pair_place(unsigned pair, std::int64_t dim, std::int64_t width) {
  return pair / 8 * kLanes * width + dim * kLanes + pair % 8 * kPairs;
}

// The values of a tile as pairs of positions. A cursor gives one pair after the other of a page: V vectors of dims, of
// which the last one may be partial.
template <class N>
struct PairedValues {
  using Number = N;
  static constexpr int kRows = kRowBlock;
  const Number* tile;
  std::int64_t width, dims;

  struct Cursor {
    const Number* value;

    template <int V, bool kPartial>
    LLMC_INLINE void next(__m512i (&x)[V]) {
      LLMC_UNROLL
      for (int n = 0; n < V; ++n) x[n] = _mm512_loadu_si512(value + n * kLanes * kLanes);
      value += kPairs;
    }
  };
  LLMC_INLINE Cursor at(int p, std::int64_t dim) const {
    return {tile + pair_place(static_cast<unsigned>(p), dim, width)};
  }
};

// The values as they are stored, of bf16 or int8: for few rows, which wait for memory. ahead: pages that are read next.
template <class T, class N>
struct StoredValues {
  using Number = N;
  static constexpr int kRows = kStoredRows;
  const T *const *pages, *const *ahead;
  std::int64_t width, dims;

  struct Cursor {
    const T *even, *next_page;
    std::int64_t dims;
    int left;  // dims from here on

    template <int V, bool kPartial>
    LLMC_INLINE void next(__m512i (&x)[V]) {
      LLMC_UNROLL
      for (int n = 0; n < V; n += 2) {
        const __mmask32 mask = first_words(kPartial ? std::min<int>(left, kLanes) : V - n > 1 ? kPairs : kLanes);
        const __m512i a = load_words(even + n * kLanes, mask), b = load_words(even + dims + n * kLanes, mask);
        fetch(next_page + n * kLanes);
        fetch(next_page + dims + n * kLanes);
        x[n] = low_pairs(a, b);
        if (n + 1 < V) x[n + 1] = high_pairs(a, b);
      }
      even += 2 * dims;
      next_page += 2 * dims;
    }
  };
  LLMC_INLINE Cursor at(int p, std::int64_t dim) const {
    const std::int64_t offset = 2 * static_cast<unsigned>(p) % kLanes * dims + dim;
    const auto page = static_cast<unsigned>(p) / 8;
    return {pages[page] + offset, ahead[page] + offset, dims, static_cast<int>(dims - dim)};
  }
};

// What each of some rows sees of a tile, what any of them does, and which whole pairs all of them do: from .. to - 1.
struct PairParts {
  TilePart rows[kStoredRows], any;
  int from, to;
};

// Where sums over a tile go. With `fresh` they start at 0, else at what stands there. Without `now` they are stored,
// else added to what the rows have seen before: that times before[r], and the sums times now[r]. factors: what makes
// numbers of sums of integers, which are else stored as they are.
struct Target {
  float* out;  // [R][width]
  bool fresh;
  const float *before = nullptr, *now = nullptr, *factors = nullptr;
};

// Adds the sums over the tile's positions of weights[r] * values, V vectors of dims from dim on. weights is [R][kTile].
// What stands at a position that a row does not see is not even multiplied by 0: it may be no number.
template <class Values, int R, int V, bool kPartial>
void weigh_pairs(const typename Values::Number* weights, const Values& values, std::int64_t dim, const PairParts& parts,
                 const Target& target) {
  const std::int64_t width = values.width;
  float* out = target.out + dim;
  PairSums<typename Values::Number> sum[R][V];
  if (!target.fresh) {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      LLMC_UNROLL
      for (int n = 0; n < V; ++n) sum[r][n].load_from(out + r * width + n * kLanes);
    }
  }
  // A row that does not see a pair adds 0, without a branch, which would keep the sums out of the registers.
  const auto some_see = [&](int begin, int end) __attribute__((always_inline)) {
    for (int j = begin / 2 * 2; j < end; j += 2) {
      __m512i x[V];
      values.at(j / 2, dim).template next<V, kPartial>(x);
      LLMC_UNROLL
      for (int r = 0; r < R; ++r) {
        const TilePart& part = parts.rows[r];
        const unsigned even = (j >= part.begin) & (j < part.end), odd = (j + 1 >= part.begin) & (j + 1 < part.end);
        const __mmask32 seen = even * 0x55555555u | odd * 0xaaaaaaaau;
        const __m512i w = _mm512_maskz_mov_epi16(seen, repeat_pair(weights + r * kTile + j));
        LLMC_UNROLL
        for (int n = 0; n < V; ++n) sum[r][n].add(w, _mm512_maskz_mov_epi16(seen, x[n]));
      }
    }
  };
  some_see(parts.any.begin, parts.from);
  for (int j = parts.from; j < parts.to;) {
    typename Values::Cursor cursor = values.at(j / 2, dim);
    for (const int stop = std::min(parts.to, (j | (kLanes - 1)) + 1); j < stop; j += 2) {
      __m512i x[V];
      cursor.template next<V, kPartial>(x);
      LLMC_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512i w = repeat_pair(weights + r * kTile + j);
        LLMC_UNROLL
        for (int n = 0; n < V; ++n) sum[r][n].add(w, x[n]);
      }
    }
  }
  some_see(parts.to, parts.any.end);
  constexpr bool kInteger = std::is_same_v<typename Values::Number, std::int16_t>;
  if (target.now != nullptr) {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      const f32x16 before = broadcast(target.before[r]), now = broadcast(target.now[r]);
      const float factor = kInteger ? target.factors[r] : 1;
      LLMC_UNROLL
      for (int n = 0; n < V; ++n) {
        float* place = out + r * width + n * kLanes;
        store(place, fmadd(load(place), before, sum[r][n].times(factor) * now));
      }
    }
  } else if (kInteger && target.factors != nullptr) {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      LLMC_UNROLL
      for (int n = 0; n < V; ++n) store(out + r * width + n * kLanes, sum[r][n].times(target.factors[r]));
    }
  } else {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      LLMC_UNROLL
      for (int n = 0; n < V; ++n) sum[r][n].store_to(out + r * width + n * kLanes);
    }
  }
}

// The blocks first .. last - 1 of a tile, scored for R rows.
template <class Keys, int R>
void score_pair_blocks(const typename Keys::Number* q, std::int64_t depth, const Keys& keys, int first, int last,
                       float* scores) {
  constexpr int kWide = pair_vectors_for(R);
  int b = first;
  const auto run = [&]<int B>(std::integral_constant<int, B>) {
    for (; b + B <= last; b += B) score_pairs<Keys, R, B>(q, depth, keys, b, scores);
  };
  run(std::integral_constant<int, kWide>());
  if constexpr (kWide > 4) run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

// All dims, weighed for R rows.
template <class Values, int R>
void weigh_pair_rows(const typename Values::Number* weights, const Values& values, const PairParts& parts,
                     const Target& target) {
  constexpr int kWide = pair_vectors_for(R);
  std::int64_t d = 0;
  const auto run = [&]<int V>(std::integral_constant<int, V>) {
    for (; d + V * kLanes <= values.dims; d += V * kLanes) {
      weigh_pairs<Values, R, V, false>(weights, values, d, parts, target);
    }
  };
  run(std::integral_constant<int, kWide>());
  if constexpr (kWide > 4) run(std::integral_constant<int, 4>());
  if constexpr (kWide > 2) run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
  if (d < values.dims) weigh_pairs<Values, R, 1, true>(weights, values, d, parts, target);
}

// The same, for any number of rows up to kRowBlock.
template <class Keys>
constexpr decltype(&score_pair_blocks<Keys, 1>) kScorePairs[kRowBlock + 1] = {nullptr,
                                                                              score_pair_blocks<Keys, 1>,
                                                                              score_pair_blocks<Keys, 2>,
                                                                              score_pair_blocks<Keys, 3>,
                                                                              score_pair_blocks<Keys, 4>,
                                                                              score_pair_blocks<Keys, 5>,
                                                                              score_pair_blocks<Keys, 6>};
template <class Values>
constexpr decltype(&weigh_pair_rows<Values, 1>) kWeighPairs[] = {nullptr,
                                                                 weigh_pair_rows<Values, 1>,
                                                                 weigh_pair_rows<Values, 2>,
                                                                 weigh_pair_rows<Values, 3>,
                                                                 weigh_pair_rows<Values, 4>,
                                                                 weigh_pair_rows<Values, 5>,
                                                                 weigh_pair_rows<Values, 6>};
template <class T, class Number>
constexpr decltype(&weigh_pair_rows<StoredValues<T, Number>, 1>) kWeighPairs<StoredValues<T, Number>>[] = {
    nullptr,
    weigh_pair_rows<StoredValues<T, Number>, 1>,
    weigh_pair_rows<StoredValues<T, Number>, 2>,
    weigh_pair_rows<StoredValues<T, Number>, 3>,
    weigh_pair_rows<StoredValues<T, Number>, 4>,
    weigh_pair_rows<StoredValues<T, Number>, 5>,
    weigh_pair_rows<StoredValues<T, Number>, 6>,
    weigh_pair_rows<StoredValues<T, Number>, 7>,
    weigh_pair_rows<StoredValues<T, Number>, 8>};

}  // namespace llmc::LLMC_ISA
#endif
