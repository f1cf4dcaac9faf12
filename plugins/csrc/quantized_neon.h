// Sums of products of codes, and numbers of quantized weights, with NEON. Included by quantized_dot.h, which says what
// each function is.
#pragma once
#include "quantized.h"

namespace llmc::LLMC_ISA {

struct i32x16 {
  int32x4_t v[4];
};
LLMC_INLINE i32x16 broadcast_int(std::int32_t n) {
  const int32x4_t v = vdupq_n_s32(n);
  return {{v, v, v, v}};
}
LLMC_INLINE i32x16 zero_ints() { return broadcast_int(0); }
LLMC_INLINE f32x16 to_float(i32x16 x) { return LLMC_ONE(vcvtq_f32_s32, x); }
LLMC_INLINE i32x16 widen_words(uint16x8_t low, uint16x8_t high) {
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))}};
}
LLMC_INLINE f32x16 load_bytes(const std::uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  return to_float(widen_words(vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)));
}
LLMC_INLINE i32x16 operator+(i32x16 a, i32x16 b) { return LLMC_TWO(vaddq_s32, a, b); }
LLMC_INLINE float32x4_t larger_bits(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b)));
}
LLMC_INLINE f32x16 larger_bits(f32x16 a, f32x16 b) { return LLMC_TWO(larger_bits, a, b); }
LLMC_INLINE i32x16 round_ints(f32x16 x) { return LLMC_ONE(vcvtnq_s32_f32, x); }
LLMC_INLINE void store_codes(std::int8_t* p, i32x16 x) {
  const int16x8_t low = vmovn_high_s32(vmovn_s32(x.v[0]), x.v[1]), high = vmovn_high_s32(vmovn_s32(x.v[2]), x.v[3]);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(low), high));
}
// Four bytes of x, four times.
LLMC_INLINE int32x4_t repeat_word(const std::byte* x) {
  std::int32_t word;
  std::memcpy(&word, x, 4);
  return vdupq_n_s32(word);
}

#if defined(__ARM_FEATURE_DOTPROD)

template <Format F>
constexpr std::int64_t kQuadBytes = 4;

template <Format F>
LLMC_INLINE int32x4_t dot(int32x4_t sum, uint8x16_t line, int8x16_t x, int8x16_t next) {
  if constexpr (F == Format::int4) {
    sum = vdotq_s32(sum, vreinterpretq_s8_u8(line & 15), x);
    return vdotq_s32(sum, vreinterpretq_s8_u8(line >> 4), next);
  }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_s32(sum, line, x);
#else
  return vdotq_s32(sum, vreinterpretq_s8_u8(line ^ 128), x);
#endif
}
LLMC_INLINE int8x16_t repeat_codes(const std::byte* x) { return vreinterpretq_s8_s32(repeat_word(x)); }

#else  // words: products of eight bits of int8 and of x fit into 16, and so do sums of four of int4

template <Format F>
constexpr std::int64_t kQuadBytes = 8;

LLMC_INLINE int16x8_t words(uint16x8_t x) { return vreinterpretq_s16_u16(x); }
LLMC_INLINE int16x8_t repeat_codes(const std::byte* x) { return vreinterpretq_s16_s32(repeat_word(x)); }

#endif

template <Format F>
struct Line {
  uint8x16_t v[4];

  LLMC_INLINE explicit Line(const std::byte* p) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(p);
    v[0] = vld1q_u8(bytes);
    v[1] = vld1q_u8(bytes + 16);
    v[2] = vld1q_u8(bytes + 32);
    v[3] = vld1q_u8(bytes + 48);
  }
};

#if defined(__ARM_FEATURE_DOTPROD)

template <Format F>
LLMC_INLINE i32x16 dot(i32x16 sum, const Line<F>& line, const std::byte* x) {
  const int8x16_t a = repeat_codes(x), b = F == Format::int4 ? repeat_codes(x + 4) : a;
  return {{dot<F>(sum.v[0], line.v[0], a, b), dot<F>(sum.v[1], line.v[1], a, b), dot<F>(sum.v[2], line.v[2], a, b),
           dot<F>(sum.v[3], line.v[3], a, b)}};
}

#else

LLMC_INLINE int32x4_t dot_int8(int32x4_t sum, uint8x16_t line, int16x8_t even, int16x8_t odd) {
  const uint16x8_t pairs = vreinterpretq_u16_u8(line);
  return vpadalq_s16(vpadalq_s16(sum, words(pairs & 255) * even), words(pairs >> 8) * odd);
}
LLMC_INLINE int32x4_t dot_int4(int32x4_t sum, uint8x16_t line, const int16x8_t (&x)[4]) {
  const uint16x8_t pairs = vreinterpretq_u16_u8(line);
  int16x8_t products = words(pairs & 15) * x[0];
  products = vmlaq_s16(products, words((pairs >> 8) & 15), x[1]);
  products = vmlaq_s16(products, words((pairs >> 4) & 15), x[2]);
  return vpadalq_s16(sum, vmlaq_s16(products, words(pairs >> 12), x[3]));
}
template <Format F>
LLMC_INLINE i32x16 dot(i32x16 sum, const Line<F>& line, const std::byte* x) {
  if constexpr (F == Format::int8) {
    const int16x8_t even = repeat_codes(x), odd = repeat_codes(x + 4);
    return {{dot_int8(sum.v[0], line.v[0], even, odd), dot_int8(sum.v[1], line.v[1], even, odd),
             dot_int8(sum.v[2], line.v[2], even, odd), dot_int8(sum.v[3], line.v[3], even, odd)}};
  } else {
    const int16x8_t codes[4] = {repeat_codes(x), repeat_codes(x + 4), repeat_codes(x + 8), repeat_codes(x + 12)};
    return {{dot_int4(sum.v[0], line.v[0], codes), dot_int4(sum.v[1], line.v[1], codes),
             dot_int4(sum.v[2], line.v[2], codes), dot_int4(sum.v[3], line.v[3], codes)}};
  }
}

#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Adds so many lines of panel i times the rows of x, an even number of them: an instruction multiplies two outputs by
// two rows, eight columns deep, twice what a dot product does.
template <Format F, int R, int P>
LLMC_INLINE void add_matrices(i32x16 (&sum)[R][P], int i, const std::byte* lines, std::int64_t count,
                              const std::byte* x, std::int64_t stride) {
  constexpr int kPairs = R / 2;
  int32x4_t product[kPairs][8] = {};
  const auto step = [&](const std::byte* codes, const uint8x16_t(&near)[4], const uint8x16_t(&far)[4]) {
    int8x16_t rows[kPairs];
    LLMC_UNROLL
    for (int r = 0; r < kPairs; ++r) {
      const auto* c = reinterpret_cast<const std::int8_t*>(codes + 2 * r * stride);
      rows[r] = vcombine_s8(vld1_s8(c), vld1_s8(c + stride));
    }
    LLMC_UNROLL
    for (int q = 0; q < 4; ++q) {
      const uint32x4_t a = vreinterpretq_u32_u8(near[q]), b = vreinterpretq_u32_u8(far[q]);
      const uint8x16_t even = vreinterpretq_u8_u32(vzip1q_u32(a, b)), odd = vreinterpretq_u8_u32(vzip2q_u32(a, b));
      LLMC_UNROLL
      for (int r = 0; r < kPairs; ++r) {
        product[r][2 * q] = vusmmlaq_s32(product[r][2 * q], even, rows[r]);
        product[r][2 * q + 1] = vusmmlaq_s32(product[r][2 * q + 1], odd, rows[r]);
      }
    }
  };
  if constexpr (F == Format::int4) {
    for (std::int64_t l = 0; l < count; ++l) {
      const Line<F> line(lines + l * 64);
      const uint8x16_t low[4] = {line.v[0] & 15, line.v[1] & 15, line.v[2] & 15, line.v[3] & 15};
      const uint8x16_t high[4] = {line.v[0] >> 4, line.v[1] >> 4, line.v[2] >> 4, line.v[3] >> 4};
      step(x + l * 8, low, high);
    }
  } else {
    std::int64_t l = 0;
    for (; l + 1 < count; l += 2) step(x + l * 4, Line<F>(lines + l * 64).v, Line<F>(lines + l * 64 + 64).v);
    const uint8x16_t nothing[4] = {};  // the codes that follow are another block's
    if (l < count) step(x + l * 4, Line<F>(lines + l * 64).v, nothing);
  }
  LLMC_UNROLL
  for (int r = 0; r < kPairs; ++r) {
    LLMC_UNROLL
    for (int q = 0; q < 4; ++q) {
      sum[2 * r][i].v[q] += vuzp1q_s32(product[r][2 * q], product[r][2 * q + 1]);
      sum[2 * r + 1][i].v[q] += vuzp2q_s32(product[r][2 * q], product[r][2 * q + 1]);
    }
  }
}
#endif

LLMC_INLINE i32x16 load_ints(const std::byte* p) {
  const auto* q = reinterpret_cast<const std::uint8_t*>(p);
  return {{vreinterpretq_s32_u8(vld1q_u8(q)), vreinterpretq_s32_u8(vld1q_u8(q + 16)),
           vreinterpretq_s32_u8(vld1q_u8(q + 32)), vreinterpretq_s32_u8(vld1q_u8(q + 48))}};
}
LLMC_INLINE i32x16 load_words(const std::byte* p) {
  const auto* q = reinterpret_cast<const std::uint8_t*>(p);
  return widen_words(vreinterpretq_u16_u8(vld1q_u8(q)), vreinterpretq_u16_u8(vld1q_u8(q + 16)));
}
LLMC_INLINE i32x16 field(i32x16 x, int shift, int mask) {
  const int32x4_t right = vdupq_n_s32(-shift), bits = vdupq_n_s32(mask);
  return {{vshlq_s32(x.v[0], right) & bits, vshlq_s32(x.v[1], right) & bits, vshlq_s32(x.v[2], right) & bits,
           vshlq_s32(x.v[3], right) & bits}};
}
LLMC_INLINE float32x4_t e4m3(int32x4_t code) {  // moved to where float16 has exponent and mantissa it is 2^-8 times it
  const int32x4_t half = ((code & 0x7f) << 7) | ((code & 0x80) << 8);
  return widen_f16(vmovn_u32(vreinterpretq_u32_s32(half))) * 256.0f;
}
LLMC_INLINE f32x16 e4m3(i32x16 code) { return LLMC_ONE(e4m3, code); }
LLMC_INLINE uint8x16_t pair(float32x4_t even, float32x4_t odd) {
  return vreinterpretq_u8_u32((vreinterpretq_u32_f32(even) >> 16) | vreinterpretq_u32_f32(odd));
}
LLMC_INLINE void store_pairs(std::byte* p, f32x16 even, f32x16 odd) {
  auto* q = reinterpret_cast<std::uint8_t*>(p);
  vst1q_u8(q, pair(even.v[0], odd.v[0]));
  vst1q_u8(q + 16, pair(even.v[1], odd.v[1]));
  vst1q_u8(q + 32, pair(even.v[2], odd.v[2]));
  vst1q_u8(q + 48, pair(even.v[3], odd.v[3]));
}

}  // namespace llmc::LLMC_ISA
