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
void feed_back(float* const* y, const float* const* feedback, std::int64_t n) {
  for (std::int64_t d = 0; d < n; ++d) {
    f32x16 error[ROWS];
    LLMC_UNROLL for (int r = 0; r < ROWS; ++r) error[r] = broadcast(y[r][d] - nearest(y[r][d], e4m3{}));
    for (std::int64_t i = d / kLanes * kLanes; i < n; i += kLanes) {
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
        const float* row = feedback[r] + d * n + i;
        const f32x16 shares = i + kLanes <= n ? load(row) : load(row, static_cast<int>(n - i));
        store(y[r] + i, load(y[r] + i) - error[r] * shares);
      }
    }
  }
}

// The same for 16 rows y [n][16] of one head, in a third of the time of as many rows side by side.
inline void feed_back_lanes(float* y, const float* feedback, std::int64_t n) {
  for (std::int64_t d = 0; d < n; ++d, y += kLanes) {
    alignas(64) float off[kLanes];
    for (int r = 0; r < kLanes; ++r) off[r] = y[r] - nearest(y[r], e4m3{});
    const f32x16 error = load(off);
    for (std::int64_t i = d; i < n; ++i) {
      float* to = y + (i - d) * kLanes;
      store(to, load(to) - error * feedback[d * n + i]);
    }
  }
}

// Collects keys until there are enough to be stored side by side; T is e4m3.
template <class T>
class FedBackKeys {
 public:
  static std::int64_t bytes(std::int64_t dims) { return 3 * kLanes * RowBuffer::padded(dims) * 4; }

  FedBackKeys(const CacheView<T>& cache, const Context& context, std::byte* memory)
      : cache_(cache), context_(context), dims_(cache.key_dim), padded_(RowBuffer::padded(dims_)) {
    auto* numbers = reinterpret_cast<float*>(memory);
    lanes_ = numbers + 2 * kLanes * padded_;
    for (int r = 0; r < kLanes; ++r) given_[r] = numbers + 2 * r * padded_, codes_[r] = given_[r] + padded_;
  }

  // Stores a key of a kv head in lane `lane` of its page, now or later. Those of a head come one after the other.
  void add(const float* x, std::int64_t stride, std::int64_t kv_head, T* page, int lane) {
    const float* feedback = context_.in[kKeyFeedback].as<const float>() + kv_head * dims_ * dims_;
    if (count_ == kLanes || (count_ >= kSideBySide && feedback != feedback_[0])) finish();
    float *given = given_[count_], *codes = codes_[count_];
    convert_row(x, stride, dims_, given);
    apply(Shift(context_, kKeyShift, kv_head), given, dims_);
    rotate(given, dims_, codes);
    scales_[count_] = scale_row<T>(given, dims_);
    std::copy_n(given, padded_, codes);
    feedback_[count_] = feedback;
    pages_[count_] = page;
    places_[count_++] = lane;
  }

  // Stores what was added.
  void finish() {
    if (count_ == 0) return;
    if (count_ >= kWorthLanes && feedback_[0] == feedback_[count_ - 1]) {
      round_lanes();
    } else {
      round_rows();
    }
    for (int r = 0; r < count_; ++r) {
      for (std::int64_t d = 0; d < dims_; ++d) pages_[r][d * kLanes + places_[r]].bits = encode(codes_[r][d], T{});
      const float more = scales_[r] > 0 ? along(given_[r], codes_[r], dims_) : 1.0f;
      CacheView<T>::template scales_of<float>(pages_[r], cache_.key_page)[places_[r]] = scales_[r] * more;
    }
    count_ = 0;
  }

 private:
  static constexpr int kSideBySide = 4, kWorthLanes = 6;

  void round_lanes() {
    for (std::int64_t d = 0; d < dims_; ++d) {
      for (int r = 0; r < kLanes; ++r) lanes_[d * kLanes + r] = r < count_ ? codes_[r][d] : 0.0f;
    }
    feed_back_lanes(lanes_, feedback_[0], dims_);
    for (int r = 0; r < count_; ++r) {
      for (std::int64_t d = 0; d < dims_; ++d) codes_[r][d] = lanes_[d * kLanes + r];
    }
  }

  void round_rows() {
    for (int r = count_; r % kSideBySide != 0; ++r) {  // fewer would take no less time
      std::fill_n(codes_[r], padded_, 0.0f);
      feedback_[r] = feedback_[0];
    }
    for (int r = 0; r < count_; r += kSideBySide) feed_back<kSideBySide>(codes_ + r, feedback_ + r, dims_);
  }

  const CacheView<T>& cache_;
  const Context& context_;
  const std::int64_t dims_, padded_;
  float *given_[kLanes], *codes_[kLanes], *lanes_, scales_[kLanes];
  const float* feedback_[kLanes];
  T* pages_[kLanes];
  int places_[kLanes], count_ = 0;
};

}  // namespace llmc::LLMC_ISA
