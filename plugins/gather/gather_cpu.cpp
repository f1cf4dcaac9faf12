// y = data[ids]: one copied row for each id.
#include "../elementwise/strided.h"

namespace llmc::LLMC_ISA {
namespace {

class Gather : public Kernel {
 public:
  explicit Gather(const Attributes&) {}

  void run(const Context& context) override {
    const Tensor &data = context.in[0], &ids = context.in[1], &y = context.out[0];
    require(data.dtype == y.dtype, "data and y need one dtype");
    const int rest = data.ndim - 1;
    require(rest >= 0 && y.ndim == ids.ndim + rest, "y needs the shape of ids, then that of a row");
    require_same_shape(ids, y, ids.ndim, "y needs the shape of ids, then that of a row");
    for (int d = 0; d < rest; ++d) {
      require(y.shape[ids.ndim + d] == data.shape[d + 1], "y needs the shape of ids, then that of a row");
    }
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
    const Tensor &data = context.in[0], &y = context.out[0];
    const Ids ids(context.in[1]);
    const int leading = context.in[1].ndim, rest = data.ndim - 1;
    Tensor from = data, to = y;  // one row
    from.ndim = to.ndim = rest;
    std::copy_n(data.shape + 1, rest, from.shape);
    std::copy_n(data.stride + 1, rest, from.stride);
    std::copy_n(y.shape + leading, rest, to.shape);
    std::copy_n(y.stride + leading, rest, to.stride);
    const Tensor* row_views[] = {&from, &to};
    Walk<2> inside(row_views, rest);
    std::int64_t stride[2];
    const std::int64_t inner = inside.take_inner(stride), runs = inside.count();

    const Tensor* views[] = {&context.in[1], &y};
    for_each_position(context, Walk<2>(views, leading), from.numel(), [&](const Walk<2>& row, int) {
      const std::int64_t id = ids.at(row.offset[0], data.shape[0], "an id is out of range");
      const T* source = at<const T>(data, id * data.stride[0]);
      T* target = at<T>(y, row.offset[1]);
      Walk<2> run = inside;
      run.seek(0);
      for (std::int64_t r = 0; r < runs; ++r, run.next()) {
        const T* p = source + run.offset[0];
        T* q = target + run.offset[1];
        if (stride[0] == 1 && stride[1] == 1) {
          std::memcpy(q, p, static_cast<std::size_t>(inner) * sizeof(T));
        } else {
          for (std::int64_t i = 0; i < inner; ++i) q[i * stride[1]] = p[i * stride[0]];
        }
      }
    });
  }
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(gather, Gather)
