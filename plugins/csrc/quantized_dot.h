// Products of codes: lines of quantized weights (unsigned bytes) times signed bytes of x, exact at every level.
//
// i32x16: sums of 16 rows, with zero_ints(), broadcast_int(n) and to_float(v).
//
// load_bytes(p): 16 uint8 as floats.
//
// Line<F>(p): a line of 64 bytes, unpacked.
//
// dot(sum, line, x): sum + line * x, x the codes of the line's columns, as spread_codes() lays them out where they are
// words.
//
// kQuadBytes<F>: bytes of four columns of x. They are codes, or in levels that multiply 16 bits at a time words in the
// order 0 2 1 3, since even and odd bytes of a weight are apart with one operation.
#pragma once
#include "quantized.h"
#ifdef LLMC_NEON
#include "quantized_neon.h"
#endif

namespace llmc::LLMC_ISA {

// a * b + c rounded once, at every level: sums of quantized products have the same bits everywhere.
#if defined(__AVX2__) || defined(LLMC_NEON)
LLMC_INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) { return fmadd(a, b, c); }
#else
// The product is exact in double; the sum is rounded to odd there (Boldo and Melquiond, "Emulation of FMA and
// correctly rounded sums", 2008), so that rounding it to float is right.
inline f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  for (int i = 0; i < 16; ++i) {
    const double product = static_cast<double>(a.v[i]) * b.v[i], addend = c.v[i];
    const double sum = product + addend, part = sum - product;
    const double error = (product - (sum - part)) + (addend - part);
    std::int64_t bits;
    std::memcpy(&bits, &sum, 8);
    if (error != 0 && error == error && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
    double odd;
    std::memcpy(&odd, &bits, 8);
    c.v[i] = static_cast<float>(odd);
  }
  return c;
}
#endif

LLMC_INLINE std::int32_t load_word(const std::byte* p) {
  std::int32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

#if defined(__AVX512F__)

typedef std::int32_t int_vector __attribute__((vector_size(64)));

struct i32x16 {
  int_vector v;  // not __m512i, which has longs: GCC would copy a sum at each change of its type, and back

  i32x16() = default;
  LLMC_INLINE i32x16(__m512i x) : v((int_vector)x) {}
  LLMC_INLINE operator __m512i() const { return (__m512i)v; }
};
LLMC_INLINE i32x16 zero_ints() { return {_mm512_setzero_si512()}; }
LLMC_INLINE i32x16 broadcast_int(std::int32_t n) { return {_mm512_set1_epi32(n)}; }
LLMC_INLINE f32x16 to_float(i32x16 x) { return {_mm512_cvtepi32_ps(x)}; }
LLMC_INLINE f32x16 load_bytes(const std::uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
LLMC_INLINE i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a, b)}; }
LLMC_INLINE f32x16 larger_bits(f32x16 a, f32x16 b) {
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
LLMC_INLINE i32x16 round_ints(f32x16 x) { return {_mm512_cvtps_epi32(x.v)}; }
LLMC_INLINE void store_codes(std::int8_t* p, i32x16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

#if defined(__AVX512VNNI__)

template <Format F>
constexpr std::int64_t kQuadBytes = 4;

template <Format F>
struct Line {
  __m512i first, second;

  LLMC_INLINE explicit Line(const std::byte* p) {
    const __m512i bytes = _mm512_loadu_si512(p);
    if constexpr (F == Format::int8) {
      first = bytes;
    } else {
      const __m512i low = _mm512_set1_epi8(15);
      first = _mm512_and_si512(bytes, low);
      second = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
    }
  }
};
template <Format F>
LLMC_INLINE i32x16 dot(i32x16 sum, const Line<F>& line, const std::byte* x) {
  sum = _mm512_dpbusd_epi32(sum, line.first, _mm512_set1_epi32(load_word(x)));
  if constexpr (F == Format::int4) sum = _mm512_dpbusd_epi32(sum, line.second, _mm512_set1_epi32(load_word(x + 4)));
  return sum;
}

#else  // products of bytes would saturate in int8: words

template <Format F>
constexpr std::int64_t kQuadBytes = F == Format::int8 ? 8 : 4;

template <Format F>
struct Line {
  __m512i first, second;  // int8: even and odd bytes as words; int4: low and high halves as bytes

  LLMC_INLINE explicit Line(const std::byte* p) {
    const __m512i bytes = _mm512_loadu_si512(p);
    if constexpr (F == Format::int8) {
      first = _mm512_and_si512(bytes, _mm512_set1_epi16(255));
      second = _mm512_srli_epi16(bytes, 8);
    } else {
      const __m512i low = _mm512_set1_epi8(15);
      first = _mm512_and_si512(bytes, low);
      second = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
    }
  }
};
template <Format F>
LLMC_INLINE i32x16 dot(i32x16 sum, const Line<F>& line, const std::byte* x) {
  const __m512i a = _mm512_set1_epi32(load_word(x)), b = _mm512_set1_epi32(load_word(x + 4));
  if constexpr (F == Format::int8) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(line.first, a));
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(line.second, b));
  } else {  // at most 4 * 15 * 127: no saturation
    const __m512i words = _mm512_add_epi16(_mm512_maddubs_epi16(line.first, a), _mm512_maddubs_epi16(line.second, b));
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
  }
  return sum;
}

#endif

#elif defined(__AVX2__)

typedef std::int32_t int_half __attribute__((vector_size(32)));

struct i32x8 {
  int_half v;  // not __m256i, as above

  i32x8() = default;
  LLMC_INLINE i32x8(__m256i x) : v((int_half)x) {}
  LLMC_INLINE operator __m256i() const { return (__m256i)v; }
};
struct i32x16 {
  i32x8 lo, hi;
};
LLMC_INLINE i32x16 zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
LLMC_INLINE i32x16 broadcast_int(std::int32_t n) { return {_mm256_set1_epi32(n), _mm256_set1_epi32(n)}; }
LLMC_INLINE f32x16 to_float(i32x16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
LLMC_INLINE f32x16 load_bytes(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float(i32x16{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
LLMC_INLINE i32x16 operator+(i32x16 a, i32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
LLMC_INLINE __m256 larger_bits(__m256 a, __m256 b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
LLMC_INLINE f32x16 larger_bits(f32x16 a, f32x16 b) { return {larger_bits(a.lo, b.lo), larger_bits(a.hi, b.hi)}; }
LLMC_INLINE i32x16 round_ints(f32x16 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
LLMC_INLINE void store_codes(std::int8_t* p, i32x16 x) {
  const __m256i words = _mm256_packs_epi32(x.lo, x.hi);    // 0-3 8-11 4-7 12-15
  const __m256i bytes = _mm256_packs_epi16(words, words);  // 0-3 8-11 twice, 4-7 12-15 twice
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(bytes, order)));
}

#if defined(__AVXVNNI__)

template <Format F>
constexpr std::int64_t kQuadBytes = 4;

template <Format F>
struct Line {
  __m256i first[2], second[2];

  LLMC_INLINE explicit Line(const std::byte* p) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; ++i) {
      const __m256i bytes = load_int(p + 32 * i);
      first[i] = F == Format::int8 ? bytes : _mm256_and_si256(bytes, low);
      second[i] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
    }
  }
};
template <Format F>
LLMC_INLINE i32x16 dot(i32x16 sum, const Line<F>& line, const std::byte* x) {
  const __m256i a = _mm256_set1_epi32(load_word(x));
  sum = {_mm256_dpbusd_avx_epi32(sum.lo, line.first[0], a), _mm256_dpbusd_avx_epi32(sum.hi, line.first[1], a)};
  if constexpr (F == Format::int4) {
    const __m256i b = _mm256_set1_epi32(load_word(x + 4));
    sum = {_mm256_dpbusd_avx_epi32(sum.lo, line.second[0], b), _mm256_dpbusd_avx_epi32(sum.hi, line.second[1], b)};
  }
  return sum;
}

#else

template <Format F>
constexpr std::int64_t kQuadBytes = F == Format::int8 ? 8 : 4;

template <Format F>
struct Line {
  __m256i first[2], second[2];  // int8: even and odd bytes as words; int4: low and high halves as bytes

  LLMC_INLINE explicit Line(const std::byte* p) {
    for (int i = 0; i < 2; ++i) {
      const __m256i bytes = load_int(p + 32 * i);
      if constexpr (F == Format::int8) {
        first[i] = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
        second[i] = _mm256_srli_epi16(bytes, 8);
      } else {
        first[i] = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
        second[i] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
      }
    }
  }
};
template <Format F>
LLMC_INLINE __m256i dot_half(__m256i sum, __m256i first, __m256i second, __m256i a, __m256i b) {
  if constexpr (F == Format::int8) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(first, a));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(second, b));
  } else {  // at most 4 * 15 * 127: no saturation
    const __m256i words = _mm256_add_epi16(_mm256_maddubs_epi16(first, a), _mm256_maddubs_epi16(second, b));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
  }
}
template <Format F>
LLMC_INLINE i32x16 dot(i32x16 sum, const Line<F>& line, const std::byte* x) {
  const __m256i a = _mm256_set1_epi32(load_word(x)), b = _mm256_set1_epi32(load_word(x + 4));
  return {dot_half<F>(sum.lo, line.first[0], line.second[0], a, b),
          dot_half<F>(sum.hi, line.first[1], line.second[1], a, b)};
}

#endif

#elif !defined(LLMC_NEON)

typedef std::int16_t short_vector __attribute__((vector_size(64)));
typedef std::uint8_t byte_vector __attribute__((vector_size(16)));

struct i32x16 {
  int_vector v;
};
LLMC_INLINE i32x16 zero_ints() { return {int_vector{}}; }
LLMC_INLINE i32x16 broadcast_int(std::int32_t n) { return {int_vector{} + n}; }
LLMC_INLINE f32x16 to_float(i32x16 x) { return {__builtin_convertvector(x.v, float_vector)}; }
LLMC_INLINE f32x16 load_bytes(const std::uint8_t* p) {
  byte_vector bytes;
  std::memcpy(&bytes, p, 16);
  return {__builtin_convertvector(bytes, float_vector)};
}
LLMC_INLINE i32x16 operator+(i32x16 a, i32x16 b) { return {a.v + b.v}; }
LLMC_INLINE f32x16 larger_bits(f32x16 a, f32x16 b) {
  const int_vector x = (int_vector)a.v, y = (int_vector)b.v;
  return {(float_vector)(x > y ? x : y)};
}
LLMC_INLINE i32x16 round_ints(f32x16 x) { return {__builtin_convertvector(round_even(x).v, int_vector)}; }
LLMC_INLINE void store_codes(std::int8_t* p, i32x16 x) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<std::int8_t>(x.v[i]);
}

template <Format F>
constexpr std::int64_t kQuadBytes = 8;

template <Format F>
struct Line {
  short_vector bytes;

  LLMC_INLINE explicit Line(const std::byte* p) { std::memcpy(&bytes, p, 64); }
};
// Four times the same words 0 2 or 1 3.
LLMC_INLINE short_vector broadcast_words(const std::byte* x) { return (short_vector)(int_vector{} + load_word(x)); }
LLMC_INLINE int_vector add_words(short_vector words) {
  const int_vector pairs = (int_vector)words;
  return ((pairs << 16) >> 16) + (pairs >> 16);
}
template <Format F>
LLMC_INLINE i32x16 dot(i32x16 sum, const Line<F>& line, const std::byte* x) {
  if constexpr (F == Format::int8) {  // at most 255 * 127: no overflow
    sum.v += add_words((line.bytes & 255) * broadcast_words(x));
    sum.v += add_words((line.bytes >> 8 & 255) * broadcast_words(x + 4));
  } else {
    sum.v +=
        add_words((line.bytes & 15) * broadcast_words(x) + (line.bytes >> 8 & 15) * broadcast_words(x + 4) +
                  (line.bytes >> 4 & 15) * broadcast_words(x + 8) + (line.bytes >> 12 & 15) * broadcast_words(x + 12));
  }
  return sum;
}

#endif

// Lines whose codes of int8 are taken for signed bytes, which is less than the code by the middle one.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
template <Format F>
constexpr bool kSignedLines = F == Format::int8;
#else
template <Format F>
constexpr bool kSignedLines = false;
#endif

// Codes of whole quads, signed bytes, as words in the order that dot() reads.
LLMC_INLINE void spread_codes(const std::int8_t* codes, std::int64_t count, std::byte* out) {
  auto* words = reinterpret_cast<std::int16_t*>(out);
  for (std::int64_t i = 0; i < count; i += 4) {
    words[i] = codes[i];
    words[i + 1] = codes[i + 2];
    words[i + 2] = codes[i + 1];
    words[i + 3] = codes[i + 3];
  }
}

}  // namespace llmc::LLMC_ISA
