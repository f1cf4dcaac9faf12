// Products of quantized weights in bfloat16 or float32: a block of some panels is expanded in the first-level cache and
// multiplied with all rows. Every output is one chain of additions, the same for any number of rows.
#pragma once
#include "quantized_vector.h"

namespace llmc::LLMC_ISA {

// What makes the exponent of an E4M3 number that of a float. Those below 2^-6 come from between 2^-6 and 2^-5: as
// subnormal floats they would cost a hundred cycles each.
constexpr std::int32_t kE4m3Bias = 120 << 23;

// Bits [shift, shift + ..) of 16 ints; E4M3 patterns as floats; two vectors whose numbers are exact in bfloat16, as
// pairs.
#if defined(__AVX512F__)
LLMC_INLINE i32x16 load_ints(const std::byte* p) { return {_mm512_loadu_si512(p)}; }
LLMC_INLINE i32x16 load_words(const std::byte* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
LLMC_INLINE i32x16 field(i32x16 x, int shift, int mask) {
  return {_mm512_and_si512(_mm512_srli_epi32(x, static_cast<unsigned>(shift)), _mm512_set1_epi32(mask))};
}
LLMC_INLINE f32x16 e4m3(i32x16 code) {
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24);
  const __m512i rest = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
  const __mmask16 small = _mm512_cmplt_epi32_mask(rest, _mm512_set1_epi32(8));
  const __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(rest, 20), _mm512_set1_epi32(kE4m3Bias));
  const __m512 v = _mm512_castsi512_ps(_mm512_mask_add_epi32(bits, small, bits, _mm512_set1_epi32(1 << 23)));
  const __m512 magnitude = _mm512_mask_sub_ps(v, small, v, _mm512_set1_ps(0x1p-6f));
  return {_mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_castps_si512(magnitude)))};
}
LLMC_INLINE void store_pairs(std::byte* p, f32x16 even, f32x16 odd) {
  _mm512_storeu_si512(p,
                      _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even.v), 16), _mm512_castps_si512(odd.v)));
}
#elif defined(__AVX2__)
LLMC_INLINE i32x16 load_ints(const std::byte* p) { return {load_int(p), load_int(p + 32)}; }
LLMC_INLINE i32x16 load_words(const std::byte* p) {
  const __m256i x = load_int(p);
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
LLMC_INLINE i32x16 field(i32x16 x, int shift, int mask) {
  const __m256i bits = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(_mm256_srli_epi32(x.lo, shift), bits),
          _mm256_and_si256(_mm256_srli_epi32(x.hi, shift), bits)};
}
LLMC_INLINE __m256 e4m3(__m256i code) {
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(0x80)), 24);
  const __m256i rest = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
  const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), rest);
  const __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(rest, 20), _mm256_set1_epi32(kE4m3Bias));
  const __m256 v = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_and_si256(small, _mm256_set1_epi32(1 << 23))));
  const __m256 magnitude = _mm256_sub_ps(v, _mm256_and_ps(_mm256_castsi256_ps(small), _mm256_set1_ps(0x1p-6f)));
  return _mm256_or_ps(_mm256_castsi256_ps(sign), magnitude);
}
LLMC_INLINE f32x16 e4m3(i32x16 code) { return {e4m3(code.lo), e4m3(code.hi)}; }
LLMC_INLINE __m256i pair(__m256 even, __m256 odd) {
  return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd));
}
LLMC_INLINE void store_pairs(std::byte* p, f32x16 even, f32x16 odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pair(even.lo, odd.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), pair(even.hi, odd.hi));
}
#elif !defined(LLMC_NEON)
LLMC_INLINE i32x16 load_ints(const std::byte* p) {
  i32x16 x;
  std::memcpy(&x, p, 64);
  return x;
}
LLMC_INLINE i32x16 load_words(const std::byte* p) {
  half_vector words;
  std::memcpy(&words, p, 32);
  return {__builtin_convertvector(words, int_vector)};
}
LLMC_INLINE i32x16 field(i32x16 x, int shift, int mask) { return {x.v >> shift & mask}; }
LLMC_INLINE f32x16 e4m3(i32x16 code) {
  const int_vector rest = code.v & 0x7f, small = rest < 8;
  const float_vector v = (float_vector)((rest << 20) + kE4m3Bias + (small & (1 << 23)));
  const float_vector magnitude = v - (float_vector)(small & 0x3c800000);  // 2^-6
  return {(float_vector)((int_vector)magnitude | (code.v & 0x80) << 24)};
}
LLMC_INLINE void store_pairs(std::byte* p, f32x16 even, f32x16 odd) {
  const int_vector pairs = ((int_vector)even.v >> 16 & 0xffff) | (int_vector)odd.v;
  std::memcpy(p, &pairs, 64);
}
#endif

// The numbers of column j of a line, without zero and scale.
template <Format F>
LLMC_INLINE f32x16 column(i32x16 line, int j) {
  if constexpr (F == Format::fp8) return e4m3(field(line, 8 * j, 255));
  if constexpr (F == Format::int8) return to_float(field(line, 8 * j, 255));
  return to_float(field(line, j < 4 ? 8 * j : 8 * j - 28, 15));
}

#if defined(__AVX512F__)
// 32 E4M3 numbers in bfloat16: exponent and mantissa move into place, the eight below 2^-6 are looked up.
LLMC_INLINE void e4m3_line(const std::byte* p, std::byte* out) {
  alignas(64) static constexpr std::int16_t kSmall[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i small = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kSmall)));
  const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i rest = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(0x7f0));
  const __mmask32 few = _mm512_cmplt_epu16_mask(rest, _mm512_set1_epi16(0x80));
  const __m512i magnitude =
      _mm512_mask_permutexvar_epi16(_mm512_add_epi16(rest, _mm512_set1_epi16(120 << 7)), few, code, small);
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
  _mm512_storeu_si512(out, _mm512_or_si512(magnitude, sign));
}
#endif

// A block of a panel, ready to be multiplied: bfloat16 [columns / 2][16][2] of codes minus zeros (without float zeros),
// or float32 [columns][16] of numbers.
template <Format F, Zero Z, bool kBfloat16>
void expand(const QuantizedPanels& w, std::int64_t panel, const Block& block, std::byte* out) {
  const std::byte* p = w.lines_of(panel, block);
  f32x16 centre = zero();
  if constexpr (F != Format::fp8 && Z == Zero::middle) centre = broadcast(F == Format::int8 ? 128.0f : 8.0f);
  if constexpr (Z == Zero::integer) centre = load_bytes(w.integer_zeros(panel, block.group));
  const f32x16 scale = w.scales(panel, block.group);
  f32x16 offset = zero();
  if constexpr (Z == Zero::offset) offset = w.offsets(panel, block.group);
  const auto number = [&](i32x16 line, int j) {
    f32x16 v = column<F>(line, j);
    if constexpr (F != Format::fp8 && Z != Zero::offset) v = v - centre;
    if constexpr (!kBfloat16) v = v * scale;
    if constexpr (!kBfloat16 && Z == Zero::offset) v = v + offset;
    return v;
  };
  constexpr int kColumns = static_cast<int>(line_columns(F));
#if defined(__AVX512F__)
  if constexpr (F == Format::fp8 && kBfloat16) {
    for (std::int64_t l = 0; l < block.lines; ++l, p += 32, out += 64) e4m3_line(p, out);
    return;
  }
#endif
  for (std::int64_t l = 0; l < block.lines; ++l, p += line_bytes(F)) {
    const i32x16 line = F == Format::fp8 ? load_words(p) : load_ints(p);
    for (int j = 0; j < kColumns; j += 2) {
      const f32x16 even = number(line, j), odd = number(line, j + 1);
      if constexpr (kBfloat16) {
        store_pairs(out, even, odd);
        out += 64;
      } else {
        store(reinterpret_cast<float*>(out), even);
        store(reinterpret_cast<float*>(out) + 16, odd);
        out += 128;
      }
    }
  }
}

// Bytes of a panel's block, with the columns that fill its last line.
template <bool kBfloat16>
constexpr std::int64_t kExpandedBytes = (kBlockColumns + 8) * (kBfloat16 ? 32 : 64);

#if defined(__AVX512F__)
constexpr int kFloatRows = 4, kFloatPanels = 4;
#elif defined(__AVX2__) || defined(LLMC_NEON)
constexpr int kFloatRows = 4, kFloatPanels = 1;
#else
constexpr int kFloatRows = 2, kFloatPanels = 1;
#endif

// A block times R rows: in bfloat16 the sum of the block is scaled, in float32 it continues the sum so far.
template <class F, Zero Z, int R, int P>
void expanded_rows(const QuantizedProduct& p, const std::byte* expanded, std::int64_t row, std::int64_t panel,
                   std::int64_t number) {
  constexpr bool kScaled = !std::is_same_v<F, F32Format>;
  const Block& block = p.w.block[number];
  const std::int64_t columns = block.lines * line_columns(p.w.how.format);
  const std::int64_t steps = kScaled ? columns / 2 : block.columns;
  const std::byte* x = p.x.data + row * p.x.stride;
  const std::byte* codes = x + block.line * line_columns(p.w.how.format) * column_bytes(p.w.how);
  float* y = p.y + row * p.y_stride + panel * 16;
  const int last = p.lanes(panel + P - 1);
  const auto lanes = [&](int i) { return i + 1 < P ? 16 : last; };

  f32x16 acc[R][P], sum[R][P];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int i = 0; i < P; ++i) {
      acc[r][i] = number == 0 ? zero() : load(y + r * p.y_stride + i * 16, lanes(i));
      sum[r][i] = kScaled ? zero() : acc[r][i];
    }
  }
  add_steps<F>(sum, expanded, kExpandedBytes<kScaled>, codes, p.x.stride, 0, steps);
  const bool finish = number + 1 == p.w.blocks && p.bias != nullptr;
  LLMC_UNROLL
  for (int i = 0; i < P; ++i) {
    const f32x16 bias = finish ? load(p.bias + (panel + i) * 16, lanes(i)) : zero();
    const BlockScale<Z> scale(p.w, panel + i, block);
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      f32x16 v = sum[r][i];
      if constexpr (kScaled) {
        const std::int64_t at = number * p.x.pitch + row + r;
        v = scale.add(acc[r][i], v, p.x.factor[at], p.x.sum[at]);
      }
      store(y + r * p.y_stride + i * 16, finish ? v + bias : v, lanes(i));
    }
  }
}

// All rows, R at a time as long as there are so many.
template <class F, Zero Z, int P, int R = kFloatRows>
void expanded_block(const QuantizedProduct& p, const std::byte* expanded, std::int64_t row, std::int64_t row_end,
                    std::int64_t panel, std::int64_t number) {
  for (; row + R <= row_end; row += R) expanded_rows<F, Z, R, P>(p, expanded, row, panel, number);
  if constexpr (R > 1) expanded_block<F, Z, P, R / 2>(p, expanded, row, row_end, panel, number);
}

template <Format F, Zero Z, bool kBfloat16>
void expanded_vectors(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                      std::int64_t panel_end) {
  using Multiply = std::conditional_t<kBfloat16, Bf16Format, F32Format>;
  // Zeros are in the expanded numbers, but for float zeros of bfloat16.
  constexpr Zero kRest = kBfloat16 && Z == Zero::offset ? Zero::offset : Zero::middle;
  constexpr std::int64_t kBytes = kExpandedBytes<kBfloat16>;
  alignas(64) std::byte expanded[kFloatPanels * kBytes];
  for (std::int64_t panel = panel_begin; panel < panel_end; panel += kFloatPanels) {
    const std::int64_t count = std::min<std::int64_t>(kFloatPanels, panel_end - panel);
    for (std::int64_t b = 0; b < p.w.blocks; ++b) {
      for (std::int64_t i = 0; i < count; ++i) {
        expand<F, Z, kBfloat16>(p.w, panel + i, p.w.block[b], expanded + i * kBytes);
      }
      if (count == kFloatPanels) {
        expanded_block<Multiply, kRest, kFloatPanels>(p, expanded, row_begin, row_end, panel, b);
        continue;
      }
      for (std::int64_t i = 0; i < count; ++i) {
        expanded_block<Multiply, kRest, 1>(p, expanded + i * kBytes, row_begin, row_end, panel + i, b);
      }
    }
  }
}

}  // namespace llmc::LLMC_ISA
