// y = function(gate) * up.
#include "activations.h"

namespace llmc::LLMC_ISA {
namespace {

constexpr std::int64_t kColumns = 512;    // a unit of work: so much of a row
constexpr std::int64_t kParallel = 4096;  // elements from which the other threads help

void check(const Tensor& view, const Tensor& y, const char* message) {
  bool fits = view && view.dtype == DType::f32 && view.ndim == 2;
  for (int i = 0; fits && i < 2; ++i) fits = view.shape[i] == y.shape[i];
  require(fits && (view.stride[1] == 1 || view.shape[1] == 1), message);
}

class Glu : public Kernel {
 public:
  explicit Glu(const Attributes& attributes) : loop_(find_activation(attributes.text("function")).gate) {}

  void run(const Context& context) override {
    require(context.in.size() == 2 && context.out.size() == 1, "takes gate and up, and gives y");
    const Tensor &gate = context.in[0], &up = context.in[1], &y = context.out[0];
    check(y, y, "y must be float32 [M, I] with contiguous rows");
    check(gate, y, "gate must be float32 of y's shape, with contiguous rows");
    check(up, y, "up must be float32 of y's shape, with contiguous rows");
    const std::int64_t width = y.shape[1], units = (width + kColumns - 1) / kColumns;
    const auto range = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const std::int64_t row = unit / units, column = unit % units * kColumns;
        loop_(gate.as<const float>() + row * gate.stride[0] + column,
              up.as<const float>() + row * up.stride[0] + column, y.as<float>() + row * y.stride[0] + column,
              std::min(kColumns, width - column));
      }
    };
    if (y.numel() < kParallel) {
      range(0, y.shape[0] * units, 0);
    } else {
      context.pool.split(y.shape[0] * units, 1, range);
    }
  }

 private:
  const GateLoop loop_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(glu, Glu)
