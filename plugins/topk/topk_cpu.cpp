// The k best values of each row, best first; the lower index wins a tie, and NaN counts as largest.
#include "../elementwise/strided.h"

namespace llmc::LLMC_ISA {
namespace {

struct Candidate {
  float value;
  std::int32_t index;
};

LLMC_INLINE bool larger(float a, float b) { return a > b || (a != a && b == b); }

// Whether a goes before b.
template <bool kLargest>
LLMC_INLINE bool before(const Candidate& a, const Candidate& b) {
  if (kLargest ? larger(a.value, b.value) : larger(b.value, a.value)) return true;
  if (kLargest ? larger(b.value, a.value) : larger(a.value, b.value)) return false;
  return a.index < b.index;
}

// A heap of the k best so far with the worst of them on top, then sorted.
template <bool kLargest>
void select_row(const float* x, std::int64_t stride, std::int64_t n, std::int64_t k, Candidate* heap) {
  for (std::int64_t i = 0; i < n; ++i) {
    const Candidate next{x[i * stride], static_cast<std::int32_t>(i)};
    if (i < k) {
      heap[i] = next;
      std::push_heap(heap, heap + i + 1, before<kLargest>);
    } else if (before<kLargest>(next, heap[0])) {
      std::pop_heap(heap, heap + k, before<kLargest>);
      heap[k - 1] = next;
      std::push_heap(heap, heap + k, before<kLargest>);
    }
  }
  std::sort_heap(heap, heap + k, before<kLargest>);
}

class TopK : public Kernel {
 public:
  explicit TopK(const Attributes& attributes) : k_(attributes.integer("k")), largest_(attributes.flag("largest")) {}

  void run(const Context& context) override {
    const Tensor &x = context.in[0], &values = context.out[0], &indices = context.out[1];
    require(x.ndim >= 1 && x.ndim == values.ndim && x.ndim == indices.ndim, "x and the results need one rank");
    const int last = x.ndim - 1;
    require(x.dtype == DType::f32 && values.dtype == DType::f32, "x and values must be float32");
    require(indices.dtype == DType::i64, "indices must be int64");
    require_same_shape(x, values, last, "values need the leading shape of x");
    require_same_shape(x, indices, last, "indices need the leading shape of x");
    require(values.shape[last] == k_ && indices.shape[last] == k_, "the results need k columns");
    const std::int64_t n = x.shape[last];
    require(k_ >= 0 && k_ <= n && n <= 0x7fffffff, "k is larger than the last axis");
    Candidate* heaps = context.scratch.array<Candidate>(context.pool.size() * std::max<std::int64_t>(k_, 1));
    const Tensor* views[] = {&x, &values, &indices};
    for_each_position(context, Walk<3>(views, last), n * 4, [&](const Walk<3>& row, int thread) {
      Candidate* heap = heaps + thread * k_;
      const float* in = at<const float>(x, row.offset[0]);
      largest_ ? select_row<true>(in, x.stride[last], n, k_, heap) : select_row<false>(in, x.stride[last], n, k_, heap);
      for (std::int64_t i = 0; i < k_; ++i) {
        at<float>(values, row.offset[1])[i * values.stride[last]] = heap[i].value;
        at<std::int64_t>(indices, row.offset[2])[i * indices.stride[last]] = heap[i].index;
      }
    });
  }

 private:
  const std::int64_t k_;
  const bool largest_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(topk, TopK)
