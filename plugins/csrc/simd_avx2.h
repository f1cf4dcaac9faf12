// f32x16 as two ymm registers (AVX2, FMA, F16C). Included by simd.h.
#pragma once
#include <immintrin.h>

namespace llmc::LLMC_ISA {

struct f32x16 {
  __m256 lo, hi;
};
struct mask16 {
  __m256 lo, hi;
};
struct bf16x32 {
  __m256i lo, hi;
};

alignas(64) inline constexpr std::int32_t kTailMask[32] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                           -1, -1, -1, -1, -1, -1, -1, -1};

LLMC_INLINE const std::int32_t* lanes_below(int n) { return kTailMask + 16 - (n < 0 ? 0 : n > 16 ? 16 : n); }
LLMC_INLINE __m256i load_int(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

LLMC_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LLMC_INLINE f32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LLMC_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LLMC_INLINE f32x16 load(const float* p, int n) {
  const std::int32_t* mask = lanes_below(n);
  return {_mm256_maskload_ps(p, load_int(mask)), _mm256_maskload_ps(p + 8, load_int(mask + 8))};
}
LLMC_INLINE void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
LLMC_INLINE void store(float* p, f32x16 x, int n) {
  const std::int32_t* mask = lanes_below(n);
  _mm256_maskstore_ps(p, load_int(mask), x.lo);
  _mm256_maskstore_ps(p + 8, load_int(mask + 8), x.hi);
}

LLMC_INLINE __m256 widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
LLMC_INLINE __m256i round_bf16(__m256 x) {  // the result in the low half of each lane
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(nearest), _mm256_castsi256_ps(quiet), nan);
  return _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
}
LLMC_INLINE __m256i narrow_bf16(f32x16 x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_bf16(x.lo), round_bf16(x.hi)), 0xd8);
}
LLMC_INLINE __m256i narrow_f16(f32x16 x) {
  return _mm256_set_m128i(_mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                          _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LLMC_INLINE f32x16 load(const bf16* p) {
  const __m256i x = load_int(p);
  return {widen_bf16(_mm256_castsi256_si128(x)), widen_bf16(_mm256_extracti128_si256(x, 1))};
}
LLMC_INLINE f32x16 load(const f16* p) {
  const __m256i x = load_int(p);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
LLMC_INLINE void store(bf16* p, f32x16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x)); }
LLMC_INLINE void store(f16* p, f32x16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(x)); }
template <class T>
LLMC_INLINE f32x16 load_half(const T* p, int n) {
  alignas(32) T buffer[16] = {};
  if (n > 0) std::memcpy(buffer, p, static_cast<std::size_t>(n > 16 ? 16 : n) * 2);
  return load(buffer);
}
template <class T>
LLMC_INLINE void store_half(T* p, f32x16 x, int n) {
  alignas(32) T buffer[16];
  store(buffer, x);
  if (n > 0) std::memcpy(p, buffer, static_cast<std::size_t>(n > 16 ? 16 : n) * 2);
}
LLMC_INLINE f32x16 load(const bf16* p, int n) { return load_half(p, n); }
LLMC_INLINE f32x16 load(const f16* p, int n) { return load_half(p, n); }
LLMC_INLINE void store(bf16* p, f32x16 x, int n) { store_half(p, x, n); }
LLMC_INLINE void store(f16* p, f32x16 x, int n) { store_half(p, x, n); }

#define LLMC_BOTH(f, ...) {f(a.lo, b.lo __VA_OPT__(, ) __VA_ARGS__), f(a.hi, b.hi __VA_OPT__(, ) __VA_ARGS__)}
LLMC_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_add_ps); }
LLMC_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_sub_ps); }
LLMC_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_mul_ps); }
LLMC_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_div_ps); }
LLMC_INLINE f32x16 max(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_max_ps); }
LLMC_INLINE f32x16 min(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_min_ps); }
LLMC_INLINE mask16 operator<(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_cmp_ps, _CMP_LT_OQ); }
LLMC_INLINE mask16 operator<=(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_cmp_ps, _CMP_LE_OQ); }
LLMC_INLINE mask16 operator>(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_cmp_ps, _CMP_GT_OQ); }
LLMC_INLINE mask16 operator>=(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_cmp_ps, _CMP_GE_OQ); }
LLMC_INLINE mask16 operator==(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_cmp_ps, _CMP_EQ_OQ); }
LLMC_INLINE mask16 operator!=(f32x16 a, f32x16 b) { return LLMC_BOTH(_mm256_cmp_ps, _CMP_NEQ_UQ); }
LLMC_INLINE mask16 operator&(mask16 a, mask16 b) { return LLMC_BOTH(_mm256_and_ps); }
LLMC_INLINE mask16 operator|(mask16 a, mask16 b) { return LLMC_BOTH(_mm256_or_ps); }
#undef LLMC_BOTH
LLMC_INLINE mask16 operator~(mask16 a) {
  const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  return {_mm256_xor_ps(a.lo, ones), _mm256_xor_ps(a.hi, ones)};
}
LLMC_INLINE f32x16 operator-(f32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}
LLMC_INLINE f32x16 fmadd(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
LLMC_INLINE f32x16 fnmadd(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
LLMC_INLINE f32x16 abs(f32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
LLMC_INLINE f32x16 copysign(f32x16 a, f32x16 s) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, a.lo), _mm256_and_ps(bit, s.lo)),
          _mm256_or_ps(_mm256_andnot_ps(bit, a.hi), _mm256_and_ps(bit, s.hi))};
}
LLMC_INLINE f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
LLMC_INLINE f32x16 floor(f32x16 a) { return {_mm256_floor_ps(a.lo), _mm256_floor_ps(a.hi)}; }
LLMC_INLINE f32x16 ceil(f32x16 a) { return {_mm256_ceil_ps(a.lo), _mm256_ceil_ps(a.hi)}; }
LLMC_INLINE f32x16 trunc(f32x16 a) {
  constexpr int mode = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
LLMC_INLINE f32x16 round_even(f32x16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
LLMC_INLINE __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
LLMC_INLINE __m256 scale_by_power(__m256 x, __m256 power) {  // in three factors: none leaves the exponent range
  const __m256i n = _mm256_cvtps_epi32(power);
  const __m256i third = _mm256_srai_epi32(_mm256_mullo_epi32(n, _mm256_set1_epi32(21846)), 16);
  const __m256i rest = _mm256_sub_epi32(n, _mm256_add_epi32(third, third));
  return _mm256_mul_ps(_mm256_mul_ps(_mm256_mul_ps(x, power_of_two(third)), power_of_two(third)), power_of_two(rest));
}
LLMC_INLINE f32x16 scale_by_power(f32x16 x, f32x16 n) {
  return {scale_by_power(x.lo, n.lo), scale_by_power(x.hi, n.hi)};
}

LLMC_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
LLMC_INLINE mask16 mask_first(std::int64_t n) {
  const std::int32_t* mask = lanes_below(static_cast<int>(n < 0 ? 0 : n > 16 ? 16 : n));
  return {_mm256_castsi256_ps(load_int(mask)), _mm256_castsi256_ps(load_int(mask + 8))};
}
LLMC_INLINE std::uint32_t mask_bits(mask16 m) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(m.lo) | _mm256_movemask_ps(m.hi) << 8);
}
LLMC_INLINE bool any(mask16 m) { return mask_bits(m) != 0; }

#define LLMC_REDUCE(name, op256, op128, op_ss)                                      \
  LLMC_INLINE float name(f32x16 x) {                                                \
    const __m256 a = op256(x.lo, x.hi);                                             \
    const __m128 b = op128(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); \
    const __m128 c = op128(b, _mm_movehl_ps(b, b));                                 \
    return _mm_cvtss_f32(op_ss(c, _mm_shuffle_ps(c, c, 1)));                        \
  }
LLMC_REDUCE(reduce_add, _mm256_add_ps, _mm_add_ps, _mm_add_ss)
LLMC_REDUCE(reduce_max, _mm256_max_ps, _mm_max_ps, _mm_max_ss)
LLMC_REDUCE(reduce_min, _mm256_min_ps, _mm_min_ps, _mm_min_ss)
#undef LLMC_REDUCE

LLMC_INLINE f32x16 swap_pairs(f32x16 x) { return {_mm256_permute_ps(x.lo, 0xb1), _mm256_permute_ps(x.hi, 0xb1)}; }
LLMC_INLINE void deinterleave(__m256 a, __m256 b, __m256& even, __m256& odd) {
  const __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
  even = _mm256_shuffle_ps(low, high, 0x88);
  odd = _mm256_shuffle_ps(low, high, 0xdd);
  // low = a0..3 b0..3, high = a4..7 b4..7: even = a0 a2 a4 a6 b0 b2 b4 b6
}
LLMC_INLINE void deinterleave(f32x16 a, f32x16 b, f32x16& even, f32x16& odd) {
  deinterleave(a.lo, a.hi, even.lo, odd.lo);
  deinterleave(b.lo, b.hi, even.hi, odd.hi);
}
LLMC_INLINE void interleave(__m256 even, __m256 odd, __m256& a, __m256& b) {
  const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  a = _mm256_permute2f128_ps(low, high, 0x20);
  b = _mm256_permute2f128_ps(low, high, 0x31);
}
LLMC_INLINE void interleave(f32x16 even, f32x16 odd, f32x16& a, f32x16& b) {
  interleave(even.lo, odd.lo, a.lo, a.hi);
  interleave(even.hi, odd.hi, b.lo, b.hi);
}

LLMC_INLINE bf16x32 load_pairs(const bf16* p) { return {load_int(p), load_int(p + 16)}; }
LLMC_INLINE bf16x32 broadcast_pair(const bf16* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
template <class Step>
LLMC_INLINE Step split_pairs(bf16x32 x) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(x.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.hi, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(x.lo, high)), _mm256_castsi256_ps(_mm256_and_si256(x.hi, high))}};
}
LLMC_INLINE __m256 dot_pairs(__m256 acc, __m256i a, __m256i b) {
  const __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  const __m256 sum =
      _mm256_fmadd_ps(_mm256_and_ps(_mm256_castsi256_ps(a), high), _mm256_and_ps(_mm256_castsi256_ps(b), high), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)),
                         sum);
}
LLMC_INLINE f32x16 dot_pairs(f32x16 acc, bf16x32 a, bf16x32 b) {
  return {dot_pairs(acc.lo, a.lo, b.lo), dot_pairs(acc.hi, a.hi, b.hi)};
}
LLMC_INLINE void convert_pairs(bf16* p, f32x16 x0, f32x16 x1) {
  store(p, x0);
  store(p + 16, x1);
}

}  // namespace llmc::LLMC_ISA
