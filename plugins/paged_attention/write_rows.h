// Writes the new keys and values of a step to the cache.
#pragma once
#include "key_feedback.h"

namespace llmc::LLMC_ISA {

// Bytes that write_rows needs.
template <class T>
std::int64_t write_bytes(const Context& context, const CacheView<T>& cache) {
  return RowBuffer::bytes(std::max(cache.key_dim, cache.value_dim)) +
         (feeds_back<T>(context) ? FedBackKeys<T>::bytes(cache.key_dim) : 0);
}

// Rows that are fetched ahead, as they stand apart from one another in memory.
constexpr std::int64_t kRowsAhead = 4;

LLMC_INLINE void fetch_row(const Tensor& x, std::int64_t row, std::int64_t head) {
  if (row >= x.shape[0]) return;
  const float* p = x.as<const float>() + row * x.stride[0] + head * x.stride[1];
  for (std::int64_t d = 0; d < x.shape[2]; d += kLanes) fetch(p + d);
}

// Calls f(row, page of a kv head, lane in the page) for the new rows begin .. end - 1 of the step.
template <class T, class F>
void for_each_row(const CacheView<T>& cache, const Batch& batch, std::int64_t kv_head, std::int64_t begin,
                  std::int64_t end, F&& f) {
  std::int64_t s =
      std::upper_bound(batch.cu_seqlens, batch.cu_seqlens + batch.sequences + 1, begin) - batch.cu_seqlens - 1;
  for (std::int64_t row = begin; row < end; ++s) {
    const Sequence sequence = sequence_of(batch, s);
    for (const std::int64_t last = std::min(end, sequence.first_row + sequence.rows); row < last; ++row) {
      const std::int64_t position = sequence.past + row - sequence.first_row;
      f(row, cache.page_index(sequence, kv_head, position / kLanes), static_cast<int>(position % kLanes));
    }
  }
}

// Writes the new rows begin .. end - 1 of the step's k and v to the cache.
template <class T>
void write_rows(const CacheView<T>& cache, const Context& context, std::int64_t begin, std::int64_t end,
                std::byte* memory) {
  const Tensor &k = context.in[1], &v = context.in[2];
  const std::int64_t dims = std::max(cache.key_dim, cache.value_dim);
  const RowBuffer buffer(memory, dims);
  FedBackKeys<T> fed_back(cache, context, memory + RowBuffer::bytes(dims));
  const bool feeds = feeds_back<T>(context);
  for (std::int64_t h = 0; h < cache.kv_heads; ++h) {
    const Shift of_keys(context, kKeyShift, h), of_values(context, kValueShift, h);
    for_each_row(cache, context.batch, h, begin, end, [&](std::int64_t row, std::int64_t page, int lane) {
      fetch_row(k, row + kRowsAhead, h);
      fetch_row(v, row + kRowsAhead, h);
      const float* key = k.as<const float>() + row * k.stride[0] + h * k.stride[1];
      if constexpr (std::is_same_v<T, e4m3>) {
        if (feeds) fed_back.add(key, k.stride[2], h, cache.key_page_at(page), lane);
      }
      if (!feeds) store_key(cache, key, k.stride[2], of_keys, cache.key_page_at(page), lane, buffer);
      store_value(cache, v.as<const float>() + row * v.stride[0] + h * v.stride[1], v.stride[2], of_values,
                  cache.value_page_at(page), lane, buffer);
    });
  }
  if constexpr (std::is_same_v<T, e4m3>) fed_back.finish();
}

}  // namespace llmc::LLMC_ISA
