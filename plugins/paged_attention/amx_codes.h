// A tile of an int8 cache computed in integers. What meets the codes has 15 bits: of queries as two signed bytes, of
// weights as two unsigned ones, each a row of its own, the high one first; sums of products are exact.
#pragma once
#ifdef __AMX_BF16__
#include <immintrin.h>

#include "amx_pages.h"

namespace llmc::LLMC_ISA {

constexpr float kPartFactor = 128.0f;  // what the high bytes count
constexpr float kMostQuery = 127 * 128, kMostWeight = 255 * 128 + 127;

// Four rows of 16 bytes as 16 quads, one byte of each.
LLMC_INLINE void store_quads(__m512i rows, std::int8_t* out) {
  const __m512i quad =
      _mm512_setr_epi32(0x30201000, 0x31211101, 0x32221202, 0x33231303, 0x34241404, 0x35251505, 0x36261606, 0x37271707,
                        0x38281808, 0x39291909, 0x3a2a1a0a, 0x3b2b1b0b, 0x3c2c1c0c, 0x3d2d1d0d, 0x3e2e1e0e, 0x3f2f1f0f);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi8(quad, rows));
}

// Quads of dims [dims / 4][16][4] from a page of keys. Behind the last dim stands anything: queries are 0 there.
[[gnu::noinline]] inline void quad_keys(const i8* page, std::int64_t dims, std::int8_t* out) {
  for (std::int64_t d = 0; d < dims; d += 4) store_quads(_mm512_loadu_si512(page + d * kLanes), out + d * kLanes);
}

// Quads of positions from a page of values: 16 dims of quad p at out + d / 16 * step + p * 64; also behind the last.
[[gnu::noinline]] inline void quad_values(const i8* page, std::int64_t dims, std::int64_t step, std::int8_t* out) {
  for (int p = 0; p < kLanes; p += 4, page += 4 * dims, out += 4 * kLanes) {
    for (std::int64_t d = 0; d < dims; d += kLanes) {
      __m512i rows = _mm512_castsi128_si512(load_bytes(page + d));
      rows = _mm512_inserti32x4(rows, load_bytes(page + dims + d), 1);
      rows = _mm512_inserti32x4(rows, load_bytes(page + 2 * dims + d), 2);
      rows = _mm512_inserti32x4(rows, load_bytes(page + 3 * dims + d), 3);
      store_quads(rows, out + d / kLanes * step);
    }
  }
}

// What both parts of a number were multiplied to.
LLMC_INLINE f32x16 join_parts(const float* high, const float* low) {
  const f32x16 a{_mm512_cvtepi32_ps(_mm512_loadu_si512(high))}, b{_mm512_cvtepi32_ps(_mm512_loadu_si512(low))};
  return fmadd(a, broadcast(kPartFactor), b);
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
LLMC_INLINE void store_bytes(void* p, __m512i x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

// Splits a query into its parts [2][depth], what is behind its dims being 0; gives the factor of its sums.
inline float split_query(const float* x, std::int64_t dims, std::int64_t depth, std::int8_t* parts) {
  f32x16 most = zero();
  for (std::int64_t d = 0; d < dims; d += kLanes) {
    most = larger_magnitude(most, load(x + d, static_cast<int>(std::min<std::int64_t>(kLanes, dims - d))));
  }
  const PartScale scale(reduce_magnitude(most), kMostQuery);
  std::memset(parts, 0, static_cast<std::size_t>(2 * depth));
  for (std::int64_t d = 0; d < dims && scale.inverse != 0; d += kLanes) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, dims - d));
    const __m512i q = _mm512_cvtps_epi32((load(x + d, lanes) * scale.inverse).v);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
    store_bytes(parts + d, high);
    store_bytes(parts + depth + d, _mm512_sub_epi32(q, _mm512_slli_epi32(high, 7)));
  }
  return scale.factor;
}

// Weights of R rows as soften_to_bf16 makes them, each split into its parts [R][2][kTile], relative to the largest of
// the row; the factors of the sums over them.
template <int R>
LLMC_INLINE void soften_to_parts(float* scores, std::uint8_t* weights, int begin, int end, const Logit& logit,
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
    std::uint8_t* out = weights + r * 2 * kTile;
    const f32x16 inverse = broadcast(parts.inverse);
    for (int j = first; j < end; j += kLanes) {
      const __m512i w = _mm512_cvtps_epi32((load(scores + r * kTile + j) * inverse).v);
      store_bytes(out + j, _mm512_srli_epi32(w, 7));
      store_bytes(out + kTile + j, _mm512_and_si512(w, _mm512_set1_epi32(127)));
    }
  }
}

}  // namespace llmc::LLMC_ISA
#endif
