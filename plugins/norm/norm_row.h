// Normalisation of one row, shared by norm and add_norm.
#pragma once
#include <string>

#include "simd.h"

namespace llmc::LLMC_ISA {

enum class NormKind { rms, layer, l2 };

struct NormAttributes {
  float epsilon, offset;
  NormKind kind;

  explicit NormAttributes(const Attributes& attributes)
      : epsilon(static_cast<float>(attributes.real("epsilon"))),
        offset(static_cast<float>(attributes.real("offset"))),
        kind(kind_of(attributes.text("kind"))) {}

  static NormKind kind_of(const std::string& name) {
    if (name == "rms") return NormKind::rms;
    if (name == "layer") return NormKind::layer;
    if (name == "l2") return NormKind::l2;
    fail("there is no kind of norm '" + name + "'; known: rms, layer, l2");
  }
};

// The sum of f over the vectors of a row, four running sums; f gets zeros beyond the end, and the lanes that count.
template <class F>
LLMC_INLINE float sum_row(const float* x, std::int64_t n, F&& f) {
  f32x16 sum[4] = {zero(), zero(), zero(), zero()};
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) sum[j] = sum[j] + f(load(x + i + 16 * j), 16);
  }
  for (; i < n; i += 16) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(16, n - i));
    sum[0] = sum[0] + f(load(x + i, lanes), lanes);
  }
  return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// y = n(x) * (weight + offset) + bias; weight and bias may be null, y may be x.
inline void normalize_row(const NormAttributes& norm, const float* x, const float* weight, const float* bias, float* y,
                          std::int64_t n) {
  const auto count = static_cast<float>(n);
  const bool centred = norm.kind == NormKind::layer;
  const f32x16 mean = broadcast(centred ? sum_row(x, n, [](f32x16 v, int) { return v; }) / count : 0.0f);
  // What rounding has left of the mean, which matters where a row lies far from zero: the mean of x - mean.
  const f32x16 rest = broadcast(
      centred ? sum_row(x, n, [&](f32x16 v, int lanes) { return select(mask_first(lanes), v - mean, zero()); }) / count
              : 0.0f);
  const float squares = sum_row(x, n, [&](f32x16 v, int lanes) {
    const f32x16 d = centred ? select(mask_first(lanes), (v - mean) - rest, zero()) : v;
    return d * d;
  });
  float scale;
  if (norm.kind == NormKind::l2) {
    scale = 1.0f / std::max(std::sqrt(squares), norm.epsilon);
  } else {
    scale = 1.0f / std::sqrt(squares / count + norm.epsilon);
  }
  const f32x16 factor = broadcast(scale), offset = broadcast(norm.offset);
  for (std::int64_t i = 0; i < n; i += 16) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(16, n - i));
    f32x16 v = ((load(x + i, lanes) - mean) - rest) * factor;
    if (weight != nullptr) v = v * (load(weight + i, lanes) + offset);
    if (bias != nullptr) v = v + load(bias + i, lanes);
    store(y + i, v, lanes);
  }
}

// A weight or bias [D] or [H, D] against x [..., H, D]: the pointer for the row with these leading indices.
struct NormParameter {
  const float* data = nullptr;
  std::int64_t head_stride = 0;

  NormParameter(const Tensor& parameter, const Tensor& x) {
    if (!parameter) return;
    const std::int64_t width = x.shape[x.ndim - 1];
    bool fits = parameter.dtype == DType::f32 && parameter.ndim >= 1 && parameter.ndim <= 2;
    fits = fits && parameter.shape[parameter.ndim - 1] == width;
    if (fits && parameter.ndim == 2) {
      fits = x.ndim >= 2 && (parameter.shape[0] == 1 || parameter.shape[0] == x.shape[x.ndim - 2]);
      head_stride = parameter.shape[0] == 1 ? 0 : parameter.stride[0];
    }
    require(fits, "weight and bias must be float32 [D] or [H, D] of x [..., H, D]");
    require(parameter.stride[parameter.ndim - 1] == 1 || width == 1, "weight and bias must be contiguous");
    data = parameter.as<const float>();
  }
  const float* row(std::int64_t head) const { return data == nullptr ? nullptr : data + head * head_stride; }
};

// x [..., H, D] as rows: where row r starts, and which head it is.
struct NormRows {
  std::int64_t rows = 1, width = 0, heads = 1;

  explicit NormRows(const Tensor& y) {
    require(y && y.dtype == DType::f32 && y.ndim >= 1, "y must be float32 [..., D]");
    width = y.shape[y.ndim - 1];
    for (int i = 0; i + 1 < y.ndim; ++i) rows *= y.shape[i];
    if (y.ndim >= 2) heads = std::max<std::int64_t>(y.shape[y.ndim - 2], 1);
  }
  void check(const Tensor& view, const Tensor& y, const char* message) const {
    bool fits = view && view.dtype == DType::f32 && view.ndim == y.ndim;
    for (int i = 0; fits && i < y.ndim; ++i) fits = view.shape[i] == y.shape[i];
    require(fits && (view.stride[view.ndim - 1] == 1 || width == 1), message);
  }
  static float* at(const Tensor& view, std::int64_t row) {
    std::int64_t offset = 0;
    for (int i = view.ndim - 2; i >= 0; --i) {
      offset += row % view.shape[i] * view.stride[i];
      row /= view.shape[i];
    }
    return view.as<float>() + offset;
  }
  // f(row) for every row, on all threads if there is enough to do.
  template <class F>
  void each(ThreadPool& pool, F&& f) const {
    const auto range = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) f(row);
    };
    if (rows * width < 8192) {
      range(0, rows, 0);
    } else {
      pool.split(rows, 1, range);
    }
  }
};

}  // namespace llmc::LLMC_ISA
