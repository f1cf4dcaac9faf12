// Where a sequence's keys and values stand in the paged cache (the layout is described at KvSlot in kernel.h).
#pragma once
#include <type_traits>

#include "weights.h"

namespace llmc::LLMC_ISA {

// Elements of one key block: [key_dim][16], or pairs of dims as [ceil(key_dim / 2)][16][2].
template <class T>
constexpr std::int64_t key_block_size(std::int64_t dims) {
  return (std::is_same_v<T, bf16> ? (dims + 1) / 2 * 2 : dims) * kLanes;
}

// One sequence of the step: `rows` new tokens behind `past` cached ones.
struct Sequence {
  std::int64_t first_row, rows, past;
  const std::int32_t* blocks;
};

LLMC_INLINE Sequence sequence_of(const Batch& batch, std::int64_t s) {
  const std::int64_t first = batch.cu_seqlens[s];
  return {first, batch.cu_seqlens[s + 1] - first, batch.num_computed[s], batch.block_tables + s * batch.max_blocks};
}

// The cache of one slot, in elements of T. A page is the part of a block with 16 positions, numbered from position 0.
template <class T>
struct CacheView {
  T* keys;
  T* values;
  std::int64_t block_size, kv_heads, key_page, value_dim;

  CacheView(const KvCache& cache, const KvSlot& slot)
      : keys(reinterpret_cast<T*>(slot.keys)),
        values(reinterpret_cast<T*>(slot.values)),
        block_size(cache.block_size),
        kv_heads(slot.kv_heads),
        key_page(key_block_size<T>(slot.key_dim)),
        value_dim(slot.value_dim) {}

  std::int64_t page_index(const Sequence& sequence, std::int64_t kv_head, std::int64_t page) const {
    const std::int64_t pages = block_size / kLanes, block = sequence.blocks[page / pages];
    return (block * kv_heads + kv_head) * pages + page % pages;
  }
  T* key_page_of(const Sequence& sequence, std::int64_t kv_head, std::int64_t page) const {
    return keys + page_index(sequence, kv_head, page) * key_page;
  }
  T* value_page_of(const Sequence& sequence, std::int64_t kv_head, std::int64_t page) const {
    return values + page_index(sequence, kv_head, page) * kLanes * value_dim;
  }
};

// Converts a row of n strided floats; what follows up to a multiple of 16 becomes 0.
template <class T>
LLMC_INLINE void convert_row(const float* x, std::int64_t stride, std::int64_t n, T* y) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(std::min<std::int64_t>(kLanes, n - i));
    if (stride == 1) {
      store(y + i, load(x + i, count));
    } else {
      alignas(64) float lanes[kLanes] = {};
      for (int j = 0; j < count; ++j) lanes[j] = x[(i + j) * stride];
      store(y + i, load(lanes));
    }
  }
}

LLMC_INLINE void copy_row(const float* x, std::int64_t stride, std::int64_t n, float* y) {
  if (stride == 1) {
    std::memcpy(y, x, static_cast<std::size_t>(n) * sizeof(float));
  } else {
    for (std::int64_t i = 0; i < n; ++i) y[i] = x[i * stride];
  }
}

// Puts a key, converted, into lane `lane` of a page: single dims 16 apart, of bf16 pairs of dims.
template <class T>
LLMC_INLINE void put_key(const T* key, std::int64_t dims, T* page, int lane) {
  if constexpr (std::is_same_v<T, bf16>) {
    for (std::int64_t d = 0; d < dims; d += 2) std::memcpy(page + d * kLanes + lane * 2, key + d, 4);
  } else {
    for (std::int64_t d = 0; d < dims; ++d) page[d * kLanes + lane] = key[d];
  }
}

// The same from one lane of a page to a lane of another.
template <class T>
LLMC_INLINE void copy_key(const T* from, int from_lane, std::int64_t dims, T* page, int lane) {
  if constexpr (std::is_same_v<T, bf16>) {
    for (std::int64_t d = 0; d < dims; d += 2) {
      std::memcpy(page + d * kLanes + lane * 2, from + d * kLanes + from_lane * 2, 4);
    }
  } else {
    for (std::int64_t d = 0; d < dims; ++d) page[d * kLanes + lane] = from[d * kLanes + from_lane];
  }
}

// Writes the new rows begin .. end - 1 of the step's k and v to the cache. `buffer` holds max(key_dim, value_dim) + 16.
template <class T>
void write_rows(const CacheView<T>& cache, const Batch& batch, const Tensor& k, const Tensor& v, std::int64_t begin,
                std::int64_t end, T* buffer) {
  std::int64_t s =
      std::upper_bound(batch.cu_seqlens, batch.cu_seqlens + batch.sequences + 1, begin) - batch.cu_seqlens - 1;
  for (std::int64_t row = begin; row < end; ++s) {
    const Sequence sequence = sequence_of(batch, s);
    for (const std::int64_t last = std::min(end, sequence.first_row + sequence.rows); row < last; ++row) {
      const std::int64_t position = sequence.past + row - sequence.first_row;
      const int lane = static_cast<int>(position % kLanes);
      for (std::int64_t h = 0; h < cache.kv_heads; ++h) {
        const std::int64_t page = cache.page_index(sequence, h, position / kLanes);
        convert_row(k.as<const float>() + row * k.stride[0] + h * k.stride[1], k.stride[2], k.shape[2], buffer);
        put_key(buffer, k.shape[2], cache.keys + page * cache.key_page, lane);
        convert_row(v.as<const float>() + row * v.stride[0] + h * v.stride[1], v.stride[2], v.shape[2], buffer);
        std::copy_n(buffer, v.shape[2], cache.values + (page * kLanes + lane) * v.shape[2]);
      }
    }
  }
}

}  // namespace llmc::LLMC_ISA
