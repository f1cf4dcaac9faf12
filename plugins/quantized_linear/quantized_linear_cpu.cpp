// y = x @ weight.T + bias with a packed quantized weight, or function(gate) * up of the halves of that product.
#include "activations.h"
#include "quantized_panels.h"

namespace llmc::LLMC_ISA {
namespace {

// Panels of gates, and as many of the other half, that a task keeps in the second-level cache until they are one. Few
// rows stream longer ranges of the weight.
constexpr std::int64_t kGatePanels = 4, kFewGatePanels = 16;

class QuantizedLinear : public Kernel {
 public:
  explicit QuantizedLinear(const Attributes& attributes)
      : how_(attributes.text("format"), attributes.text("compute"), attributes.integer("group"),
             attributes.integer("x_group")) {
    const std::string function = attributes.text("function", "");
    if (!function.empty()) gate_ = find_activation(function).gate;
  }

  void run(const Context& context) override {
    require(context.in.size() >= 3 && context.in.size() <= 6 && context.out.size() == 1,
            "takes x, weight, scale, and zero, bias and x_scale that may be absent, and gives y");
    const auto optional = [&](std::size_t i) { return i < context.in.size() ? context.in[i] : Tensor(); };
    const Tensor &x = context.in[0], &y = context.out[0];
    const Tensor bias = optional(4), x_scale = optional(5);
    require(x && x.dtype == DType::f32 && x.ndim == 2, "x must be float32 [M, K]");
    require(y && y.dtype == DType::f32 && y.ndim == 2 && y.shape[0] == x.shape[0],
            "y must be float32 [M, N], or with a function [M, N / 2]");
    const std::int64_t outputs = gate_ == nullptr ? y.shape[1] : 2 * y.shape[1];
    require(x.stride[1] == 1 || x.shape[1] == 1, "the columns of x must be contiguous");
    require(y.stride[1] == 1 || y.shape[1] == 1, "the columns of y must be contiguous");
    QuantizedPanels w = quantized_panels(how_, context.in[1], context.in[2], optional(3), 0, outputs, x.shape[1]);
    if (bias) {
      require(bias.dtype == DType::f32 && bias.ndim == 1 && bias.shape[0] == outputs, "bias must be float32 [N]");
      require(bias.stride[0] == 1 || bias.shape[0] == 1, "bias must be contiguous");
    }
    if (x_scale) {
      require(x_scale.dtype == DType::f32 && x_scale.ndim == 1 && (x_scale.numel() == 1 || x_scale.numel() == 2),
              "x_scale must be one or two float32 numbers");
      require(how_.rounds_x() && how_.x_group == 0,
              "x_scale is for the whole of an x that is rounded to int8 or fp8; x_group must be 0");
      w.x_scale = x_scale.as<const float>();
      if (x_scale.numel() == 2) {
        require(how_.compute == Compute::int8, "the zero point of x is for int8");
        w.x_zero = w.x_scale[1];
      }
    }
    if (y.shape[0] == 0 || y.shape[1] == 0) return;
    lay_out_blocks(w, context.scratch);
    const PreparedRows rows = prepare(w, x.as<const float>(), x.shape[0], x.stride[0], context);
    if (gate_ != nullptr) return multiply_gated(w, rows, bias.as<const float>(), y, context);
    multiply(w, rows, bias.as<const float>(), y.as<float>(), y.stride[0], context.pool);
  }

 private:
  // As a product and llmc::glu, bit by bit, but only the result is written to memory. Gates are outputs [0, width) of
  // the product; what they are multiplied with begins at output `width`, maybe within a panel.
  void multiply_gated(const QuantizedPanels& w, const PreparedRows& x, const float* bias, const Tensor& y,
                      const Context& context) const {
    const std::int64_t width = y.shape[1], panels = (width + 15) / 16;
    const bool few = x.rows <= kFewRows;
    const std::int64_t most = few ? kFewGatePanels : kGatePanels, stride = (2 * most + 1) * 16;
    const std::int64_t task_rows = std::min(x.rows, kTaskRows), row_tasks = (x.rows + task_rows - 1) / task_rows;
    float* memory = context.scratch.array<float>(context.pool.size() * task_rows * stride);
    const auto task = [&](std::int64_t row, std::int64_t panel, std::int64_t panel_end, int thread) {
      const std::int64_t row_end = std::min(x.rows, row + task_rows), first = panel * 16;
      const std::int64_t count = std::min(width, panel_end * 16) - first, other = (width + first) / 16;
      // multiply() finds row r and output n at so many floats from y.
      float* gates = memory + thread * task_rows * stride;
      float* ups = gates + (panel_end - panel) * 16;
      multiply(w, x, row, row_end, panel, panel_end, bias, gates - row * stride - first, stride);
      multiply(w, x, row, row_end, other, (width + first + count + 15) / 16, bias, ups - row * stride - other * 16,
               stride);
      for (std::int64_t r = row; r < row_end; ++r, gates += stride, ups += stride) {
        gate_(gates, ups + width % 16, y.as<float>() + r * y.stride[0] + first, count);
      }
    };
    if (few) {
      context.pool.split(panels, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
        for (std::int64_t p = begin; p < end; p += most) task(0, p, std::min(end, p + most), thread);
      });
      return;
    }
    context.pool.share(row_tasks * ((panels + most - 1) / most), 1,
                       [&](std::int64_t begin, std::int64_t end, int thread) {
                         for (std::int64_t t = begin; t < end; ++t) {
                           const std::int64_t p = t / row_tasks * most;
                           task(t % row_tasks * task_rows, p, std::min(panels, p + most), thread);
                         }
                       });
  }

  const Quantization how_;
  GateLoop gate_ = nullptr;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(quantized_linear, QuantizedLinear)
