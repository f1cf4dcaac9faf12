// Scores and weighted values of a few rows and one tile, with vector instructions. A row's scores are sums over the
// dims in order, its values sums over its own visible positions in order, whatever the rows beside it.
#pragma once
#include "job.h"

namespace llmc::LLMC_ISA {

// Key blocks that are scored for all rows before the next ones: what stays in the nearest cache.
constexpr int kKeyBlocks = kTileBlocks / 2;

struct Pairs {
  f32x16 even, odd;
};
LLMC_INLINE void load_split(const bf16* p, f32x16& even, f32x16& odd) {
  const Pairs pairs = split_pairs<Pairs>(load_pairs(p));
  even = pairs.even;
  odd = pairs.odd;
}

// Few rows (decode) wait for memory: while they use one page they fetch the one that comes next.
constexpr bool fetches_ahead(int rows) { return rows <= 4; }

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
      for (int b = 0; b < B; ++b) load_split(keys[b] + d * kLanes, k[b], odd[b]);
      if constexpr (fetches_ahead(R)) {
        LLMC_UNROLL
        for (int b = 0; b < B; ++b) fetch(ahead[b] + d * kLanes);
      }
      add(d, k);
      add(d + 1, odd);
    }
    if (d < dims) {
      LLMC_UNROLL
      for (int b = 0; b < B; ++b) load_split(keys[b] + d * kLanes, k[b], odd[b]);
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
#if defined(__AVX2__) || defined(LLMC_NEON)
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

}  // namespace llmc::LLMC_ISA
