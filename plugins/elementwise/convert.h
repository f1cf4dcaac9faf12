// Conversions between dtypes, of contiguous arrays.
#pragma once
#include <cmath>
#include <limits>
#include <type_traits>

#include "simd.h"

namespace llmc::LLMC_ISA {

template <class T>
constexpr bool kIsFloat = std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

// Storage of bool: 0 or 1.
struct boolean_byte {
  std::uint8_t value;
};

// Towards zero; what does not fit becomes the nearest limit, NaN becomes 0.
template <class T>
LLMC_INLINE T to_integer(float x) {
  if (x != x) return 0;
  if (x >= -static_cast<float>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::max();
  if (x < static_cast<float>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(x);
}

template <class From, class To>
void convert_array(const void* const* in, void* out, std::int64_t n) {
  const From* a = static_cast<const From*>(in[0]);
  To* y = static_cast<To*>(out);
  if constexpr (std::is_same_v<From, To>) {
    std::memmove(y, a, static_cast<std::size_t>(n) * sizeof(From));
  } else if constexpr (kIsFloat<From> && kIsFloat<To>) {
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, load(a + i));
    if (i < n) store(y + i, load(a + i, static_cast<int>(n - i)), static_cast<int>(n - i));
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<From, boolean_byte>) {
        if constexpr (kIsFloat<To>) {
          y[i] = from_float<To>(a[i].value ? 1.0f : 0.0f);
        } else {
          y[i] = a[i].value != 0;
        }
      } else if constexpr (kIsFloat<From>) {
        const float x = to_float(a[i]);
        if constexpr (std::is_same_v<To, boolean_byte>) {
          y[i] = {static_cast<std::uint8_t>(x != 0)};
        } else {
          y[i] = to_integer<To>(x);
        }
      } else if constexpr (std::is_same_v<To, boolean_byte>) {
        y[i] = {static_cast<std::uint8_t>(a[i] != 0)};
      } else if constexpr (std::is_same_v<To, float>) {
        y[i] = static_cast<float>(a[i]);
      } else if constexpr (kIsFloat<To>) {
        y[i] = from_float<To>(static_cast<float>(a[i]));
      } else {
        y[i] = static_cast<To>(a[i]);
      }
    }
  }
}

using Conversion = void (*)(const void* const* in, void* out, std::int64_t n);

template <class From>
Conversion conversion_from(DType to) {
  switch (to) {
    case DType::f32:
      return convert_array<From, float>;
    case DType::bf16:
      return convert_array<From, bf16>;
    case DType::f16:
      return convert_array<From, f16>;
    case DType::i32:
      return convert_array<From, std::int32_t>;
    case DType::i64:
      return convert_array<From, std::int64_t>;
    case DType::boolean:
      return convert_array<From, boolean_byte>;
    case DType::u8:  // codes are no numbers
      return nullptr;
  }
  return nullptr;
}

inline Conversion conversion(DType from, DType to) {
  switch (from) {
    case DType::f32:
      return conversion_from<float>(to);
    case DType::bf16:
      return conversion_from<bf16>(to);
    case DType::f16:
      return conversion_from<f16>(to);
    case DType::i32:
      return conversion_from<std::int32_t>(to);
    case DType::i64:
      return conversion_from<std::int64_t>(to);
    case DType::boolean:
      return conversion_from<boolean_byte>(to);
    case DType::u8:
      return nullptr;
  }
  return nullptr;
}

}  // namespace llmc::LLMC_ISA
