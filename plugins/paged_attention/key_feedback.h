// Keys of E4M3 whose errors are fed back: dims are rounded one after the other, and what a dim is off by is made up for
// by those behind it, as queries mostly need it. storage.py says what is stored.
#pragma once
#include "cache_view.h"

namespace llmc::LLMC_ISA {

// Input 9, key_feedback [kv_heads][key_dim][key_dim].
constexpr std::size_t kKeyFeedback = 9;

template <class T>
LLMC_INLINE bool feeds_back(const Context& context) {
  return std::is_same_v<T, e4m3> && context.in.size() > kKeyFeedback && context.in[kKeyFeedback];
}

// Rows y [n] become numbers of E4M3. A dim has to wait for the one before, so that rows side by side are done in little
// more time than one. Products and differences are rounded each by itself, the same on every machine.
template <int ROWS>
void feed_back(float* const (&y)[ROWS], const float* const (&feedback)[ROWS], std::int64_t n) {
  for (std::int64_t d = 0; d < n; ++d) {
    f32x16 error[ROWS];
    LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
      error[r] = broadcast(y[r][d] - nearest(y[r][d], e4m3{}));
    }
    for (std::int64_t i = d / kLanes * kLanes; i < n; i += kLanes) {
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
        const float* row = feedback[r] + d * n + i;
        const f32x16 shares = i + kLanes <= n ? load(row) : load(row, static_cast<int>(n - i));
        store(y[r] + i, load(y[r] + i) - error[r] * shares);
      }
    }
  }
}

// Collects keys until there are enough to be stored side by side; T is e4m3.
template <class T>
class FedBackKeys {
 public:
  static std::int64_t bytes(std::int64_t dims) { return 2 * kRows * RowBuffer::padded(dims) * 4; }

  FedBackKeys(const CacheView<T>& cache, const Context& context, std::byte* memory)
      : cache_(cache), context_(context), dims_(cache.key_dim), padded_(RowBuffer::padded(dims_)) {
    auto* numbers = reinterpret_cast<float*>(memory);
    for (int r = 0; r < kRows; ++r) given_[r] = numbers + 2 * r * padded_, codes_[r] = given_[r] + padded_;
  }

  // Stores a key of a kv head in lane `lane` of its page, now or later.
  void add(const float* x, std::int64_t stride, std::int64_t kv_head, T* page, int lane) {
    float *given = given_[count_], *codes = codes_[count_];
    convert_row(x, stride, dims_, given);
    apply(Shift(context_, kKeyShift, kv_head), given, dims_);
    rotate(given, dims_, codes);
    scales_[count_] = scale_row<T>(given, dims_);
    std::copy_n(given, padded_, codes);
    feedback_[count_] = context_.in[kKeyFeedback].as<const float>() + kv_head * dims_ * dims_;
    pages_[count_] = page;
    lanes_[count_] = lane;
    if (++count_ == kRows) finish();
  }

  // Stores what was added.
  void finish() {
    if (count_ == 0) return;
    for (int r = count_; r < kRows; ++r) {  // none is left out where that would take no less time
      std::fill_n(codes_[r], padded_, 0.0f);
      feedback_[r] = feedback_[0];
    }
    feed_back(codes_, feedback_, dims_);
    for (int r = 0; r < count_; ++r) {
      for (std::int64_t d = 0; d < dims_; ++d) pages_[r][d * kLanes + lanes_[r]].bits = encode(codes_[r][d], T{});
      const float more = scales_[r] > 0 ? along(given_[r], codes_[r], dims_) : 1.0f;
      CacheView<T>::template scales_of<float>(pages_[r], cache_.key_page)[lanes_[r]] = scales_[r] * more;
    }
    count_ = 0;
  }

 private:
  static constexpr int kRows = 4;

  const CacheView<T>& cache_;
  const Context& context_;
  const std::int64_t dims_, padded_;
  float *given_[kRows], *codes_[kRows], scales_[kRows];
  const float* feedback_[kRows];
  T* pages_[kRows];
  int lanes_[kRows], count_ = 0;
};

}  // namespace llmc::LLMC_ISA
