// Unary functions of llmc::elementwise on floats, by their names there.
#pragma once
#include "csrc/cuda/device.cuh"

DEV float sigmoid_(float x) { return 1.0f / (1.0f + expf(-x)); }

#define LLMC_UNARY(name, result)                       \
  struct F_##name {                                    \
    static DEV float apply(float x) { return result; } \
  };

LLMC_UNARY(copy, x)
LLMC_UNARY(neg, -x)
LLMC_UNARY(abs, fabsf(x))
LLMC_UNARY(exp, expf(x))
LLMC_UNARY(log, logf(x))
LLMC_UNARY(log1p, log1pf(x))
LLMC_UNARY(expm1, expm1f(x))
LLMC_UNARY(sqrt, sqrtf(x))
LLMC_UNARY(rsqrt, 1.0f / sqrtf(x))
LLMC_UNARY(reciprocal, 1.0f / x)
LLMC_UNARY(sin, sinf(x))
LLMC_UNARY(cos, cosf(x))
LLMC_UNARY(tanh, tanhf(x))
LLMC_UNARY(erf, erff(x))
LLMC_UNARY(sigmoid, sigmoid_(x))
LLMC_UNARY(floor, floorf(x))
LLMC_UNARY(ceil, ceilf(x))
LLMC_UNARY(round, rintf(x))
LLMC_UNARY(trunc, truncf(x))
LLMC_UNARY(sign, static_cast<float>((x > 0.0f) - (x < 0.0f)))
LLMC_UNARY(softplus, x > 20.0f ? x : log1pf(expf(x)))
LLMC_UNARY(relu, x > 0.0f ? x : x != x ? x : 0.0f)
LLMC_UNARY(relu2, x > 0.0f ? x * x : x != x ? x : 0.0f)
LLMC_UNARY(silu, x / (1.0f + expf(-x)))
LLMC_UNARY(gelu, 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)))
LLMC_UNARY(gelu_tanh, 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x))))
LLMC_UNARY(quick_gelu, x* sigmoid_(1.702f * x))
