// Products of pairs of 16-bit numbers with vector instructions: of bf16 into float32, or of integers into int32.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include "pair_pages.h"
#include "tile.h"

namespace llmc::LLMC_ISA {

// Vectors that R rows take at a time: beside the sums there has to be room for them.
constexpr int pair_vectors_for(int rows) { return rows <= 3 ? 8 : 4; }

// 16 sums. They are stored as they are, integers where floats else stand.
template <class Number>
struct PairSums {
  f32x16 v = zero();

  LLMC_INLINE void add(__m512i x, __m512i y) { v = dot_pairs(v, {x}, {y}); }
  LLMC_INLINE void load_from(const float* p) { v = load(p); }
  LLMC_INLINE void store_to(float* p) const { store(p, v); }
};
template <>
struct PairSums<std::int16_t> {
  __m512i v = _mm512_setzero_si512();

  LLMC_INLINE void add(__m512i x, __m512i y) { v = _mm512_dpwssd_epi32(v, x, y); }
  LLMC_INLINE void load_from(const float* p) { v = _mm512_loadu_si512(p); }
  LLMC_INLINE void store_to(float* p) const { _mm512_storeu_si512(p, v); }
};

template <class Number>
LLMC_INLINE __m512i repeat_pair(const Number* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}

// The keys of a tile as pairs of dims: blocks [depth / 2][16][2]. ahead: those that are read next, for few rows, which
// wait for memory.
template <class N>
struct PairedKeys {
  using Number = N;
  const N *const *blocks, *const *ahead;

  LLMC_INLINE __m512i at(int b, std::int64_t d) const { return _mm512_loadu_si512(blocks[b] + d * kLanes); }
};

// The keys as they are stored, of 8 bits.
template <class T, class N>
struct StoredKeys {
  using Number = N;
  const T *const *blocks, *const *ahead;

  LLMC_INLINE __m512i at(int b, std::int64_t d) const { return load_key_pairs(blocks[b], d); }
};

// scores[r][16 b ..] = q[r] . keys of block first + b, for R rows and B blocks. q is [R][depth], depth even, scores
// [R][kTile].
template <class Keys, int R, int B>
void score_pairs(const typename Keys::Number* q, std::int64_t depth, const Keys& keys, int first, float* scores) {
  PairSums<typename Keys::Number> sum[R][B];
  for (std::int64_t d = 0; d < depth; d += 2) {
    __m512i x[R];
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) x[r] = repeat_pair(q + r * depth + d);
    LLMC_UNROLL
    for (int b = 0; b < B; ++b) {
      const __m512i k = keys.at(first + b, d);
      if constexpr (fetches_ahead(R)) fetch(keys.ahead[first + b] + d * kLanes);
      LLMC_UNROLL
      for (int r = 0; r < R; ++r) sum[r][b].add(x[r], k);
    }
  }
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

// out[r][..] += sum over positions begin .. end - 1 of weights[r] * values, V vectors of dims from dim on. weights is
// [R][kTile], out [R][width]. kEdges: the range may begin or end within a pair. What stands at the pair's other
// position is then not even multiplied by 0: it may be no number.
template <class Values, int R, int V, bool kPartial, bool kEdges>
void weigh_pairs(const typename Values::Number* weights, const Values& values, std::int64_t dim, int begin, int end,
                 float* out) {
  const std::int64_t width = values.width;
  PairSums<typename Values::Number> sum[R][V];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int n = 0; n < V; ++n) sum[r][n].load_from(out + r * width + dim + n * kLanes);
  }
  for (int j = begin / 2 * 2; j < end;) {
    typename Values::Cursor cursor = values.at(j / 2, dim);
    for (const int stop = std::min(end, (j | (kLanes - 1)) + 1); j < stop; j += 2) {
      __m512i x[V];
      cursor.template next<V, kPartial>(x);
      if constexpr (kEdges) {
        const __mmask32 seen = (j < begin ? 0 : 0x55555555u) | (j + 1 < end ? 0xaaaaaaaau : 0);
        LLMC_UNROLL
        for (int n = 0; n < V; ++n) x[n] = _mm512_maskz_mov_epi16(seen, x[n]);
      }
      LLMC_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512i w = repeat_pair(weights + r * kTile + j);
        LLMC_UNROLL
        for (int n = 0; n < V; ++n) sum[r][n].add(w, x[n]);
      }
    }
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int n = 0; n < V; ++n) sum[r][n].store_to(out + r * width + dim + n * kLanes);
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

// Positions begin .. end - 1 of all dims, weighed for R rows.
template <class Values, int R, bool kEdges = false>
void weigh_pair_rows(const typename Values::Number* weights, const Values& values, int begin, int end, float* out) {
  constexpr int kWide = pair_vectors_for(R);
  std::int64_t d = 0;
  const auto run = [&]<int V>(std::integral_constant<int, V>) {
    for (; d + V * kLanes <= values.dims; d += V * kLanes) {
      weigh_pairs<Values, R, V, false, kEdges>(weights, values, d, begin, end, out);
    }
  };
  run(std::integral_constant<int, kWide>());
  if constexpr (kWide > 4) run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
  if (d < values.dims) weigh_pairs<Values, R, 1, true, kEdges>(weights, values, d, begin, end, out);
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
constexpr decltype(&weigh_pair_rows<Values, 1>) kWeighPairs[kRowBlock + 1] = {nullptr,
                                                                              weigh_pair_rows<Values, 1>,
                                                                              weigh_pair_rows<Values, 2>,
                                                                              weigh_pair_rows<Values, 3>,
                                                                              weigh_pair_rows<Values, 4>,
                                                                              weigh_pair_rows<Values, 5>,
                                                                              weigh_pair_rows<Values, 6>};

}  // namespace llmc::LLMC_ISA
#endif
