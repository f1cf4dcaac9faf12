// Softmax of the last axis: one thread per row, largest value first, then exponentials and their sum, then the
// quotient.
#include <limits>

#include "../elementwise/strided.h"

namespace llmc::LLMC_ISA {
namespace {

// y = softmax(x) or its logarithm, n values each. Lanes behind the end count as -inf.
void softmax_row(const float* x, float* y, std::int64_t n, bool log) {
  const f32x16 absent = broadcast(-std::numeric_limits<float>::infinity());
  const auto part = [&](const float* p, std::int64_t i) {
    const std::int64_t left = n - i;
    return left >= 16 ? load(p + i) : select(mask_first(left), load(p + i, static_cast<int>(left)), absent);
  };
  f32x16 largest = absent;
  for (std::int64_t i = 0; i < n; i += 16) largest = max(largest, part(x, i));
  const f32x16 top = broadcast(reduce_max(largest));
  f32x16 sum = zero();
  for (std::int64_t i = 0; i < n; i += 16) {
    const f32x16 e = exp(part(x, i) - top);
    sum = sum + select(mask_first(n - i), e, zero());
    if (!log) store(y + i, e, static_cast<int>(std::min<std::int64_t>(16, n - i)));
  }
  const float total = reduce_add(sum);
  const f32x16 inverse = broadcast(1.0f / total), log_total = broadcast(std::log(total));
  for (std::int64_t i = 0; i < n; i += 16) {
    const f32x16 result = log ? part(x, i) - top - log_total : part(y, i) * inverse;
    store(y + i, result, static_cast<int>(std::min<std::int64_t>(16, n - i)));
  }
}

class Softmax : public Kernel {
 public:
  explicit Softmax(const Attributes& attributes) : log_(attributes.flag("log")) {}

  void run(const Context& context) override {
    const Tensor &x = context.in[0], &y = context.out[0];
    require(x.dtype == DType::f32 && y.dtype == DType::f32, "x and y must be float32");
    require(x.ndim >= 1 && x.ndim == y.ndim, "x and y need one shape");
    require_same_shape(x, y, x.ndim, "x and y need one shape");
    const int last = x.ndim - 1;
    const std::int64_t n = x.shape[last], from = x.stride[last], to = y.stride[last];
    if (n == 0) return;
    const bool copies = from != 1 || to != 1;
    float* scratch = copies ? context.scratch.array<float>(context.pool.size() * n) : nullptr;
    const Tensor* views[] = {&x, &y};
    for_each_position(context, Walk<2>(views, last), n * 8, [&](const Walk<2>& row, int thread) {
      const float* in = at<const float>(x, row.offset[0]);
      float* out = at<float>(y, row.offset[1]);
      if (!copies) {
        softmax_row(in, out, n, log_);
        return;
      }
      float* buffer = scratch + thread * n;
      for (std::int64_t i = 0; i < n; ++i) buffer[i] = in[i * from];
      softmax_row(buffer, buffer, n, log_);
      for (std::int64_t i = 0; i < n; ++i) out[i * to] = buffer[i];
    });
  }

 private:
  const bool log_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(softmax, Softmax)
