// From scores to weights that are multiplied in pairs or fours: rounded to bf16, or as integers of 15 bits.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include "pair_pages.h"

namespace llmc::LLMC_ISA {

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

constexpr int kSoftRows = 6;

// Rows r that see the positions 0 .. end[r] - 1, which end in the same block of 16, with logits that are scores times
// `scale`, and those times key_scales of the positions, if there are any. factors as above.
struct SoftRows {
  float scale;
  const float *key_scales, *factors;
  int end[kSoftRows] = {};
};

// The same weights, bit by bit, of such rows, whose positions are in B blocks. Their scores x are in registers, and
// stay there.
template <int R, int B>
LLMC_INLINE void soften_registers(f32x16 (&x)[R][B], const SoftRows& rows, bf16* weights, float* top, float* total) {
  const auto [scale, key_scales, factors, end] = rows;
  mask16 seen[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) seen[r] = mask_first(end[r] - (B - 1) * kLanes);
  const auto visible = [&](int r, int b, const f32x16& x, const f32x16& other) {
    return b < B - 1 ? x : select(seen[r], x, other);
  };
  const f32x16 absent = broadcast(kNothing);
  f32x16 largest[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) largest[r] = absent;
  LLMC_UNROLL
  for (int b = 0; b < B; ++b) {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      if (key_scales != nullptr) x[r][b] = x[r][b] * load(key_scales + b * kLanes);
      x[r][b] = visible(r, b, x[r][b], absent);
      largest[r] = max(largest[r], x[r][b]);
    }
  }
  f32x16 sum[R], least[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    top[r] = reduce_max(largest[r]) * scale;
    least[r] = broadcast(-top[r]);
    sum[r] = zero();
  }
  LLMC_UNROLL
  for (int b = 0; b < B; b += 2) {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      f32x16 weight[2] = {zero(), zero()};
      LLMC_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (b + i >= B) continue;
        f32x16& w = weight[i];
        w = visible(r, b + i, rough_power(fmadd(x[r][std::min(b + i, B - 1)], broadcast(scale), least[r])), zero());
        sum[r] = sum[r] + w;
        if (factors != nullptr) w = visible(r, b + i, w * load(factors + (b + i) * kLanes), zero());  // 0 * NaN
      }
      _mm512_storeu_si512(weights + r * kTile + b * kLanes,
                          reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[1].v, weight[0].v)));
    }
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) total[r] = reduce_add(sum[r]);
}

// By what numbers up to `most` in magnitude are multiplied to become parts, and what makes numbers of these; that is
// NaN if one is not finite.
struct PartScale {
  float inverse = 0, factor = 0;

  LLMC_INLINE PartScale(float most, float largest) {
    if (!(most <= std::numeric_limits<float>::max())) {
      factor = std::numeric_limits<float>::quiet_NaN();
    } else if (most >= kSmallest) {
      inverse = largest / most;
      factor = most / largest;
    }
  }
};

// The larger magnitude, where NaN is the largest.
LLMC_INLINE f32x16 larger_magnitude(f32x16 a, f32x16 b) {
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(abs(b).v)))};
}
LLMC_INLINE float reduce_magnitude(f32x16 x) {
  return std::bit_cast<float>(_mm512_reduce_max_epi32(_mm512_castps_si512(x.v)));
}
// The same for numbers that are not negative, or NaN.
LLMC_INLINE f32x16 larger_weight(f32x16 a, f32x16 b) {
  return {_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
LLMC_INLINE float reduce_weights(f32x16 x) {
  return std::bit_cast<float>(_mm512_reduce_max_epu32(_mm512_castps_si512(x.v)));
}
LLMC_INLINE void store_bytes(void* p, __m512i x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

// The lower halves of 32-bit numbers.
LLMC_INLINE __m512i first_halves(__m512i a, __m512i b) {
  const __m512i order = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                         22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  return _mm512_permutex2var_epi16(a, order, b);
}

constexpr float kMostWeight = 32767;

// The largest magnitude of n numbers.
inline float largest_magnitude(const float* x, std::int64_t n) {
  f32x16 most = zero();
  for (std::int64_t i = 0; i < n; i += kLanes) {
    most = larger_magnitude(most, load(x + i, static_cast<int>(std::min<std::int64_t>(kLanes, n - i))));
  }
  return reduce_magnitude(most);
}

// Weights of R rows as soften_to_bf16 makes them, as integers relative to the largest of the row, and the factors of
// the sums over them. Weight: std::int16_t, or std::uint8_t for parts of 8 and of 7 bits in rows of their own,
// [R][2][kTile].
template <int R, class Weight>
LLMC_INLINE void soften_to_integers(float* scores, Weight* weights, int begin, int end, const Logit& logit,
                                    float distance, const float* factors, float* top, float* total, float* factor) {
  const int first = begin / kLanes * kLanes;
  const f32x16 scale = broadcast(find_largest<R>(scores, begin, end, first, end, logit, distance, top));
  f32x16 sum[R], most[R], least[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) sum[r] = most[r] = zero(), least[r] = broadcast(-top[r]);
  for (int j = first; j < end; j += kLanes) {
    const bool partial = j < begin || j + kLanes > end;
    const f32x16 f = partial ? select(lanes_between(begin, end, j), load(factors + j), zero()) : load(factors + j);
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      float* place = scores + r * kTile + j;
      f32x16 x = rough_power(fmadd(load(place), scale, least[r]));
      if (partial) x = select(lanes_between(begin, end, j), x, zero());
      sum[r] = sum[r] + x;
      x = x * f;
      most[r] = larger_magnitude(most[r], x);
      store(place, x);
    }
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    total[r] = reduce_add(sum[r]);
    const PartScale parts(reduce_magnitude(most[r]), kMostWeight);
    factor[r] = parts.factor;
    const f32x16 inverse = broadcast(parts.inverse);
    for (int j = first; j < end; j += kLanes) {
      const __m512i w = _mm512_cvtps_epi32((load(scores + r * kTile + j) * inverse).v);
      if constexpr (std::is_same_v<Weight, std::uint8_t>) {
        store_bytes(weights + 2 * r * kTile + j, _mm512_srli_epi32(w, 7));
        store_bytes(weights + (2 * r + 1) * kTile + j, _mm512_and_si512(w, _mm512_set1_epi32(127)));
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + r * kTile + j), _mm512_cvtepi32_epi16(w));
      }
    }
  }
}

// What 16 sums of integers are that stand where floats else do.
LLMC_INLINE f32x16 load_integers(const float* sums) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(sums))}; }

// Rows of which soften_blocks takes the scores: sums of integers, still to be multiplied by numbers of the positions
// and of the rows.
struct IntegerScores {
  const float *sums, *key_scales, *query_factors;
};

// The same weights, bit by bit, of rows that see the positions 0 .. end - 1, which B blocks hold, with logits that are
// scores times `scale`. The numbers of a row stay in registers.
template <int B, int R>
void soften_blocks(const IntegerScores& scores, std::int16_t* weights, int end, float scale, const float* factors,
                   float* top, float* total, float* factor) {
  const mask16 seen = mask_first(end - (B - 1) * kLanes);
  const auto visible = [&](int b, const f32x16& x, const f32x16& other) {
    return b < B - 1 ? x : select(seen, x, other);
  };
  const f32x16 absent = broadcast(kNothing);
  f32x16 x[R][B], most[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    f32x16 largest = absent;
    LLMC_UNROLL
    for (int b = 0; b < B; ++b) {
      const f32x16 score = load_integers(scores.sums + r * kTile + b * kLanes) *
                           (load(scores.key_scales + b * kLanes) * scores.query_factors[r]);
      x[r][b] = visible(b, score, absent);
      largest = max(largest, x[r][b]);
    }
    top[r] = reduce_max(largest) * scale;
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    const f32x16 least = broadcast(-top[r]);
    f32x16 sum = zero();
    most[r] = zero();
    LLMC_UNROLL
    for (int b = 0; b < B; ++b) {
      const f32x16 weight = visible(b, rough_power(fmadd(x[r][b], broadcast(scale), least)), zero());
      sum = sum + weight;
      x[r][b] = visible(b, weight * load(factors + b * kLanes), zero());  // 0 * NaN
      most[r] = larger_weight(most[r], x[r][b]);
    }
    total[r] = reduce_add(sum);
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    const PartScale parts(reduce_weights(most[r]), kMostWeight);
    factor[r] = parts.factor;
    const f32x16 inverse = broadcast(parts.inverse);
    LLMC_UNROLL
    for (int b = 0; b < B; b += 2) {
      const __m512i low = _mm512_cvtps_epi32((x[r][b] * inverse).v);
      const __m512i high = b + 1 < B ? _mm512_cvtps_epi32((x[r][std::min(b + 1, B - 1)] * inverse).v) : low;
      _mm512_storeu_si512(weights + r * kTile + b * kLanes, first_halves(low, high));
    }
  }
}

// The same for any number of blocks.
template <int R>
constexpr decltype(&soften_blocks<1, R>) kSoftenBlocks[kTileBlocks + 1] = {nullptr,
                                                                           soften_blocks<1, R>,
                                                                           soften_blocks<2, R>,
                                                                           soften_blocks<3, R>,
                                                                           soften_blocks<4, R>,
                                                                           soften_blocks<5, R>,
                                                                           soften_blocks<6, R>,
                                                                           soften_blocks<7, R>,
                                                                           soften_blocks<8, R>};

}  // namespace llmc::LLMC_ISA
#endif
