// The numbers of a quantized cache: codes to floats, 16 at a time, and rows of floats to codes.
#pragma once
#include <bit>

#include "weights.h"

namespace llmc {

// Codes that only what follows looks into: int8, E4M3 (4 bits of exponent, 3 of mantissa), and two of int4.
struct i8 {
  std::int8_t bits;
};
struct e4m3 {
  std::uint8_t bits;
};
struct i4 {
  std::uint8_t bits;
};

}  // namespace llmc

namespace llmc::LLMC_ISA {

template <class T>
constexpr KvType kKvType = KvType::f32;
template <>
constexpr KvType kKvType<bf16> = KvType::bf16;
template <>
constexpr KvType kKvType<f16> = KvType::f16;
template <>
constexpr KvType kKvType<e4m3> = KvType::e4m3;
template <>
constexpr KvType kKvType<i8> = KvType::i8;
template <>
constexpr KvType kKvType<i4> = KvType::i4;

// A scale for each position, by which sums over the codes are multiplied.
template <class T>
constexpr bool kScaled = std::is_same_v<T, i8> || std::is_same_v<T, e4m3>;
template <class T>
constexpr bool kQuantized = kScaled<T> || std::is_same_v<T, i4>;

// Keys are stored rotated, and queries are rotated to meet them: few large dims then spoil no others where a scale
// makes steps alike, and errors of e4m3, which go with the numbers, do not gather where queries are large. So are
// values of int4, and what was made of them is rotated back.
template <class T>
constexpr bool kRotated = kQuantized<T>;
template <class T>
constexpr bool kRotatesValues = std::is_same_v<T, i4>;

// load(p), load(p, n): codes as floats, those of e4m3 times 2^-8; moving the bits to where float16 has them makes that.
#if defined(__AVX512F__)
LLMC_INLINE f32x16 widen(__m128i x, i8) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x))}; }
LLMC_INLINE f32x16 widen(__m128i x, e4m3) {
  const __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
  return {_mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16(static_cast<short>(0xbf80))))};
}
LLMC_INLINE __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
LLMC_INLINE __m128i load_bytes(const void* p, int n) { return _mm_maskz_loadu_epi8(lanes_below(n), p); }
#elif defined(__AVX2__)
LLMC_INLINE f32x16 widen(__m128i x, i8) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
LLMC_INLINE f32x16 widen(__m128i x, e4m3) {
  const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
  const __m256i half = _mm256_and_si256(bits, _mm256_set1_epi16(static_cast<short>(0xbf80)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
LLMC_INLINE __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
LLMC_INLINE __m128i load_bytes(const void* p, int n) {
  alignas(16) std::uint8_t bytes[16] = {};
  if (n > 0) std::memcpy(bytes, p, static_cast<std::size_t>(n > 16 ? 16 : n));
  return load_bytes(bytes);
}
#endif
#if defined(LLMC_NEON)
using byte_vector = int8x16_t;

LLMC_INLINE byte_vector load_bytes(const void* p) { return vld1q_s8(static_cast<const std::int8_t*>(p)); }
LLMC_INLINE byte_vector load_bytes(const void* p, int n) {
  std::int8_t bytes[16] = {};
  std::memcpy(bytes, p, static_cast<std::size_t>(clamp_lanes(n)));
  return vld1q_s8(bytes);
}
LLMC_INLINE f32x16 widen(byte_vector x, i8) {
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
LLMC_INLINE f32x16 widen(byte_vector x, e4m3) {
  const auto half = [](int16x8_t bits) { return vreinterpretq_u16_s16(bits << 7) & 0xbf80; };
  const uint16x8_t low = half(vmovl_s8(vget_low_s8(x))), high = half(vmovl_high_s8(x));
  return {{widen_f16(vget_low_u16(low)), widen_f16(vget_high_u16(low)), widen_f16(vget_low_u16(high)),
           widen_f16(vget_high_u16(high))}};
}
LLMC_INLINE byte_vector bits_of(byte_vector x, char mask) { return x & static_cast<std::int8_t>(mask); }
LLMC_INLINE byte_vector either(byte_vector a, byte_vector b) { return a | b; }
template <int N>
LLMC_INLINE byte_vector shift_left(byte_vector x) {
  if constexpr (N >= 0) return x << N;
  return x >> -N;
}
#elif defined(__AVX2__)
using byte_vector = __m128i;

LLMC_INLINE byte_vector bits_of(byte_vector x, char mask) { return _mm_and_si128(x, _mm_set1_epi8(mask)); }
LLMC_INLINE byte_vector either(byte_vector a, byte_vector b) { return _mm_or_si128(a, b); }
template <int N>
LLMC_INLINE byte_vector shift_left(byte_vector x) {  // bits that come in from neighbouring bytes are masked out later
  if constexpr (N >= 0) return _mm_slli_epi16(x, N);
  return _mm_srli_epi16(x, -N);
}
#else
typedef std::int8_t byte_vector __attribute__((vector_size(16)));

LLMC_INLINE byte_vector load_bytes(const void* p, int n = 16) {
  byte_vector x{};
  std::memcpy(&x, p, static_cast<std::size_t>(clamp_lanes(n)));
  return x;
}
LLMC_INLINE f32x16 widen(byte_vector x, i8) { return {__builtin_convertvector(x, float_vector)}; }
LLMC_INLINE f32x16 widen(byte_vector x, e4m3) {
  return widen_f16((__builtin_convertvector(x, int_vector) << 7) & 0xbf80);
}
LLMC_INLINE byte_vector bits_of(byte_vector x, char mask) { return x & static_cast<std::int8_t>(mask); }
LLMC_INLINE byte_vector either(byte_vector a, byte_vector b) { return a | b; }
template <int N>
LLMC_INLINE byte_vector shift_left(byte_vector x) {  // bits that come in from neighbouring bytes are masked out later
  if constexpr (N >= 0) return x << N;
  return x >> -N;
}
#endif
template <class T, class = std::enable_if_t<kScaled<T>>>
LLMC_INLINE f32x16 load(const T* p) {
  return widen(load_bytes(p), T{});
}
template <class T, class = std::enable_if_t<kScaled<T>>>
LLMC_INLINE f32x16 load(const T* p, int n) {
  return widen(load_bytes(p, n), T{});
}

// The codes of two dims from 16 bytes of halves.
LLMC_INLINE void load_nibbles(const i4* p, f32x16& low, f32x16& high) {
  const byte_vector x = load_bytes(p);
  low = widen(bits_of(x, 15), i8{});
  high = widen(bits_of(shift_left<-4>(x), 15), i8{});
}

// Codes of 5 bits of dims D and D + 1 of 8 dims: the halves, and the vector of fifth bits.
template <int D>
LLMC_INLINE void load_fives(const i4* halves, byte_vector fifth, f32x16& even, f32x16& odd) {
  const byte_vector x = load_bytes(halves);
  even = widen(either(bits_of(x, 15), bits_of(shift_left<4 - D>(fifth), 16)), i8{});
  odd = widen(either(bits_of(shift_left<-4>(x), 15), bits_of(shift_left<3 - D>(fifth), 16)), i8{});
}

// What makes a number of what load gives.
template <class T>
constexpr float kLoadFactor = std::is_same_v<T, e4m3> ? 256.0f : 1.0f;

// Codes of numbers in reach of the type: to the nearest, ties to even.
LLMC_INLINE std::uint8_t encode(float x, i8) {
  return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(x + 0x1.8p23f));
}
LLMC_INLINE std::uint8_t encode(float x, e4m3) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffff;
  const std::uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const std::uint32_t shifted = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f);
  const std::uint32_t subnormal = shifted - std::bit_cast<std::uint32_t>(0x1p14f);
  return static_cast<std::uint8_t>((bits >> 24 & 0x80) | (magnitude < 0x3c800000 ? subnormal : normal));
}

// What the code of the magnitude of x stands for.
LLMC_INLINE float decoded(float x, e4m3) {
  const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x) & 0x7fffffff;
  const std::uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) & ~0xfffffu;
  const float subnormal = std::bit_cast<float>(magnitude) + 0x1p14f - 0x1p14f;
  return magnitude < 0x3c800000 ? subnormal : std::bit_cast<float>(normal);
}

// What the code of x stands for.
LLMC_INLINE float nearest(float x, e4m3) { return std::copysign(decoded(std::clamp(x, -448.0f, 448.0f), e4m3{}), x); }

// By what the codes of y have to be multiplied, so that what makes them differ from x has no part along x; sums of
// exact products.
inline float along(const float* x, const float* y, std::int64_t n) {
  double own[4] = {}, shared[4] = {};
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const auto count = static_cast<int>(std::min<std::int64_t>(kLanes, n - i));
    alignas(64) float number[kLanes] = {}, coded[kLanes] = {};
    std::copy_n(x + i, count, number);
    std::copy_n(y + i, count, coded);
    for (float& code : coded) code = nearest(code, e4m3{});  // loops of a fixed length become vectors
    for (int j = 0; j < kLanes; j += 4) {
      LLMC_UNROLL for (int l = 0; l < 4; ++l) own[l] += static_cast<double>(number[j + l]) * number[j + l];
      LLMC_UNROLL for (int l = 0; l < 4; ++l) shared[l] += static_cast<double>(number[j + l]) * coded[j + l];
    }
  }
  return static_cast<float>((own[0] + own[1] + own[2] + own[3]) / (shared[0] + shared[1] + shared[2] + shared[3]));
}

// Hadamard's matrix / sqrt(n) times x, n a power of two; `other` has room for n. Each stage adds and subtracts
// neighbours, sums to the front.
inline void rotate_block(float* x, std::int64_t n, float* other) {
  float *from = x, *to = other;
  for (std::int64_t done = 1; done < n; done *= 2, std::swap(from, to)) {
    std::int64_t i = 0;
    for (; i + kLanes <= n / 2; i += kLanes) {
      f32x16 even, odd;
      deinterleave(load(from + 2 * i), load(from + 2 * i + kLanes), even, odd);
      store(to + i, even + odd);
      store(to + n / 2 + i, even - odd);
    }
    for (; i < n / 2; ++i) {
      to[i] = from[2 * i] + from[2 * i + 1];
      to[n / 2 + i] = from[2 * i] - from[2 * i + 1];
    }
  }
  const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  for (std::int64_t i = 0; i < n; ++i) x[i] = from[i] * factor;
}

// The same of N vectors, which stay in registers.
template <int N>
LLMC_INLINE void rotate_vectors(float* x) {
  f32x16 v[N], next[N];
  LLMC_UNROLL for (int i = 0; i < N; ++i) v[i] = load(x + i * kLanes);
  for (int done = 1; done < N * kLanes; done *= 2) {
    LLMC_UNROLL for (int i = 0; i < N / 2; ++i) {
      f32x16 even, odd;
      deinterleave(v[2 * i], v[2 * i + 1], even, odd);
      next[i] = even + odd;
      next[N / 2 + i] = even - odd;
    }
    LLMC_UNROLL for (int i = 0; i < N; ++i) v[i] = next[i];
  }
  const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(N * kLanes)));
  LLMC_UNROLL for (int i = 0; i < N; ++i) store(x + i * kLanes, v[i] * factor);
}

// The same for each block of dims, the largest powers of two that fit.
inline void rotate(float* x, std::int64_t dims, float* other) {
  while (dims > 0) {
    const auto n = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(dims)));
    if (n == 4 * kLanes) {
      rotate_vectors<4>(x);
    } else if (n == 8 * kLanes) {
      rotate_vectors<8>(x);
    } else {
      rotate_block(x, n, other);
    }
    x += n;
    dims -= n;
  }
}

struct Bounds {
  float least, largest;
  bool finite;
};

// Of n numbers; the memory behind them is read up to a multiple of 16.
LLMC_INLINE Bounds bounds_of(const float* x, std::int64_t n) {
  f32x16 least = broadcast(x[0]), largest = least, nothing = zero();
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const f32x16 v = select(mask_first(n - i), load(x + i), broadcast(x[0]));
    least = min(least, v);
    largest = max(largest, v);
    nothing = nothing + v * zero();
  }
  return {reduce_min(least), reduce_max(largest), reduce_add(nothing) == 0};
}

// Below it a row counts as zeros: its scale, or the inverse of that, would leave the range of normal floats.
constexpr float kSmallest = 0x1p-100f;

// What the largest number of a row of E4M3 becomes: of eight numbers from 448 down to more than 224 that with the least
// error, of numbers rounded to 4 bits. The memory behind x is read up to a multiple of 16.
LLMC_INLINE float best_reach(const float* x, std::int64_t n, float most) {
  constexpr float kReaches[8] = {448.0f,      410.8178f,   376.721588f, 345.455231f,
                                 316.783844f, 290.492065f, 266.382385f, 244.273727f};
  f32x16 errors[8];
  float inverse[8];
  for (int c = 0; c < 8; ++c) errors[c] = zero(), inverse[c] = kReaches[c] / most;
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const f32x16 v = select(mask_first(n - i), load(x + i), zero());
    LLMC_UNROLL for (int c = 0; c < 8; ++c) {
      const f32x16 y = v * inverse[c], shifted = y * 0x1.00001p20f, error = (shifted - (shifted - y)) - y;
      errors[c] = fmadd(error, error, errors[c]);
    }
  }
  float least = std::numeric_limits<float>::infinity(), best = kReaches[0];
  for (int c = 0; c < 8; ++c) {
    const float error = reduce_add(errors[c]) / (kReaches[c] * kReaches[c]);
    if (error < least) least = error, best = kReaches[c];
  }
  return best;
}

// Divides a row by its scale, which is given back; codes then are the nearest numbers. NaN, and zeros in the row, if a
// number is not finite. The memory behind x is read up to a multiple of 16.
template <class T>
float scale_row(float* x, std::int64_t n) {
  const Bounds bounds = bounds_of(x, n);
  const float most = std::max(-bounds.least, bounds.largest);
  if (!bounds.finite || most < kSmallest) {
    std::fill_n(x, n, 0.0f);
    return bounds.finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const float reach = std::is_same_v<T, e4m3> ? best_reach(x, n, most) : 127.0f, inverse = reach / most;
  for (std::int64_t i = 0; i < n; ++i) x[i] *= inverse;
  return most / reach;
}

// Codes of a row, which is divided by its scale, and that scale.
template <class T>
float encode_row(float* x, std::int64_t n, std::uint8_t* codes) {
  const float scale = scale_row<T>(x, n);
  for (std::int64_t i = 0; i < n; ++i) codes[i] = encode(x[i], T{});
  return std::is_same_v<T, e4m3> && scale > 0 ? scale * along(x, x, n) : scale;
}

struct GroupScale {
  f16 step, least;
};

// Codes 0 .. most (15 or 31) of a group of int4: a number is step * code + least. Both NaN if a number is not finite,
// or beyond float16.
inline GroupScale encode_group(const float* x, std::int64_t n, float most, std::uint8_t* codes) {
  const Bounds bounds = bounds_of(x, n);
  const f16 step = from_float<f16>((bounds.largest - bounds.least) / most), least = from_float<f16>(bounds.least);
  const float width = to_float(step), low = to_float(least);
  if (!bounds.finite || !std::isfinite(width) || !std::isfinite(low)) {
    std::fill_n(codes, n, std::uint8_t{0});
    return {f16{0x7e00}, f16{0x7e00}};
  }
  const float inverse = width > 0 ? 1.0f / width : 0.0f;
  for (std::int64_t i = 0; i < n; ++i) {
    const float code = std::min(std::max((x[i] - low) * inverse, 0.0f), most);
    codes[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(code + 0x1p23f) & 31);
  }
  return {step, least};
}

}  // namespace llmc::LLMC_ISA
