// One row (the last axes) is reduced by one thread in an order that its length fixes: 16 running values, element i goes
// to the i % 16th, and one tree at the end.
#include "../elementwise/strided.h"

namespace llmc::LLMC_ISA {
namespace {

using Byte = std::uint8_t;

// The elements of a row, 16 at a time: f(values, n), n = 16 but for the last.
template <class T, class F>
void chunks_of_row(const T* x, Walk<1> row, std::int64_t inner, std::int64_t stride, F&& f) {
  alignas(64) T chunk[16];
  int filled = 0;
  const std::int64_t runs = row.count();
  row.seek(0);
  for (std::int64_t r = 0; r < runs; ++r, row.next()) {
    const T* p = x + row.offset[0];
    std::int64_t i = 0;
    if (stride == 1 && filled == 0) {
      for (; i + 16 <= inner; i += 16) f(p + i, 16);
    }
    for (; i < inner; ++i) {
      chunk[filled++] = p[i * stride];
      if (filled == 16) {
        f(static_cast<const T*>(chunk), 16);
        filled = 0;
      }
    }
  }
  if (filled > 0) f(static_cast<const T*>(chunk), filled);
}

struct Sum {
  template <class T>
  static T start() {
    return T{0};
  }
  template <class T>
  static T join(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};
struct Product {
  template <class T>
  static T start() {
    return T{1};
  }
  template <class T>
  static T join(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
    } else {
      return a * b;
    }
  }
};
struct Max {  // NaN wins
  template <class T>
  static T start() {
    return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity()
                                                : std::numeric_limits<T>::lowest();
  }
  template <class T>
  static T join(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class T>
  static T start() {
    return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
  }
  template <class T>
  static T join(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Any {
  template <class T>
  static T start() {
    return T{0};
  }
  template <class T>
  static T join(T a, T b) {
    return static_cast<T>(a || b);
  }
};
struct All {
  template <class T>
  static T start() {
    return T{1};
  }
  template <class T>
  static T join(T a, T b) {
    return static_cast<T>(a && b);
  }
};

template <class F, class T>
T reduce_row(const T* x, const Walk<1>& row, std::int64_t inner, std::int64_t stride) {
  alignas(64) T lane[16];
  std::fill_n(lane, 16, F::template start<T>());
  chunks_of_row(x, row, inner, stride, [&](const T* values, int n) {
    if (n == 16) {
      for (int i = 0; i < 16; ++i) lane[i] = F::join(lane[i], values[i]);
    } else {
      for (int i = 0; i < n; ++i) lane[i] = F::join(lane[i], values[i]);
    }
  });
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = F::join(lane[i], lane[i + half]);
  }
  return lane[0];
}

// The lowest index of the largest (or smallest) value; a NaN counts as such.
template <bool kLargest, class T>
std::int64_t find_best(const T* x, const Walk<1>& row, std::int64_t inner, std::int64_t stride) {
  T best{};
  std::int64_t index = -1, position = 0;
  chunks_of_row(x, row, inner, stride, [&](const T* values, int n) {
    for (int i = 0; i < n; ++i, ++position) {
      const T value = values[i];
      const bool better = kLargest ? value > best : value < best;
      if (index < 0 || ((better || value != value) && best == best)) {
        best = value;
        index = position;
      }
    }
  });
  return index;
}

class Reduce : public Kernel {
 public:
  explicit Reduce(const Attributes& attributes)
      : function_(attributes.text("function")), axes_(static_cast<int>(attributes.integer("num_axes"))) {}

  void run(const Context& context) override {
    const Tensor &x = context.in[0], &y = context.out[0];
    require(axes_ >= 0 && axes_ <= x.ndim, "x has fewer axes than num_axes");
    const int kept = x.ndim - axes_;
    require_same_shape(x, y, kept, "y needs the leading shape of x");
    for (int d = kept; d < y.ndim; ++d) require(y.shape[d] == 1, "y needs the leading shape of x");
    const bool found = x.dtype == DType::f32       ? typed<float>(context, kept)
                       : x.dtype == DType::i32     ? typed<std::int32_t>(context, kept)
                       : x.dtype == DType::i64     ? typed<std::int64_t>(context, kept)
                       : x.dtype == DType::boolean ? logical(context, kept)
                                                   : false;
    if (!found) fail("no function '" + function_ + "' of this dtype");
  }

 private:
  template <class T>
  bool typed(const Context& context, int kept) {
    if (function_ == "argmax") return rows<T, std::int64_t>(context, kept, DType::i64, find_best<true, T>);
    if (function_ == "argmin") return rows<T, std::int64_t>(context, kept, DType::i64, find_best<false, T>);
    const DType same = context.in[0].dtype;
    if (function_ == "sum") return rows<T, T>(context, kept, same, reduce_row<Sum, T>);
    if (function_ == "prod") return rows<T, T>(context, kept, same, reduce_row<Product, T>);
    if (function_ == "max") return rows<T, T>(context, kept, same, reduce_row<Max, T>);
    if (function_ == "min") return rows<T, T>(context, kept, same, reduce_row<Min, T>);
    if constexpr (std::is_same_v<T, float>) {
      if (function_ == "mean") {
        return rows<T, T>(context, kept, same,
                          [](const T* p, const Walk<1>& row, std::int64_t inner, std::int64_t stride) {
                            return reduce_row<Sum, T>(p, row, inner, stride) / static_cast<float>(row.count() * inner);
                          });
      }
    }
    return false;
  }

  bool logical(const Context& context, int kept) {
    if (function_ == "any") return rows<Byte, Byte>(context, kept, DType::boolean, reduce_row<Any, Byte>);
    if (function_ == "all") return rows<Byte, Byte>(context, kept, DType::boolean, reduce_row<All, Byte>);
    return false;
  }

  template <class T, class R, class F>
  bool rows(const Context& context, int kept, DType out, F&& reduce) {
    const Tensor &x = context.in[0], &y = context.out[0];
    require(y.dtype == out, "y has the wrong dtype");
    Tensor row = x;
    row.ndim = axes_;
    std::copy_n(x.shape + kept, axes_, row.shape);
    std::copy_n(x.stride + kept, axes_, row.stride);
    const Tensor* views[] = {&row};
    Walk<1> inside(views, axes_);
    std::int64_t stride[1];
    const std::int64_t inner = inside.take_inner(stride);
    const Tensor* both[] = {&x, &y};
    for_each_position(context, Walk<2>(both, kept), row.numel(), [&](const Walk<2>& at_row, int) {
      at<R>(y, 0)[at_row.offset[1]] = reduce(at<const T>(x, at_row.offset[0]), inside, inner, stride[0]);
    });
    return true;
  }

  const std::string function_;
  const int axes_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(reduce, Reduce)
