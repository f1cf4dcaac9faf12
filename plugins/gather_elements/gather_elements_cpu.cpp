// Elements of each row, picked by the ids of that row.
#include "../elementwise/strided.h"

namespace llmc::LLMC_ISA {
namespace {

class GatherElements : public Kernel {
 public:
  explicit GatherElements(const Attributes&) {}

  void run(const Context& context) override {
    const Tensor &data = context.in[0], &ids = context.in[1], &y = context.out[0];
    require(data.dtype == y.dtype, "data and y need one dtype");
    require(data.ndim >= 1 && ids.ndim == data.ndim && y.ndim == data.ndim, "the ranks differ");
    require_same_shape(ids, y, ids.ndim, "y needs the shape of ids");
    require_same_shape(data, y, data.ndim - 1, "data and ids differ in a leading axis");
    switch (item_size(data.dtype)) {
      case 1:
        return rows<std::uint8_t>(context);
      case 2:
        return rows<std::uint16_t>(context);
      case 4:
        return rows<std::uint32_t>(context);
      default:
        return rows<std::uint64_t>(context);
    }
  }

 private:
  template <class T>
  static void rows(const Context& context) {
    const Tensor &data = context.in[0], &ids = context.in[1], &y = context.out[0];
    const Ids index(ids);
    const int last = data.ndim - 1;
    const std::int64_t size = data.shape[last];
    const Tensor* views[] = {&data, &ids, &y};
    for_each_position(context, Walk<3>(views, last), y.shape[last], [&](const Walk<3>& row, int) {
      const T* from = at<const T>(data, row.offset[0]);
      T* to = at<T>(y, row.offset[2]);
      for (std::int64_t i = 0; i < y.shape[last]; ++i) {
        const std::int64_t id = index.at(row.offset[1] + i * ids.stride[last], size, "an id is out of range");
        to[i * y.stride[last]] = from[id * data.stride[last]];
      }
    });
  }
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(gather_elements, GatherElements)
