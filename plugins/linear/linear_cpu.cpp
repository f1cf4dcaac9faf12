// y = x @ weight.T + bias with a packed weight.
#include "panels.h"

namespace llmc::LLMC_ISA {
namespace {

class Linear : public Kernel {
 public:
  explicit Linear(const Attributes&) {}

  void run(const Context& context) override {
    require(context.in.size() >= 2 && context.in.size() <= 3 && context.out.size() == 1,
            "takes x, weight and a bias that may be absent, and gives y");
    const Tensor &x = context.in[0], &y = context.out[0];
    const Tensor bias = context.in.size() > 2 ? context.in[2] : Tensor();
    require(x && x.dtype == DType::f32 && x.ndim == 2, "x must be float32 [M, K]");
    require(y && y.dtype == DType::f32 && y.ndim == 2 && y.shape[0] == x.shape[0], "y must be float32 [M, N]");
    require(x.stride[1] == 1 || x.shape[1] == 1, "the columns of x must be contiguous");
    require(y.stride[1] == 1 || y.shape[1] == 1, "the columns of y must be contiguous");
    const Panels w = panels_of(context.in[1], 0, y.shape[1], x.shape[1]);
    if (bias) {
      require(bias.dtype == DType::f32 && bias.ndim == 1 && bias.shape[0] == y.shape[1], "bias must be float32 [N]");
      require(bias.stride[0] == 1 || bias.shape[0] == 1, "bias must be contiguous");
    }
    if (y.shape[0] == 0 || y.shape[1] == 0) return;
    const PreparedRows rows = prepare(w, x.as<const float>(), x.shape[0], x.stride[0], context);
    multiply(w, rows, bias.as<const float>(), y.as<float>(), y.stride[0], context.pool);
  }
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(linear, Linear)
