// sum = a + b, y = norm(sum).
#include "../norm/norm_row.h"

namespace llmc::LLMC_ISA {
namespace {

class AddNorm : public Kernel {
 public:
  explicit AddNorm(const Attributes& attributes) : norm_(attributes) {}

  void run(const Context& context) override {
    require(context.in.size() >= 2 && context.in.size() <= 4 && context.out.size() == 2,
            "takes a, b, weight and bias, and gives sum and y");
    const Tensor &a = context.in[0], &b = context.in[1], &sum = context.out[0], &y = context.out[1];
    const NormRows rows(y);
    rows.check(y, y, "the last axis of y must be contiguous");
    for (const Tensor* view : {&a, &b, &sum}) {
      rows.check(*view, y, "a, b and sum must be float32 of y's shape, their last axis contiguous");
    }
    const NormParameter weight(context.in.size() > 2 ? context.in[2] : Tensor(), y);
    const NormParameter bias(context.in.size() > 3 ? context.in[3] : Tensor(), y);
    rows.each(context.pool, [&](std::int64_t row) {
      const float *one = NormRows::at(a, row), *other = NormRows::at(b, row);
      float* total = NormRows::at(sum, row);
      for (std::int64_t i = 0; i < rows.width; i += 16) {
        const int lanes = static_cast<int>(std::min<std::int64_t>(16, rows.width - i));
        store(total + i, load(one + i, lanes) + load(other + i, lanes), lanes);
      }
      const std::int64_t head = row % rows.heads;
      normalize_row(norm_, total, weight.row(head), bias.row(head), NormRows::at(y, row), rows.width);
    });
  }

 private:
  const NormAttributes norm_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(add_norm, AddNorm)
