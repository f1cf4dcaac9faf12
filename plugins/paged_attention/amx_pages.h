// A tile of a quantized cache as bf16. Codes of 8 bits are exact in it, and their scales are kept apart; int4 is
// rounded.
#pragma once
#ifdef __AMX_BF16__
#include <immintrin.h>

#include "job.h"

namespace llmc::LLMC_ISA {

// Pairs of bf16: of codes, which are exact, the upper halves.
template <class T>
LLMC_INLINE __m512i pairs_of(const f32x16& even, const f32x16& odd) {
  if constexpr (kScaled<T>) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
    return _mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(odd.v), upper));
  } else {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v)));
  }
}

// Pairs of dims [depth / 2][16][2] from a page of keys; dims that there are not are 0.
template <class T>
void pair_keys(const T* page, const PageLayout& layout, std::int64_t dims, std::int64_t depth, bf16* out) {
  const auto put = [&](std::int64_t d, const f32x16& even, const f32x16& odd) {
    _mm512_storeu_si512(out + d * kLanes, pairs_of<T>(even, d + 1 < dims ? odd : zero()));
  };
  if constexpr (std::is_same_v<T, i4>) {
    for_each_key(page, layout, dims, put);
  } else {
    std::int64_t d = 0;
    for (; d + 1 < dims; d += 2) {
      _mm512_storeu_si512(out + d * kLanes, pairs_of<T>(load(page + d * kLanes), load(page + (d + 1) * kLanes)));
    }
    if (d < dims) put(d, load(page + d * kLanes), zero());
  }
  const std::int64_t end = (dims + 1) / 2 * 2;
  std::memset(out + end * kLanes, 0, static_cast<std::size_t>((depth - end) * kLanes) * sizeof(bf16));
}

// Pairs of positions from a page of values: 16 dims of pair p at out + d / 16 * step + p * 32. What is not finite
// becomes 0: it is left to the factors.
template <class T>
void pair_page(const T* page, const PageLayout& layout, std::int64_t dims, std::int64_t step, bf16* out) {
  if constexpr (std::is_same_v<T, i4>) {
    const auto finite = [](const f32x16& x) { return select(x == x, x, zero()); };
    for_each_value(page, layout, dims, [&](int j, std::int64_t d, const f32x16(&low)[2], const f32x16(&high)[2]) {
      bf16* place = out + d / kLanes * step + j * kLanes;
      _mm512_storeu_si512(place, pairs_of<T>(finite(low[0]), finite(low[1])));
      if (d + kLanes < dims) _mm512_storeu_si512(place + step, pairs_of<T>(finite(high[0]), finite(high[1])));
    });
  } else {
    for (int j = 0; j < kLanes; j += 2) {
      const T *even = page + j * dims, *odd = even + dims;
      bf16* place = out + j * kLanes;
      std::int64_t d = 0;
      for (; d + kLanes <= dims; d += kLanes, place += step) {
        _mm512_storeu_si512(place, pairs_of<T>(load(even + d), load(odd + d)));
      }
      const int left = static_cast<int>(dims - d);
      if (left > 0) _mm512_storeu_si512(place, pairs_of<T>(load(even + d, left), load(odd + d, left)));
    }
  }
}

// What weights of a page's positions are multiplied by: the scales of the codes, or 1; NaN where a value is not finite.
template <class T>
f32x16 value_factors(const T* page, const PageLayout& layout, std::int64_t dims) {
  if constexpr (!std::is_same_v<T, i4>) return load_scales(page, layout);
  f32x16 factor = broadcast(1.0f);
  const f16* scales = CacheView<T>::template scales_of<f16>(page, layout);
  for (std::int64_t g = 0; g < kv_groups(dims); ++g) factor = factor + load(scales + g * 2 * kLanes) * zero();
  return factor;
}

// 2^x = 2^(x - floor(x)) * 2^floor(x) within 3e-6, in instructions that issue twice a cycle; scalef takes the floor
// itself.
LLMC_INLINE f32x16 rough_power(f32x16 x) {
  x = max(broadcast(-126.0f), x);
  const f32x16 rest = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  const f32x16 p = polynomial(rest, 1.0f, 0.69304484f, 0.2412802f, 0.052242473f, 0.013426685f);
  return {_mm512_scalef_ps(p.v, x.v)};
}

constexpr int kPairDepth = 32;  // positions of bf16 that one tile instruction sums over

// Weights of R rows as in weights.h, but times `factors` of the positions, if there are any, and rounded to bf16 in
// `weights` [R][kTile], 32 positions at a time.
template <int R>
LLMC_INLINE void soften_to_bf16(float* scores, bf16* weights, int begin, int end, const Logit& logit, float distance,
                                const float* factors, float* top, float* total) {
  const int first = begin / kPairDepth * kPairDepth, last = (end + kPairDepth - 1) / kPairDepth * kPairDepth;
  const f32x16 factor = broadcast(find_largest<R>(scores, begin, end, first, last, logit, distance, top));
  f32x16 sum[R], least[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) sum[r] = zero(), least[r] = broadcast(-top[r]);
  for (int j = first; j < last; j += kPairDepth) {
    const bool partial = j < begin || j + kPairDepth > end;
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      const float* place = scores + r * kTile + j;
      f32x16 a = rough_power(fmadd(load(place), factor, least[r]));
      f32x16 b = rough_power(fmadd(load(place + kLanes), factor, least[r]));
      if (partial) {
        a = select(lanes_between(begin, end, j), a, zero());
        b = select(lanes_between(begin, end, j + kLanes), b, zero());
      }
      sum[r] = sum[r] + a;
      sum[r] = sum[r] + b;
      if (factors != nullptr) {
        a = a * load(factors + j);
        b = b * load(factors + j + kLanes);
        if (partial) {  // 0 * NaN
          a = select(lanes_between(begin, end, j), a, zero());
          b = select(lanes_between(begin, end, j + kLanes), b, zero());
        }
      }
      _mm512_storeu_si512(weights + r * kTile + j, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v)));
    }
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) total[r] = reduce_add(sum[r]);
}

}  // namespace llmc::LLMC_ISA
#endif
