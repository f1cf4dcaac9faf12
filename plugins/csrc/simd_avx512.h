// f32x16 as one zmm register (AVX-512 F, BW, DQ, VL; bf16 instructions where the level has them). Included by simd.h.
#pragma once
#include <immintrin.h>

namespace llmc::LLMC_ISA {

struct f32x16 {
  __m512 v;
};
struct mask16 {
  __mmask16 v;
};
struct bf16x32 {
  __m512i v;
};

LLMC_INLINE __mmask16 lanes_below(int n) {
  return n <= 0 ? 0 : n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
}

LLMC_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
LLMC_INLINE f32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
LLMC_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
LLMC_INLINE f32x16 load(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes_below(n), p)}; }
LLMC_INLINE void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
LLMC_INLINE void store(float* p, f32x16 x, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), x.v); }

LLMC_INLINE f32x16 widen_bf16(__m256i x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
LLMC_INLINE __m256i narrow_bf16(f32x16 x) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
#else
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(nearest, nan, quiet), 16));
#endif
}
LLMC_INLINE f32x16 load(const bf16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
LLMC_INLINE f32x16 load(const bf16* p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(lanes_below(n), p)); }
LLMC_INLINE void store(bf16* p, f32x16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x)); }
LLMC_INLINE void store(bf16* p, f32x16 x, int n) { _mm256_mask_storeu_epi16(p, lanes_below(n), narrow_bf16(x)); }

LLMC_INLINE __m256i narrow_f16(f32x16 x) { return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LLMC_INLINE f32x16 load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
LLMC_INLINE f32x16 load(const f16* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(n), p))}; }
LLMC_INLINE void store(f16* p, f32x16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(x)); }
LLMC_INLINE void store(f16* p, f32x16 x, int n) { _mm256_mask_storeu_epi16(p, lanes_below(n), narrow_f16(x)); }

LLMC_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
LLMC_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
LLMC_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
LLMC_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
LLMC_INLINE f32x16 operator-(f32x16 a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
LLMC_INLINE f32x16 fmadd(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LLMC_INLINE f32x16 fnmadd(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
LLMC_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
LLMC_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
LLMC_INLINE f32x16 abs(f32x16 a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
LLMC_INLINE f32x16 copysign(f32x16 magnitude, f32x16 sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(bit, magnitude.v), _mm512_and_ps(bit, sign.v))};
}
LLMC_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
LLMC_INLINE f32x16 floor(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
LLMC_INLINE f32x16 ceil(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)}; }
LLMC_INLINE f32x16 trunc(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)}; }
LLMC_INLINE f32x16 round_even(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
LLMC_INLINE f32x16 scale_by_power(f32x16 x, f32x16 n) { return {_mm512_scalef_ps(x.v, n.v)}; }

LLMC_INLINE mask16 operator<(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
LLMC_INLINE mask16 operator<=(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
LLMC_INLINE mask16 operator>(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
LLMC_INLINE mask16 operator>=(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
LLMC_INLINE mask16 operator==(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
LLMC_INLINE mask16 operator!=(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }
LLMC_INLINE mask16 operator&(mask16 a, mask16 b) { return {static_cast<__mmask16>(a.v & b.v)}; }
LLMC_INLINE mask16 operator|(mask16 a, mask16 b) { return {static_cast<__mmask16>(a.v | b.v)}; }
LLMC_INLINE mask16 operator~(mask16 a) { return {static_cast<__mmask16>(~a.v)}; }
LLMC_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
LLMC_INLINE mask16 mask_first(std::int64_t n) { return {lanes_below(static_cast<int>(n < 0 ? 0 : n > 16 ? 16 : n))}; }
LLMC_INLINE std::uint32_t mask_bits(mask16 m) { return m.v; }
LLMC_INLINE bool any(mask16 m) { return m.v != 0; }

#define LLMC_REDUCE(name, op, scalar)                                                      \
  LLMC_INLINE float name(f32x16 x) {                                                       \
    const __m256 a = op(256, _mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1)); \
    const __m128 b = op(, _mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));         \
    const __m128 c = op(, b, _mm_movehl_ps(b, b));                                         \
    return _mm_cvtss_f32(scalar(c, _mm_shuffle_ps(c, c, 1)));                              \
  }
#define LLMC_ADD(w, a, b) _mm##w##_add_ps(a, b)
#define LLMC_MAX(w, a, b) _mm##w##_max_ps(a, b)
#define LLMC_MIN(w, a, b) _mm##w##_min_ps(a, b)
LLMC_REDUCE(reduce_add, LLMC_ADD, _mm_add_ss)
LLMC_REDUCE(reduce_max, LLMC_MAX, _mm_max_ss)
LLMC_REDUCE(reduce_min, LLMC_MIN, _mm_min_ss)
#undef LLMC_REDUCE
#undef LLMC_ADD
#undef LLMC_MAX
#undef LLMC_MIN

LLMC_INLINE f32x16 swap_pairs(f32x16 x) { return {_mm512_permute_ps(x.v, 0xb1)}; }
LLMC_INLINE void deinterleave(f32x16 a, f32x16 b, f32x16& even, f32x16& odd) {
  const __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = {_mm512_permutex2var_ps(a.v, index, b.v)};
  odd = {_mm512_permutex2var_ps(a.v, _mm512_add_epi32(index, _mm512_set1_epi32(1)), b.v)};
}
LLMC_INLINE void interleave(f32x16 even, f32x16 odd, f32x16& a, f32x16& b) {
  const __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  a = {_mm512_permutex2var_ps(even.v, index, odd.v)};
  b = {_mm512_permutex2var_ps(even.v, _mm512_add_epi32(index, _mm512_set1_epi32(8)), odd.v)};
}

LLMC_INLINE bf16x32 load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
LLMC_INLINE bf16x32 broadcast_pair(const bf16* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
// The even and the odd elements as floats.
template <class Step>
LLMC_INLINE Step split_pairs(bf16x32 x) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16))}, {_mm512_castsi512_ps(_mm512_and_si512(x.v, high))}};
}
LLMC_INLINE f32x16 dot_pairs(f32x16 acc, bf16x32 a, bf16x32 b) {
#ifdef __AVX512BF16__
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a.v, high)),
                                     _mm512_castsi512_ps(_mm512_and_si512(b.v, high)), acc.v);
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16)), sum)};
#endif
}
LLMC_INLINE void convert_pairs(bf16* p, f32x16 x0, f32x16 x1) {
  store(p, x0);
  store(p + 16, x1);
}

}  // namespace llmc::LLMC_ISA
