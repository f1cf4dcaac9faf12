// Walking strided views of one shape: what the generic ops (elementwise, reduce, gather, ...) share.
#pragma once
#include "simd.h"

namespace llmc::LLMC_ISA {

// Steps of less work than this many elements run on the calling thread: waking the others costs more.
constexpr std::int64_t kSmall = 16384;

template <class T>
LLMC_INLINE T* at(const Tensor& view, std::int64_t offset) {
  return static_cast<T*>(view.data) + offset;
}

LLMC_INLINE std::int64_t item_size(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::i64:
      return 8;
    case DType::boolean:
    case DType::u8:
      return 1;
  }
  return 0;
}

inline void require_same_shape(const Tensor& a, const Tensor& b, int ndim, const char* message) {
  bool same = a.ndim >= ndim && b.ndim >= ndim;
  for (int i = 0; same && i < ndim; ++i) same = a.shape[i] == b.shape[i];
  require(same, message);
}

// The positions of the first `ndim` dims of N views that agree in them, in row-major order. Dims that lie behind one
// another in every view are merged, so that few long runs are left.
template <int N>
class Walk {
 public:
  std::int64_t offset[N] = {};  // elements, of the current position

  Walk(const Tensor* const (&views)[N], int ndim) {
    for (int d = ndim - 1; d >= 0; --d) {
      const std::int64_t size = views[0]->shape[d];
      if (size == 1) continue;
      bool joins = ndim_ > 0;
      for (int i = 0; joins && i < N; ++i) joins = views[i]->stride[d] == stride_[ndim_ - 1][i] * shape_[ndim_ - 1];
      if (joins) {
        shape_[ndim_ - 1] *= size;
        continue;
      }
      shape_[ndim_] = size;
      for (int i = 0; i < N; ++i) stride_[ndim_][i] = views[i]->stride[d];
      ++ndim_;
    }
  }

  // Takes the innermost dim out of the walk: the caller runs over it himself.
  std::int64_t take_inner(std::int64_t (&stride)[N]) {
    std::fill_n(stride, N, std::int64_t{0});
    if (ndim_ == 0) return 1;
    const std::int64_t size = shape_[0];
    std::copy_n(stride_[0], N, stride);
    --ndim_;
    for (int d = 0; d < ndim_; ++d) {
      shape_[d] = shape_[d + 1];
      std::copy_n(stride_[d + 1], N, stride_[d]);
    }
    return size;
  }

  std::int64_t count() const {
    std::int64_t n = 1;
    for (int d = 0; d < ndim_; ++d) n *= shape_[d];
    return n;
  }

  void seek(std::int64_t position) {
    std::fill_n(offset, N, std::int64_t{0});
    for (int d = 0; d < ndim_; ++d) {
      index_[d] = position % shape_[d];
      position /= shape_[d];
      for (int i = 0; i < N; ++i) offset[i] += index_[d] * stride_[d][i];
    }
  }

  void next() {
    for (int d = 0; d < ndim_; ++d) {
      for (int i = 0; i < N; ++i) offset[i] += stride_[d][i];
      if (++index_[d] < shape_[d]) return;
      for (int i = 0; i < N; ++i) offset[i] -= shape_[d] * stride_[d][i];
      index_[d] = 0;
    }
  }

 private:
  int ndim_ = 0;  // dims are kept innermost first
  std::int64_t shape_[kMaxDims], stride_[kMaxDims][N], index_[kMaxDims] = {};
};

// Calls f(walk, thread) for every position of the walk, shared out over the threads if each costs `work` elements.
template <int N, class F>
void for_each_position(const Context& context, const Walk<N>& walk, std::int64_t work, F&& f) {
  const std::int64_t count = walk.count();
  const auto range = [&](std::int64_t begin, std::int64_t end, int thread) {
    Walk<N> mine = walk;
    mine.seek(begin);
    for (std::int64_t p = begin; p < end; ++p, mine.next()) f(mine, thread);
  };
  if (count * std::max<std::int64_t>(work, 1) < kSmall) {
    if (count > 0) range(0, count, 0);
  } else {
    context.pool.split(count, 1, range);
  }
}

// n elements from a strided run as contiguous ones: where they are, or copied to the buffer.
template <class T>
LLMC_INLINE const T* contiguous(const T* p, std::int64_t stride, std::int64_t n, T* buffer) {
  if (stride == 1) return p;
  for (std::int64_t i = 0; i < n; ++i) buffer[i] = p[i * stride];
  return buffer;
}

// Ids of either width.
struct Ids {
  const void* data;
  bool wide;
  explicit Ids(const Tensor& view) : data(view.data), wide(view.dtype == DType::i64) {
    require(wide || view.dtype == DType::i32, "ids must be int32 or int64");
  }
  std::int64_t at(std::int64_t offset) const {
    return wide ? static_cast<const std::int64_t*>(data)[offset] : static_cast<const std::int32_t*>(data)[offset];
  }
  // Negative ids count from the end.
  std::int64_t at(std::int64_t offset, std::int64_t size, const char* message) const {
    std::int64_t id = at(offset);
    if (id < 0) id += size;
    require(id >= 0 && id < size, message);
    return id;
  }
};

}  // namespace llmc::LLMC_ISA
