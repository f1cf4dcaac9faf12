// A tile of an int8 cache computed in integers. What meets the codes has 15 bits: of queries as two signed bytes, of
// weights as two unsigned ones, each a row of its own, the high one first; sums of products are exact.
#pragma once
#ifdef __AMX_BF16__
#include <immintrin.h>

#include "pair_weights.h"

namespace llmc::LLMC_ISA {

constexpr float kPartFactor = 128.0f;  // what the high bytes count
constexpr float kMostQuery = 127 * 128;

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

// Splits a query into its parts [2][depth], what is behind its dims being 0; gives the factor of its sums.
inline float split_query(const float* x, std::int64_t dims, std::int64_t depth, std::int8_t* parts) {
  const PartScale scale(largest_magnitude(x, dims), kMostQuery);
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

}  // namespace llmc::LLMC_ISA
#endif
