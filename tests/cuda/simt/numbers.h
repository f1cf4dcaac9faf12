// 16-bit and 8-bit floats, bit for bit as a GPU converts them.
#pragma once
#include <cmath>
#include <cstdint>

namespace simt {

inline float bf16_to_float(uint16_t bits) { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float f) {
  uint32_t bits = __builtin_bit_cast(uint32_t, f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
  uint32_t magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // As a float's, the bits are the number divided by 2**112.
  float scaled = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, scaled));
}

inline uint16_t float_to_f16(float f) {
  uint32_t bits = __builtin_bit_cast(uint32_t, f), sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7fff;
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // below 2**-14: steps of 2**-24; 2**23 makes the sum round to whole ones
    float steps = __builtin_bit_cast(float, bits) * 0x1p24f + 0x1p23f;
    return static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, steps) & 0x7ffu));
  }
  bits -= 112u << 23;
  return static_cast<uint16_t>(sign | (bits + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

inline float e4m3_to_float(uint8_t bits) {
  uint32_t magnitude = bits & 0x7fu, sign = (bits & 0x80u) << 24;
  if (magnitude == 0x7fu) return NAN;
  float scaled = __builtin_bit_cast(float, magnitude << 20) * 0x1p120f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, scaled));
}

}  // namespace simt
