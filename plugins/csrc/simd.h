// The thin layer that kernels are written in: 16 floats at a time, one implementation for each instruction set.
//
// Everything here lives in namespace llmc::LLMC_ISA, so that code compiled for a newer machine never serves an older
// one. Rules that kernels may rely on, at every level:
// 1. A lane's result depends on that lane's inputs only: a partial load, the same operations and a partial store give
// the
//    bits that the full vector gives.
// 2. reduce_add and reduce_max are one fixed tree (i with i + 8, then 4, 2, 1).
// 3. fmadd rounds once; the scalar level multiplies, then adds, on every machine: its bits are recorded in engines, and
//    where there is no FMA a library call for each lane would cost 20 times more. Between levels bits may differ,
//    within one they never do.
// 4. max(a, b) and min(a, b) give b if either is NaN.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernel.h"

#define LLMC_INLINE inline __attribute__((always_inline))
// Loops over accumulators have to be unrolled before anything else, or GCC keeps copies of them in memory.
#define LLMC_UNROLL _Pragma("GCC unroll 16")

namespace llmc {

// Storage formats: 16 bits that only load and store look into.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

}  // namespace llmc

// The level multiplies pairs of bf16 with one instruction.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define LLMC_BF16_DOT
#endif

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(LLMC_NEON)
#include "simd_neon.h"
#else
#include "simd_scalar.h"
#endif

namespace llmc::LLMC_ISA {

// Vectors of f32x16, all levels (see the included file):
//   load(p) load(p, n) store(p, v) store(p, v, n)   p: float*, bf16*, f16*; n lanes, 0 <= n <= 16, the others load as 0
//   zero() broadcast(x) + - * / -v  fmadd(a, b, c) = a * b + c  fnmadd(a, b, c) = c - a * b
//   max min abs sqrt floor ceil trunc round_even  copysign(magnitude, sign)
//   scale_by_power(x, n) = x * 2^n for integral n in [-300, 300] and x near 1, rounded once
//   < <= > >= == != give mask16 (false where either is NaN, != true); & | ~ of masks; select(m, a, b) = m ? a : b
//   mask_first(n): lanes below n, n clamped to 0 .. 16; mask_bits(m); any(m)
//   reduce_add reduce_max reduce_min
//   swap_pairs(v): lanes 1 0 3 2 ..; deinterleave(a, b, even, odd), interleave(even, odd, a, b)
// bf16x32, 16 pairs of bf16:
//   load_pairs(p) broadcast_pair(p) dot_pairs(acc, a, b): acc + a.odd * b.odd, then + a.even * b.even, for each lane
//   split_pairs<Step>(a): Step{a.even, a.odd}
//   convert_pairs(p, x0, x1): 32 floats of two vectors, rounded to bf16, to p

// A function of floats applied to each lane, for what is too rare to vectorise.
template <class F>
LLMC_INLINE f32x16 each_lane(f32x16 x, F&& f) {
  alignas(64) float lane[16];
  store(lane, x);
  for (float& value : lane) value = f(value);
  return load(lane);
}

LLMC_INLINE f32x16 operator+(f32x16 a, float b) { return a + broadcast(b); }
LLMC_INLINE f32x16 operator-(f32x16 a, float b) { return a - broadcast(b); }
LLMC_INLINE f32x16 operator*(f32x16 a, float b) { return a * broadcast(b); }

LLMC_INLINE float to_float(float x) { return x; }
LLMC_INLINE float to_float(bf16 x) {
  const std::uint32_t bits = std::uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
LLMC_INLINE float to_float(f16 x) {
  const f16 padded[16] = {x};
  float y[16];
  store(y, load(padded));
  return y[0];
}
template <class T>
LLMC_INLINE T from_float(float x) {
  T y[16];
  store(y, broadcast(x));
  return y[0];
}
LLMC_INLINE float round_to_bf16(float x) { return to_float(from_float<bf16>(x)); }

}  // namespace llmc::LLMC_ISA

#include "simd_math.h"
