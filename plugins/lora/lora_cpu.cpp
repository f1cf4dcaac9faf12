// y = base + x @ a[i].T @ b[i], with the adapter i of each row.
#include <algorithm>
#include <cstring>

#include "kernel.h"

namespace llmc::LLMC_ISA {
namespace {

constexpr std::int64_t kLanes = 16;       // partial sums over K
constexpr std::int64_t kColumns = 64;     // of y, that a thread takes at a time
constexpr std::int64_t kShare = 1 << 16;  // products that are worth waking a thread for

// Lane by lane, then the lanes in order: the same for every row.
float dot(const float* p, const float* q, std::int64_t count) {
  float lanes[kLanes] = {};
  std::int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    for (std::int64_t i = 0; i < kLanes; ++i) lanes[i] += p[k + i] * q[k + i];
  }
  for (std::int64_t i = 0; k + i < count; ++i) lanes[i] += p[k + i] * q[k + i];
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

class Lora : public Kernel {
 public:
  explicit Lora(const Attributes&) {}

  void run(const Context& context) override {
    require(context.in.size() == 6 && context.out.size() == 1, "takes x, base, a, b, ranks and adapters, and gives y");
    const Tensor &x = context.in[0], &base = context.in[1], &a = context.in[2], &b = context.in[3];
    const Tensor &ranks = context.in[4], &adapters = context.in[5], &y = context.out[0];
    for (const Tensor* t : {&x, &base, &y}) {
      require(*t && t->dtype == DType::f32 && t->ndim == 2, "x, base and y must be float32 with two dimensions");
      require(t->stride[1] == 1 || t->shape[1] == 1, "the columns of x, base and y must be contiguous");
    }
    const std::int64_t rows = x.shape[0], columns = x.shape[1], outputs = y.shape[1];
    require(base.shape[0] == rows && y.shape[0] == rows && base.shape[1] == outputs, "base and y must be [M, N]");
    for (const Tensor* t : {&a, &b}) {
      require(*t && t->dtype == DType::f32 && t->ndim == 3, "a and b must be float32 with three dimensions");
      const std::int64_t width = t == &a ? columns : outputs;
      require(t->shape[0] == a.shape[0] && t->shape[1] == a.shape[1] && t->shape[2] == width,
              "a must be [adapters, rank, K] and b [adapters, rank, N]");
      require(t->stride[2] == 1 && t->stride[1] == width && t->stride[0] == width * t->shape[1],
              "a and b must be contiguous");
    }
    const std::int64_t count = a.shape[0], most = a.shape[1];
    require(columns >= 1 && most >= 1, "K and the rank must be at least 1");
    require(ranks && ranks.dtype == DType::i32 && ranks.ndim == 1 && ranks.shape[0] == count && ranks.stride[0] == 1,
            "ranks must be int32 [adapters]");
    require(adapters && adapters.dtype == DType::i32 && adapters.ndim == 1 && adapters.shape[0] == rows &&
                (adapters.stride[0] == 1 || rows == 1),
            "adapters must be int32 [M]");
    const auto* rank_of = ranks.as<const std::int32_t>();
    const auto* adapter_of = adapters.as<const std::int32_t>();
    for (std::int64_t i = 0; i < count; ++i) {
      require(rank_of[i] >= 0 && rank_of[i] <= most, "a rank is more than a and b have");
    }
    bool any = false;
    for (std::int64_t row = 0; row < rows; ++row) {
      require(adapter_of[row] >= -1 && adapter_of[row] < count, "there is no such adapter");
      any |= adapter_of[row] >= 0;
    }
    if (!any && y.data == base.data) return;
    // How many products a row needs; none: it stays as it is.
    const auto rank = [&](std::int64_t row) { return adapter_of[row] < 0 ? 0 : rank_of[adapter_of[row]]; };

    auto* inner = context.scratch.array<float>(rows * most);
    context.pool.split(rows * most, std::max<std::int64_t>(1, kShare / columns),
                       [&](std::int64_t begin, std::int64_t end, int) {
                         for (std::int64_t i = begin; i < end; ++i) {
                           const std::int64_t row = i / most, j = i % most;
                           if (j >= rank(row)) continue;
                           const float* factors = a.as<const float>() + (adapter_of[row] * most + j) * columns;
                           inner[i] = dot(factors, x.as<const float>() + row * x.stride[0], columns);
                         }
                       });
    const std::int64_t blocks = (outputs + kColumns - 1) / kColumns;
    context.pool.split(rows * blocks, std::max<std::int64_t>(1, kShare / (kColumns * most)),
                       [&](std::int64_t begin, std::int64_t end, int) {
                         for (std::int64_t i = begin; i < end; ++i) {
                           const std::int64_t row = i / blocks, first = i % blocks * kColumns,
                                              width = std::min(kColumns, outputs - first);
                           const float* source = base.as<const float>() + row * base.stride[0] + first;
                           float* target = y.as<float>() + row * y.stride[0] + first;
                           float sums[kColumns] = {};
                           for (std::int64_t j = 0; j < rank(row); ++j) {
                             const float* factors =
                                 b.as<const float>() + (adapter_of[row] * most + j) * outputs + first;
                             const float h = inner[row * most + j];
                             if (width == kColumns) {
                               for (std::int64_t c = 0; c < kColumns; ++c) sums[c] += h * factors[c];
                             } else {
                               for (std::int64_t c = 0; c < width; ++c) sums[c] += h * factors[c];
                             }
                           }
                           if (rank(row) == 0) {
                             if (target != source)
                               std::memcpy(target, source, static_cast<std::size_t>(width) * sizeof(float));
                           } else {
                             for (std::int64_t c = 0; c < width; ++c) target[c] = source[c] + sums[c];
                           }
                         }
                       });
  }
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(lora, Lora)
