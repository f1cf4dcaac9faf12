// The activations of gated units and experts by name: y = function(gate) * up, and y = function(x), on contiguous
// arrays.
#pragma once
#include <string>

#include "simd.h"

namespace llmc::LLMC_ISA {

using GateLoop = void (*)(const float* gate, const float* up, float* y, std::int64_t n);
using ActivationLoop = void (*)(const float* x, float* y, std::int64_t n);

struct Activation {
  const char* name;
  GateLoop gate;
  ActivationLoop apply;
};

template <class F>
void gate_loop(const float* gate, const float* up, float* y, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, F{}(load(gate + i)) * load(up + i));
  const int rest = static_cast<int>(n - i);
  if (rest > 0) store(y + i, F{}(load(gate + i, rest)) * load(up + i, rest), rest);
}

template <class F>
void activation_loop(const float* x, float* y, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, F{}(load(x + i)));
  const int rest = static_cast<int>(n - i);
  if (rest > 0) store(y + i, F{}(load(x + i, rest)), rest);
}

template <class F>
constexpr Activation activation(const char* name, F) {
  return {name, gate_loop<F>, activation_loop<F>};
}

// A function of floats, lane by lane.
template <class F>
constexpr Activation rare(const char* name, F) {
  return activation(name, [](f32x16 x) { return each_lane(x, F{}); });
}

// The activation of that name (a unary function of llmc::elementwise); fails if there is none.
inline const Activation& find_activation(const std::string& name) {
  static constexpr Activation table[] = {
      activation("silu", [](f32x16 x) { return silu(x); }),
      activation("gelu", [](f32x16 x) { return gelu(x); }),
      activation("gelu_tanh", [](f32x16 x) { return gelu_tanh(x); }),
      activation("quick_gelu", [](f32x16 x) { return quick_gelu(x); }),
      activation("relu", [](f32x16 x) { return relu(x); }),
      activation("relu2", [](f32x16 x) { return relu(x) * relu(x); }),
      activation("sigmoid", [](f32x16 x) { return sigmoid(x); }),
      activation("tanh", [](f32x16 x) { return tanh(x); }),
      activation("erf", [](f32x16 x) { return erf(x); }),
      activation("exp", [](f32x16 x) { return exp(x); }),
      activation("copy", [](f32x16 x) { return x; }),
      activation("neg", [](f32x16 x) { return -x; }),
      activation("abs", [](f32x16 x) { return abs(x); }),
      activation("sqrt", [](f32x16 x) { return sqrt(x); }),
      activation("rsqrt", [](f32x16 x) { return broadcast(1.0f) / sqrt(x); }),
      activation("reciprocal", [](f32x16 x) { return broadcast(1.0f) / x; }),
      activation("floor", [](f32x16 x) { return floor(x); }),
      activation("ceil", [](f32x16 x) { return ceil(x); }),
      activation("trunc", [](f32x16 x) { return trunc(x); }),
      activation("round", [](f32x16 x) { return round_even(x); }),
      rare("softplus", [](float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }),
      rare("log", [](float x) { return std::log(x); }),
      rare("log1p", [](float x) { return std::log1p(x); }),
      rare("expm1", [](float x) { return std::expm1(x); }),
      rare("sin", [](float x) { return std::sin(x); }),
      rare("cos", [](float x) { return std::cos(x); }),
      rare("sign", [](float x) { return static_cast<float>((x > 0) - (x < 0)); }),
  };
  for (const Activation& entry : table) {
    if (name == entry.name) return entry;
  }
  fail("there is no activation '" + name + "'");
}

}  // namespace llmc::LLMC_ISA
