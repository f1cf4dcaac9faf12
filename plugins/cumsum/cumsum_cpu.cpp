// Running sums of the last axis, element by element.
#include <type_traits>

#include "../elementwise/strided.h"

namespace llmc::LLMC_ISA {
namespace {

class Cumsum : public Kernel {
 public:
  explicit Cumsum(const Attributes& attributes) : exclusive_(attributes.flag("exclusive")) {}

  void run(const Context& context) override {
    const Tensor &x = context.in[0], &y = context.out[0];
    require(x.dtype == y.dtype && x.ndim >= 1 && x.ndim == y.ndim, "x and y need one shape and dtype");
    require_same_shape(x, y, x.ndim, "x and y need one shape and dtype");
    switch (x.dtype) {
      case DType::f32:
        return rows<float>(context);
      case DType::i32:
        return rows<std::int32_t>(context);
      case DType::i64:
        return rows<std::int64_t>(context);
      default:
        fail("x must be float32, int32 or int64");
    }
  }

 private:
  template <class T>
  void rows(const Context& context) const {
    // Integers wrap around.
    using Sum = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;
    const Tensor &x = context.in[0], &y = context.out[0];
    const int last = x.ndim - 1;
    const Tensor* views[] = {&x, &y};
    for_each_position(context, Walk<2>(views, last), x.shape[last] * 4, [&](const Walk<2>& row, int) {
      const T* in = at<const T>(x, row.offset[0]);
      T* out = at<T>(y, row.offset[1]);
      Sum sum = 0;
      for (std::int64_t i = 0; i < x.shape[last]; ++i) {
        const Sum next = sum + static_cast<Sum>(in[i * x.stride[last]]);
        out[i * y.stride[last]] = static_cast<T>(exclusive_ ? sum : next);
        sum = next;
      }
    });
  }

  const bool exclusive_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(cumsum, Cumsum)
