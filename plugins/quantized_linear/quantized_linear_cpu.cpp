// y = x @ weight.T + bias with a packed quantized weight.
#include "quantized_panels.h"

namespace llmc::LLMC_ISA {
namespace {

class QuantizedLinear : public Kernel {
 public:
  explicit QuantizedLinear(const Attributes& attributes)
      : how_(attributes.text("format"), attributes.text("compute"), attributes.integer("group"),
             attributes.integer("x_group")) {}

  void run(const Context& context) override {
    require(context.in.size() >= 3 && context.in.size() <= 6 && context.out.size() == 1,
            "takes x, weight, scale, and zero, bias and x_scale that may be absent, and gives y");
    const auto optional = [&](std::size_t i) { return i < context.in.size() ? context.in[i] : Tensor(); };
    const Tensor &x = context.in[0], &y = context.out[0];
    const Tensor bias = optional(4), x_scale = optional(5);
    require(x && x.dtype == DType::f32 && x.ndim == 2, "x must be float32 [M, K]");
    require(y && y.dtype == DType::f32 && y.ndim == 2 && y.shape[0] == x.shape[0], "y must be float32 [M, N]");
    require(x.stride[1] == 1 || x.shape[1] == 1, "the columns of x must be contiguous");
    require(y.stride[1] == 1 || y.shape[1] == 1, "the columns of y must be contiguous");
    QuantizedPanels w = quantized_panels(how_, context.in[1], context.in[2], optional(3), 0, y.shape[1], x.shape[1]);
    if (bias) {
      require(bias.dtype == DType::f32 && bias.ndim == 1 && bias.shape[0] == y.shape[1], "bias must be float32 [N]");
      require(bias.stride[0] == 1 || bias.shape[0] == 1, "bias must be contiguous");
    }
    if (x_scale) {
      require(x_scale.dtype == DType::f32 && x_scale.numel() == 1, "x_scale must be one float32 number");
      require(how_.rounds_x() && how_.x_group == 0,
              "x_scale is for the whole of an x that is rounded to int8 or fp8; x_group must be 0");
      w.x_scale = x_scale.as<const float>();
    }
    if (y.shape[0] == 0 || y.shape[1] == 0) return;
    lay_out_blocks(w, context.scratch);
    const PreparedRows rows = prepare(w, x.as<const float>(), x.shape[0], x.stride[0], context);
    multiply(w, rows, bias.as<const float>(), y.as<float>(), y.stride[0], context.pool);
  }

 private:
  const Quantization how_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(quantized_linear, QuantizedLinear)
