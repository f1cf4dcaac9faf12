// y = n(x) * (weight + offset) + bias over the last axis.
#include "norm_row.h"

namespace llmc::LLMC_ISA {
namespace {

class Norm : public Kernel {
 public:
  explicit Norm(const Attributes& attributes) : norm_(attributes) {}

  void run(const Context& context) override {
    require(context.in.size() >= 1 && context.in.size() <= 3 && context.out.size() == 1,
            "takes x, weight and bias, and gives y");
    const Tensor &x = context.in[0], &y = context.out[0];
    const NormRows rows(y);
    rows.check(y, y, "the last axis of y must be contiguous");
    rows.check(x, y, "x must be float32 of y's shape, its last axis contiguous");
    const NormParameter weight(context.in.size() > 1 ? context.in[1] : Tensor(), x);
    const NormParameter bias(context.in.size() > 2 ? context.in[2] : Tensor(), x);
    rows.each(context.pool, [&](std::int64_t row) {
      const std::int64_t head = row % rows.heads;
      normalize_row(norm_, NormRows::at(x, row), weight.row(head), bias.row(head), NormRows::at(y, row), rows.width);
    });
  }

 private:
  const NormAttributes norm_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(norm, Norm)
