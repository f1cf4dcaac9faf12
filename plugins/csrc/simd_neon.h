// f32x16 as four q registers. Included by simd.h.
#pragma once
#include <arm_neon.h>

namespace llmc::LLMC_ISA {

struct f32x16 {
  float32x4_t v[4];
};
struct mask16 {
  uint32x4_t v[4];
};
struct bf16x32 {
  uint32x4_t v[4];
};

#define LLMC_ONE(f, a)                           \
  {                                              \
    {                                            \
      f(a.v[0]), f(a.v[1]), f(a.v[2]), f(a.v[3]) \
    }                                            \
  }
#define LLMC_TWO(f, a, b)                                                        \
  {                                                                              \
    {                                                                            \
      f(a.v[0], b.v[0]), f(a.v[1], b.v[1]), f(a.v[2], b.v[2]), f(a.v[3], b.v[3]) \
    }                                                                            \
  }
#define LLMC_THREE(f, a, b, c)                                                                                   \
  {                                                                                                              \
    {                                                                                                            \
      f(a.v[0], b.v[0], c.v[0]), f(a.v[1], b.v[1], c.v[1]), f(a.v[2], b.v[2], c.v[2]), f(a.v[3], b.v[3], c.v[3]) \
    }                                                                                                            \
  }

LLMC_INLINE int clamp_lanes(std::int64_t n) { return static_cast<int>(n < 0 ? 0 : n > 16 ? 16 : n); }
LLMC_INLINE f32x16 broadcast(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
LLMC_INLINE f32x16 zero() { return broadcast(0.0f); }
LLMC_INLINE f32x16 load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
LLMC_INLINE void store(float* p, f32x16 x) {
  vst1q_f32(p, x.v[0]);
  vst1q_f32(p + 4, x.v[1]);
  vst1q_f32(p + 8, x.v[2]);
  vst1q_f32(p + 12, x.v[3]);
}

LLMC_INLINE float32x4_t widen_bf16(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
LLMC_INLINE uint16x4_t narrow_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t nearest = bits + 0x7fff + ((bits >> 16) & 1);
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), nearest, bits | 0x400000), 16);
}
LLMC_INLINE float32x4_t widen_f16(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
LLMC_INLINE uint16x4_t narrow_f16(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
#define LLMC_HALF(type)                                                                                           \
  LLMC_INLINE f32x16 load(const type* p) {                                                                        \
    const auto* q = reinterpret_cast<const std::uint16_t*>(p);                                                    \
    const uint16x8_t low = vld1q_u16(q), high = vld1q_u16(q + 8);                                                 \
    return {{widen_##type(vget_low_u16(low)), widen_##type(vget_high_u16(low)), widen_##type(vget_low_u16(high)), \
             widen_##type(vget_high_u16(high))}};                                                                 \
  }                                                                                                               \
  LLMC_INLINE void store(type* p, f32x16 x) {                                                                     \
    auto* q = reinterpret_cast<std::uint16_t*>(p);                                                                \
    vst1q_u16(q, vcombine_u16(narrow_##type(x.v[0]), narrow_##type(x.v[1])));                                     \
    vst1q_u16(q + 8, vcombine_u16(narrow_##type(x.v[2]), narrow_##type(x.v[3])));                                 \
  }
LLMC_HALF(bf16)
LLMC_HALF(f16)
#undef LLMC_HALF

#define LLMC_PARTIAL(type)                                                          \
  LLMC_INLINE f32x16 load(const type* p, int n) {                                   \
    type lanes[16] = {};                                                            \
    std::memcpy(lanes, p, static_cast<std::size_t>(clamp_lanes(n)) * sizeof(type)); \
    return load(lanes);                                                             \
  }                                                                                 \
  LLMC_INLINE void store(type* p, f32x16 x, int n) {                                \
    type lanes[16];                                                                 \
    store(lanes, x);                                                                \
    std::memcpy(p, lanes, static_cast<std::size_t>(clamp_lanes(n)) * sizeof(type)); \
  }
LLMC_PARTIAL(float)
LLMC_PARTIAL(bf16)
LLMC_PARTIAL(f16)
#undef LLMC_PARTIAL

LLMC_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
LLMC_INLINE float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

LLMC_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return LLMC_TWO(vaddq_f32, a, b); }
LLMC_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return LLMC_TWO(vsubq_f32, a, b); }
LLMC_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return LLMC_TWO(vmulq_f32, a, b); }
LLMC_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return LLMC_TWO(vdivq_f32, a, b); }
LLMC_INLINE f32x16 operator-(f32x16 a) { return LLMC_ONE(vnegq_f32, a); }
LLMC_INLINE f32x16 fmadd(f32x16 a, f32x16 b, f32x16 c) { return LLMC_THREE(vfmaq_f32, c, a, b); }
LLMC_INLINE f32x16 fnmadd(f32x16 a, f32x16 b, f32x16 c) { return LLMC_THREE(vfmsq_f32, c, a, b); }
LLMC_INLINE f32x16 max(f32x16 a, f32x16 b) { return LLMC_TWO(larger, a, b); }
LLMC_INLINE f32x16 min(f32x16 a, f32x16 b) { return LLMC_TWO(smaller, a, b); }
LLMC_INLINE f32x16 abs(f32x16 a) { return LLMC_ONE(vabsq_f32, a); }
LLMC_INLINE f32x16 sqrt(f32x16 a) { return LLMC_ONE(vsqrtq_f32, a); }
LLMC_INLINE f32x16 floor(f32x16 a) { return LLMC_ONE(vrndmq_f32, a); }
LLMC_INLINE f32x16 ceil(f32x16 a) { return LLMC_ONE(vrndpq_f32, a); }
LLMC_INLINE f32x16 trunc(f32x16 a) { return LLMC_ONE(vrndq_f32, a); }
LLMC_INLINE f32x16 round_even(f32x16 a) { return LLMC_ONE(vrndnq_f32, a); }
LLMC_INLINE float32x4_t with_sign(float32x4_t magnitude, float32x4_t sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000), sign, magnitude);
}
LLMC_INLINE f32x16 copysign(f32x16 magnitude, f32x16 sign) { return LLMC_TWO(with_sign, magnitude, sign); }
LLMC_INLINE float32x4_t power_of_two(int32x4_t n) { return vreinterpretq_f32_s32((n + 127) << 23); }
LLMC_INLINE float32x4_t scale_by_power(float32x4_t x, float32x4_t power) {  // none of the factors leaves the range
  const int32x4_t n = vcvtq_s32_f32(power), third = (n * 21846) >> 16;
  return x * power_of_two(third) * power_of_two(third) * power_of_two(n - third - third);
}
LLMC_INLINE f32x16 scale_by_power(f32x16 x, f32x16 n) { return LLMC_TWO(scale_by_power, x, n); }

LLMC_INLINE mask16 operator<(f32x16 a, f32x16 b) { return LLMC_TWO(vcltq_f32, a, b); }
LLMC_INLINE mask16 operator<=(f32x16 a, f32x16 b) { return LLMC_TWO(vcleq_f32, a, b); }
LLMC_INLINE mask16 operator>(f32x16 a, f32x16 b) { return LLMC_TWO(vcgtq_f32, a, b); }
LLMC_INLINE mask16 operator>=(f32x16 a, f32x16 b) { return LLMC_TWO(vcgeq_f32, a, b); }
LLMC_INLINE mask16 operator==(f32x16 a, f32x16 b) { return LLMC_TWO(vceqq_f32, a, b); }
LLMC_INLINE mask16 operator&(mask16 a, mask16 b) { return LLMC_TWO(vandq_u32, a, b); }
LLMC_INLINE mask16 operator|(mask16 a, mask16 b) { return LLMC_TWO(vorrq_u32, a, b); }
LLMC_INLINE mask16 operator~(mask16 a) { return LLMC_ONE(vmvnq_u32, a); }
LLMC_INLINE mask16 operator!=(f32x16 a, f32x16 b) { return ~(a == b); }
LLMC_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return LLMC_THREE(vbslq_f32, m, a, b); }
LLMC_INLINE mask16 mask_first(std::int64_t n) {
  constexpr uint32x4_t index = {0, 1, 2, 3};
  const uint32x4_t count = vdupq_n_u32(static_cast<std::uint32_t>(clamp_lanes(n)));
  return {{vcltq_u32(index, count), vcltq_u32(index + 4, count), vcltq_u32(index + 8, count),
           vcltq_u32(index + 12, count)}};
}
LLMC_INLINE std::uint32_t mask_bits(mask16 m) {
  constexpr uint32x4_t bit = {1, 2, 4, 8};
  return vaddvq_u32((m.v[0] & bit) | (m.v[1] & (bit << 4)) | (m.v[2] & (bit << 8)) | (m.v[3] & (bit << 12)));
}
LLMC_INLINE bool any(mask16 m) { return vmaxvq_u32(m.v[0] | m.v[1] | m.v[2] | m.v[3]) != 0; }

#define LLMC_REDUCE(name, op)                                         \
  LLMC_INLINE float name(f32x16 x) {                                  \
    const float32x4_t a = op(op(x.v[0], x.v[2]), op(x.v[1], x.v[3])); \
    const float32x4_t b = op(a, vextq_f32(a, a, 2));                  \
    return vgetq_lane_f32(op(b, vextq_f32(b, b, 1)), 0);              \
  }
LLMC_REDUCE(reduce_add, vaddq_f32)
LLMC_REDUCE(reduce_max, larger)
LLMC_REDUCE(reduce_min, smaller)
#undef LLMC_REDUCE

LLMC_INLINE f32x16 swap_pairs(f32x16 x) { return LLMC_ONE(vrev64q_f32, x); }
LLMC_INLINE void deinterleave(f32x16 a, f32x16 b, f32x16& even, f32x16& odd) {
  even = {
      {vuzp1q_f32(a.v[0], a.v[1]), vuzp1q_f32(a.v[2], a.v[3]), vuzp1q_f32(b.v[0], b.v[1]), vuzp1q_f32(b.v[2], b.v[3])}};
  odd = {
      {vuzp2q_f32(a.v[0], a.v[1]), vuzp2q_f32(a.v[2], a.v[3]), vuzp2q_f32(b.v[0], b.v[1]), vuzp2q_f32(b.v[2], b.v[3])}};
}
LLMC_INLINE void interleave(f32x16 even, f32x16 odd, f32x16& a, f32x16& b) {
  a = {{vzip1q_f32(even.v[0], odd.v[0]), vzip2q_f32(even.v[0], odd.v[0]), vzip1q_f32(even.v[1], odd.v[1]),
        vzip2q_f32(even.v[1], odd.v[1])}};
  b = {{vzip1q_f32(even.v[2], odd.v[2]), vzip2q_f32(even.v[2], odd.v[2]), vzip1q_f32(even.v[3], odd.v[3]),
        vzip2q_f32(even.v[3], odd.v[3])}};
}

LLMC_INLINE bf16x32 load_pairs(const bf16* p) {
  const auto* q = reinterpret_cast<const std::uint16_t*>(p);
  return {{vreinterpretq_u32_u16(vld1q_u16(q)), vreinterpretq_u32_u16(vld1q_u16(q + 8)),
           vreinterpretq_u32_u16(vld1q_u16(q + 16)), vreinterpretq_u32_u16(vld1q_u16(q + 24))}};
}
LLMC_INLINE bf16x32 broadcast_pair(const bf16* p) {
  std::uint32_t pair;
  std::memcpy(&pair, p, 4);
  const uint32x4_t v = vdupq_n_u32(pair);
  return {{v, v, v, v}};
}
LLMC_INLINE float32x4_t pair_even(uint32x4_t x) { return vreinterpretq_f32_u32(x << 16); }
LLMC_INLINE float32x4_t pair_odd(uint32x4_t x) { return vreinterpretq_f32_u32(x & 0xffff0000u); }
template <class Step>
LLMC_INLINE Step split_pairs(bf16x32 x) {
  return {LLMC_ONE(pair_even, x), LLMC_ONE(pair_odd, x)};
}
LLMC_INLINE float32x4_t dot_pairs(float32x4_t acc, uint32x4_t a, uint32x4_t b) {
#ifdef LLMC_BF16_DOT
  return vbfdotq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
#else
  return vfmaq_f32(vfmaq_f32(acc, pair_odd(a), pair_odd(b)), pair_even(a), pair_even(b));
#endif
}
LLMC_INLINE f32x16 dot_pairs(f32x16 acc, bf16x32 a, bf16x32 b) { return LLMC_THREE(dot_pairs, acc, a, b); }
LLMC_INLINE void convert_pairs(bf16* p, f32x16 x0, f32x16 x1) {
  store(p, x0);
  store(p + 16, x1);
}

}  // namespace llmc::LLMC_ISA
