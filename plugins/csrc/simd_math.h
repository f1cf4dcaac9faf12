// Functions of 16 floats, built from the operations of simd.h: about 2 ulp, the same bits in every lane. Included by
// simd.h. The polynomials are minimax fits (Lawson's iteration) of the function named, made for these ranges.
#pragma once

namespace llmc::LLMC_ISA {

// c0 + x (c1 + x (c2 + ...))
template <class... C>
LLMC_INLINE f32x16 polynomial(f32x16 x, float c0, C... rest) {
  if constexpr (sizeof...(rest) == 0) {
    return broadcast(c0);
  } else {
    return fmadd(polynomial(x, rest...), x, broadcast(c0));
  }
}

// e^x; 0 below -104, infinity above 88.8.
LLMC_INLINE f32x16 exp(f32x16 x) {
  x = min(broadcast(89.0f), max(broadcast(-110.0f), x));
  const f32x16 n = round_even(x * 1.44269504f);
  // ln 2 in two parts; the first has trailing zeros, so that n * part is exact and r is right without FMA too.
  const f32x16 r = fnmadd(n, broadcast(-2.12194440e-4f), fnmadd(n, broadcast(0.693359375f), x));
  const f32x16 p = polynomial(r, 0.5f, 0.166666672f, 0.0416662693f, 0.00833326485f, 0.001394619f, 0.000199179703f);
  return scale_by_power(fmadd(p, r * r, r) + 1.0f, n);
}

// 1 / (1 + e^-x)
LLMC_INLINE f32x16 sigmoid(f32x16 x) { return broadcast(1.0f) / (exp(-x) + 1.0f); }

LLMC_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 a = abs(x);
  const f32x16 z = x * x;
  const f32x16 p = polynomial(z, -0.333332837f, 0.133314908f, -0.0537434965f, 0.0206505787f, -0.00571703678f);
  const f32x16 small = fmadd(p * z, x, x);
  const f32x16 large = broadcast(1.0f) - broadcast(2.0f) / (exp(a * 2.0f) + 1.0f);
  return select(a < broadcast(0.625f), small, copysign(large, x));
}

LLMC_INLINE f32x16 erf(f32x16 x) {
  const f32x16 a = abs(x);
  const f32x16 z = x * x;
  const f32x16 small = x * polynomial(z, 1.12837911f, -0.37612626f, 0.112836003f, -0.0268544443f, 0.00518953521f,
                                      -0.000802084105f, 7.8891193e-05f);
  const f32x16 t = min(broadcast(3.1f), a - 1.0f);  // beyond 4.1 erf is 1 in float; a NaN passes
  const f32x16 log_erfc = polynomial(t, -1.84960556f, -2.63896751f, -0.843107104f, -0.0415634811f, 0.0100464532f,
                                     -0.00201196736f, 0.000289528369f, -2.16868411e-05f);
  return select(a < broadcast(1.0f), small, copysign(broadcast(1.0f) - exp(log_erfc), x));
}

LLMC_INLINE f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.0f); }
LLMC_INLINE f32x16 gelu(f32x16 x) { return x * 0.5f * (erf(x * 0.70710678f) + 1.0f); }
LLMC_INLINE f32x16 gelu_tanh(f32x16 x) {
  const f32x16 inner = x * 0.79788456f * fmadd(x * x, broadcast(0.044715f), broadcast(1.0f));
  return x * 0.5f * (tanh(inner) + 1.0f);
}
LLMC_INLINE f32x16 quick_gelu(f32x16 x) { return x / (exp(x * -1.702f) + 1.0f); }
LLMC_INLINE f32x16 relu(f32x16 x) { return select(x < zero(), zero(), x); }  // keeps NaN

}  // namespace llmc::LLMC_ISA
