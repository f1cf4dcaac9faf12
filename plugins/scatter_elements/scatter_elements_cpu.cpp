// Elements of each row replaced or added to; ids of one row are taken in ascending order, so the last one wins.
#include <type_traits>

#include "../elementwise/strided.h"

namespace llmc::LLMC_ISA {
namespace {

class ScatterElements : public Kernel {
 public:
  explicit ScatterElements(const Attributes& attributes) : add_(attributes.text("reduction") == "add") {
    require(add_ || attributes.text("reduction") == "none", "reduction must be none or add");
  }

  void run(const Context& context) override {
    const Tensor &data = context.in[0], &ids = context.in[1], &src = context.in[2], &y = context.out[0];
    require(data.dtype == y.dtype && src.dtype == y.dtype, "data, src and y need one dtype");
    const bool ranks = data.ndim >= 1 && ids.ndim == data.ndim && src.ndim == data.ndim && y.ndim == data.ndim;
    require(ranks, "the ranks differ");
    require_same_shape(data, y, data.ndim, "y needs the shape of data");
    require_same_shape(ids, src, ids.ndim, "src needs the shape of ids");
    require_same_shape(ids, data, ids.ndim - 1, "data and ids differ in a leading axis");
    switch (data.dtype) {
      case DType::f32:
        return rows<float>(context);
      case DType::i32:
        return rows<std::uint32_t>(context);  // unsigned: sums wrap around
      case DType::i64:
        return rows<std::uint64_t>(context);
      case DType::boolean:
        return rows<bool>(context);
      default:
        fail("data must be float32, int32, int64 or bool");
    }
  }

 private:
  template <class T>
  void rows(const Context& context) const {
    const Tensor &data = context.in[0], &ids = context.in[1], &src = context.in[2], &y = context.out[0];
    const Ids index(ids);
    const int last = data.ndim - 1;
    const std::int64_t size = data.shape[last], count = ids.shape[last];
    const Tensor* views[] = {&data, &ids, &src, &y};
    for_each_position(context, Walk<4>(views, last), size + count, [&](const Walk<4>& row, int) {
      const T* from = at<const T>(data, row.offset[0]);
      const T* values = at<const T>(src, row.offset[2]);
      T* to = at<T>(y, row.offset[3]);
      if (from != to || data.stride[last] != y.stride[last]) {
        for (std::int64_t i = 0; i < size; ++i) to[i * y.stride[last]] = from[i * data.stride[last]];
      }
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t place = row.offset[1] + i * ids.stride[last];
        T& target = to[index.at(place, size, "an id is out of range") * y.stride[last]];
        const T value = values[i * src.stride[last]];
        target = add_ ? static_cast<T>(target + value) : value;
      }
    });
  }

  const bool add_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(scatter_elements, ScatterElements)
