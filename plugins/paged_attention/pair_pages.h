// A tile of the cache as pairs of bf16, or of integers. Codes of 8 bits are exact, and their scales are kept apart;
// int4 is rounded.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include "job.h"

namespace llmc::LLMC_ISA {

constexpr std::int64_t kPairs = 2 * kLanes;  // numbers of a vector of pairs

// Which of 32 numbers, the first ones of 16 pairs and then the second ones, stands where in the pairs.
LLMC_INLINE __m512i pair_order() {
  return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                          3, 18, 2, 17, 1, 16, 0);
}

// Pairs of bf16: of codes, which are exact, the upper halves.
template <class T>
LLMC_INLINE __m512i pairs_of(const f32x16& even, const f32x16& odd) {
  if constexpr (kScaled<T>) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
    return _mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(odd.v), upper));
  } else {
    return _mm512_permutexvar_epi16(pair_order(), reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v)));
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

// 32 numbers as they are multiplied; those not in the mask are 0.
LLMC_INLINE __m512i load_words(const bf16* p, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, p); }
LLMC_INLINE __m512i load_words(const i8* p, __mmask32 mask) {
  return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, p));
}
// bf16 of the codes of E4M3 without their sign, times 2^-8 as load gives them.
struct E4m3Words {
  alignas(64) std::uint16_t bits[128] = {};

  constexpr E4m3Words() {
    for (int code = 1; code < 128; ++code) {
      int exponent = code >> 3, digits = code & 7;
      if (exponent == 0) {  // subnormal, which bf16 need not be
        for (exponent = 1; digits < 8; --exponent) digits *= 2;
      }
      bits[code] = static_cast<std::uint16_t>((exponent + 112) << 7 | (digits & 7) << 4);
    }
  }
};
inline constexpr E4m3Words kE4m3Words;

LLMC_INLINE __m512i load_words(const e4m3* p, __mmask32 mask) {
  const auto table = [](int i) { return _mm512_load_si512(kE4m3Words.bits + i * 32); };
  const __m512i code = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, p));
  const __m512i low = _mm512_permutex2var_epi16(table(0), code, table(1));
  const __m512i high = _mm512_permutex2var_epi16(table(2), code, table(3));
  const __m512i magnitude = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(code, _mm512_set1_epi16(64)), high);
  return _mm512_or_si512(magnitude, _mm512_and_si512(code, _mm512_set1_epi16(static_cast<short>(0x8000))));
}
LLMC_INLINE __mmask32 first_words(std::int64_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

// Pairs of dims d and d + 1 from a page of keys of 8 bits. Behind the last dim stands anything: queries are 0 there.
template <class T>
LLMC_INLINE __m512i load_key_pairs(const T* page, std::int64_t d) {
  return _mm512_permutexvar_epi16(pair_order(), load_words(page + d * kLanes, first_words(kPairs)));
}

// The same of a page, [ceil(dims / 2)][16][2].
template <class T, class Number>
[[gnu::noinline]] void pair_key_words(const T* page, std::int64_t dims, Number* out) {
  for (std::int64_t d = 0; d < dims; d += 2) _mm512_storeu_si512(out + d * kLanes, load_key_pairs(page, d));
}

// Pairs of the first, and of the last 16 of 32 numbers.
LLMC_INLINE __m512i low_pairs(__m512i even, __m512i odd) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return _mm512_permutex2var_epi16(even, order, odd);
}
LLMC_INLINE __m512i high_pairs(__m512i even, __m512i odd) {
  const __m512i order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22,
                                         53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  return _mm512_permutex2var_epi16(even, order, odd);
}

// Pairs of positions from a page of values: 16 dims of pair p at out + d / 16 * step + p * 32.
template <class T, class Number>
[[gnu::noinline]] void pair_value_words(const T* page, std::int64_t dims, std::int64_t step, Number* out) {
  for (int j = 0; j < kLanes; j += 2, page += 2 * dims, out += 2 * kLanes) {
    Number* place = out;
    for (std::int64_t d = 0; d < dims; d += 2 * kLanes, place += 2 * step) {
      const __mmask32 mask = first_words(dims - d);
      const __m512i even = load_words(page + d, mask), odd = load_words(page + dims + d, mask);
      _mm512_storeu_si512(place, low_pairs(even, odd));
      if (d + kLanes < dims) _mm512_storeu_si512(place + step, high_pairs(even, odd));
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

}  // namespace llmc::LLMC_ISA
#endif
