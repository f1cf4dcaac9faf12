// f32x16 as a compiler vector: baseline x86-64, or any other machine. Included by simd.h.
#pragma once

namespace llmc::LLMC_ISA {

typedef float float_vector __attribute__((vector_size(64)));
typedef std::int32_t int_vector __attribute__((vector_size(64)));

struct f32x16 {
  float_vector v;
};
struct mask16 {
  int_vector v;
};
struct bf16x32 {
  int_vector v;
};

LLMC_INLINE int clamp_lanes(std::int64_t n) { return static_cast<int>(n < 0 ? 0 : n > 16 ? 16 : n); }
LLMC_INLINE f32x16 zero() { return {float_vector{}}; }
LLMC_INLINE f32x16 broadcast(float x) { return {float_vector{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}}; }
LLMC_INLINE f32x16 load(const float* p) {
  f32x16 x;
  std::memcpy(&x, p, 64);
  return x;
}
LLMC_INLINE f32x16 load(const float* p, int n) {
  f32x16 x = zero();
  std::memcpy(&x, p, static_cast<std::size_t>(clamp_lanes(n)) * 4);
  return x;
}
LLMC_INLINE void store(float* p, f32x16 x) { std::memcpy(p, &x, 64); }
LLMC_INLINE void store(float* p, f32x16 x, int n) { std::memcpy(p, &x, static_cast<std::size_t>(clamp_lanes(n)) * 4); }

inline std::uint16_t narrow_bf16(std::uint32_t bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>((bits | 0x400000) >> 16);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline std::uint16_t narrow_f16(std::uint32_t bits) {
  const std::uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (bits >= 0x47800000) return static_cast<std::uint16_t>(sign | 0x7c00);
  std::uint32_t mantissa = bits, shift = 13, base = 0x38000000;  // normal: drop 13 bits, rebias by 112
  if (bits < 0x38800000) {                                       // subnormal: shift the whole significand
    if (bits < 0x33000000) return static_cast<std::uint16_t>(sign);
    shift = 126 - (bits >> 23);
    mantissa = (bits & 0x7fffff) | 0x800000;
    base = 0;
  }
  const std::uint32_t half = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
  const std::uint32_t rounded = half + (rest > middle || (rest == middle && (half & 1)));
  return static_cast<std::uint16_t>(sign | (rounded - (base >> 13)));
}
typedef std::uint16_t half_vector __attribute__((vector_size(32)));
template <class T>
LLMC_INLINE int_vector load_half(const T* p, int n) {
  half_vector half{};
  std::memcpy(&half, p, static_cast<std::size_t>(n) * 2);
  return __builtin_convertvector(half, int_vector);
}
// Exponent and mantissa moved into place are the number times 2^-112, subnormal or not; 31 is infinity or NaN.
LLMC_INLINE f32x16 widen_f16(int_vector half) {
  const float_vector small = (float_vector)((half & 0x7fff) << 13);
  const int_vector special = ((half & 0x7c00) == 0x7c00) & 0x7f800000;
  const int_vector sign = (half & 0x8000) << 16;
  return {(float_vector)((int_vector)(small * 0x1p112f) | special | sign)};
}
LLMC_INLINE f32x16 load(const bf16* p, int n) { return {(float_vector)(load_half(p, clamp_lanes(n)) << 16)}; }
LLMC_INLINE f32x16 load(const bf16* p) { return {(float_vector)(load_half(p, 16) << 16)}; }
LLMC_INLINE f32x16 load(const f16* p, int n) { return widen_f16(load_half(p, clamp_lanes(n))); }
LLMC_INLINE f32x16 load(const f16* p) { return widen_f16(load_half(p, 16)); }
LLMC_INLINE void store(bf16* p, f32x16 x, int n) {
  const int_vector bits = (int_vector)x.v;
  for (int i = 0; i < clamp_lanes(n); ++i) p[i].bits = narrow_bf16(static_cast<std::uint32_t>(bits[i]));
}
LLMC_INLINE void store(f16* p, f32x16 x, int n) {
  const int_vector bits = (int_vector)x.v;
  for (int i = 0; i < clamp_lanes(n); ++i) p[i].bits = narrow_f16(static_cast<std::uint32_t>(bits[i]));
}
LLMC_INLINE void store(bf16* p, f32x16 x) { store(p, x, 16); }
LLMC_INLINE void store(f16* p, f32x16 x) { store(p, x, 16); }

LLMC_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {a.v + b.v}; }
LLMC_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {a.v - b.v}; }
LLMC_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {a.v * b.v}; }
LLMC_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {a.v / b.v}; }
LLMC_INLINE f32x16 operator-(f32x16 a) { return {-a.v}; }
LLMC_INLINE f32x16 fmadd(f32x16 a, f32x16 b, f32x16 c) { return {a.v * b.v + c.v}; }
LLMC_INLINE f32x16 fnmadd(f32x16 a, f32x16 b, f32x16 c) { return fmadd(-a, b, c); }
LLMC_INLINE f32x16 max(f32x16 a, f32x16 b) { return {a.v > b.v ? a.v : b.v}; }
LLMC_INLINE f32x16 min(f32x16 a, f32x16 b) { return {a.v < b.v ? a.v : b.v}; }
LLMC_INLINE f32x16 abs(f32x16 a) { return {(float_vector)((int_vector)a.v & 0x7fffffff)}; }
LLMC_INLINE f32x16 copysign(f32x16 magnitude, f32x16 sign) {
  constexpr std::int32_t bit = -0x7fffffff - 1;
  return {(float_vector)(((int_vector)magnitude.v & 0x7fffffff) | ((int_vector)sign.v & bit))};
}
#define LLMC_EACH(name, function)                           \
  LLMC_INLINE f32x16 name(f32x16 a) {                       \
    for (int i = 0; i < 16; ++i) a.v[i] = function(a.v[i]); \
    return a;                                               \
  }
LLMC_EACH(sqrt, __builtin_sqrtf)
LLMC_EACH(floor, __builtin_floorf)
LLMC_EACH(ceil, __builtin_ceilf)
LLMC_EACH(trunc, __builtin_truncf)
#undef LLMC_EACH
LLMC_INLINE f32x16 round_even(f32x16 a) {  // adding 1.5 * 2^23 leaves no fraction bits; larger values have none
  const float_vector shift = float_vector{} + 0x1.8p23f;
  const float_vector magnitude = abs(a).v;
  return copysign({magnitude < shift ? (magnitude + 0x1p23f) - 0x1p23f : magnitude}, a);
}
LLMC_INLINE float_vector power_of_two(int_vector n) { return (float_vector)((n + 127) << 23); }
LLMC_INLINE f32x16 scale_by_power(f32x16 x, f32x16 power) {  // in three factors: none leaves the exponent range
  const int_vector n = __builtin_convertvector(power.v, int_vector);
  const int_vector third = (n * 21846) >> 16;
  return {x.v * power_of_two(third) * power_of_two(third) * power_of_two(n - third - third)};
}

LLMC_INLINE mask16 operator<(f32x16 a, f32x16 b) { return {a.v < b.v}; }
LLMC_INLINE mask16 operator<=(f32x16 a, f32x16 b) { return {a.v <= b.v}; }
LLMC_INLINE mask16 operator>(f32x16 a, f32x16 b) { return {a.v > b.v}; }
LLMC_INLINE mask16 operator>=(f32x16 a, f32x16 b) { return {a.v >= b.v}; }
LLMC_INLINE mask16 operator==(f32x16 a, f32x16 b) { return {a.v == b.v}; }
LLMC_INLINE mask16 operator!=(f32x16 a, f32x16 b) { return {a.v != b.v}; }
LLMC_INLINE mask16 operator&(mask16 a, mask16 b) { return {a.v & b.v}; }
LLMC_INLINE mask16 operator|(mask16 a, mask16 b) { return {a.v | b.v}; }
LLMC_INLINE mask16 operator~(mask16 a) { return {~a.v}; }
LLMC_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {m.v ? a.v : b.v}; }
LLMC_INLINE mask16 mask_first(std::int64_t n) {
  constexpr int_vector index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {index < clamp_lanes(n)};
}
LLMC_INLINE std::uint32_t mask_bits(mask16 m) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<std::uint32_t>(m.v[i] & 1) << i;
  return bits;
}
LLMC_INLINE bool any(mask16 m) { return mask_bits(m) != 0; }

template <class F>
LLMC_INLINE float reduce(f32x16 x, F&& f) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) x.v[i] = f(x.v[i], x.v[i + step]);
  }
  return x.v[0];
}
LLMC_INLINE float reduce_add(f32x16 x) {
  return reduce(x, [](float a, float b) { return a + b; });
}
LLMC_INLINE float reduce_max(f32x16 x) {
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
LLMC_INLINE float reduce_min(f32x16 x) {
  return reduce(x, [](float a, float b) { return a < b ? a : b; });
}

LLMC_INLINE f32x16 swap_pairs(f32x16 x) {
  f32x16 y;
  for (int i = 0; i < 16; ++i) y.v[i] = x.v[i ^ 1];
  return y;
}
LLMC_INLINE void deinterleave(f32x16 a, f32x16 b, f32x16& even, f32x16& odd) {
  f32x16 x, y;
  for (int i = 0; i < 8; ++i) {
    x.v[i] = a.v[2 * i], y.v[i] = a.v[2 * i + 1];
    x.v[i + 8] = b.v[2 * i], y.v[i + 8] = b.v[2 * i + 1];
  }
  even = x, odd = y;
}
LLMC_INLINE void interleave(f32x16 even, f32x16 odd, f32x16& a, f32x16& b) {
  f32x16 x, y;
  for (int i = 0; i < 8; ++i) {
    x.v[2 * i] = even.v[i], x.v[2 * i + 1] = odd.v[i];
    y.v[2 * i] = even.v[i + 8], y.v[2 * i + 1] = odd.v[i + 8];
  }
  a = x, b = y;
}

LLMC_INLINE bf16x32 load_pairs(const bf16* p) {
  bf16x32 x;
  std::memcpy(&x, p, 64);
  return x;
}
LLMC_INLINE bf16x32 broadcast_pair(const bf16* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, 4);
  return {int_vector{} + pair};
}
LLMC_INLINE f32x16 pair_odd(bf16x32 x) { return {(float_vector)(x.v & static_cast<std::int32_t>(0xffff0000u))}; }
LLMC_INLINE f32x16 pair_even(bf16x32 x) { return {(float_vector)(x.v << 16)}; }
template <class Step>
LLMC_INLINE Step split_pairs(bf16x32 x) {
  return {pair_even(x), pair_odd(x)};
}
LLMC_INLINE f32x16 dot_pairs(f32x16 acc, bf16x32 a, bf16x32 b) {
  return fmadd(pair_even(a), pair_even(b), fmadd(pair_odd(a), pair_odd(b), acc));
}
LLMC_INLINE void convert_pairs(bf16* p, f32x16 x0, f32x16 x1) {
  store(p, x0);
  store(p + 16, x1);
}

}  // namespace llmc::LLMC_ISA
