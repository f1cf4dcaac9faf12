// Where a sequence's keys and values stand in the paged cache (the layout is described at KvSlot in kernel.h).
#pragma once
#include <type_traits>

#include "kv_codes.h"

namespace llmc::LLMC_ISA {

// One sequence of the step: `rows` new tokens behind `past` cached ones.
struct Sequence {
  std::int64_t first_row, rows, past;
  const std::int32_t* blocks;
};

LLMC_INLINE Sequence sequence_of(const Batch& batch, std::int64_t s) {
  const std::int64_t first = batch.cu_seqlens[s];
  return {first, batch.cu_seqlens[s + 1] - first, batch.num_computed[s], batch.block_tables + s * batch.max_blocks};
}

// The cache of one slot, whose codes are of type T. A page is the part of a block with 16 positions, numbered from
// position 0.
template <class T>
struct CacheView {
  std::byte *keys, *values;
  std::int64_t pages, kv_heads, key_dim, value_dim;  // pages of a block
  PageLayout key_page, value_page;

  CacheView(const KvCache& cache, const KvSlot& slot)
      : keys(slot.keys),
        values(slot.values),
        pages(cache.block_size / kLanes),
        kv_heads(slot.kv_heads),
        key_dim(slot.key_dim),
        value_dim(slot.value_dim),
        key_page(key_layout(kKvType<T>, slot.key_dim)),
        value_page(value_layout(kKvType<T>, slot.value_dim)) {}

  std::int64_t page_index(const Sequence& sequence, std::int64_t kv_head, std::int64_t page) const {
    if (pages == 1) return sequence.blocks[page] * kv_heads + kv_head;  // which is usual; divisions take time
    const std::int64_t block = sequence.blocks[page / pages];
    return (block * kv_heads + kv_head) * pages + page % pages;
  }
  T* key_page_at(std::int64_t index) const { return reinterpret_cast<T*>(keys + index * key_page.bytes()); }
  T* value_page_at(std::int64_t index) const { return reinterpret_cast<T*>(values + index * value_page.bytes()); }
  T* key_page_of(const Sequence& sequence, std::int64_t kv_head, std::int64_t page) const {
    return key_page_at(page_index(sequence, kv_head, page));
  }
  T* value_page_of(const Sequence& sequence, std::int64_t kv_head, std::int64_t page) const {
    return value_page_at(page_index(sequence, kv_head, page));
  }

  // What stands behind the codes of a page: float [16], of i4 f16 [groups][2][16].
  template <class S>
  static S* scales_of(T* page, const PageLayout& layout) {
    return reinterpret_cast<S*>(reinterpret_cast<std::byte*>(page) + layout.codes);
  }
  template <class S>
  static const S* scales_of(const T* page, const PageLayout& layout) {
    return reinterpret_cast<const S*>(reinterpret_cast<const std::byte*>(page) + layout.codes);
  }
};

template <class T>
LLMC_INLINE void fetch_page(const T* page, const PageLayout& layout) {
  for (std::int64_t n = 0; n < layout.bytes(); n += 64) fetch(reinterpret_cast<const std::byte*>(page) + n);
}

// What sums over the codes of each position of a page, as load gives them, have to be multiplied by.
template <class T>
LLMC_INLINE f32x16 load_scales(const T* page, const PageLayout& layout) {
  return load(CacheView<T>::template scales_of<float>(page, layout)) * kLoadFactor<T>;
}

// The keys of a page of int4, two dims at a time: f(d, even, odd). An odd number of dims ends in one that is none.
template <class F>
LLMC_INLINE void for_each_key(const i4* page, const PageLayout& layout, std::int64_t dims, F&& f) {
  const f16* scales = CacheView<i4>::scales_of<f16>(page, layout);
  const i4* fifth = page + (dims + 1) / 2 * kLanes;
  f32x16 width, least;
  const auto two = [&]<int D>(std::integral_constant<int, D>, std::int64_t d, byte_vector bits) {
    if (d >= dims) return;
    f32x16 even, odd;
    load_fives<D>(page + d / 2 * kLanes, bits, even, odd);
    f(d, fmadd(even, width, least), fmadd(odd, width, least));
  };
  for (std::int64_t d = 0; d < dims; d += 8, fifth += kLanes) {
    if (d % kKvGroup == 0) {
      width = load(scales + d / kKvGroup * 2 * kLanes);
      least = load(scales + d / kKvGroup * 2 * kLanes + kLanes);
    }
    const byte_vector bits = load_bytes(fifth);
    two(std::integral_constant<int, 0>(), d, bits);
    two(std::integral_constant<int, 2>(), d + 2, bits);
    two(std::integral_constant<int, 4>(), d + 4, bits);
    two(std::integral_constant<int, 6>(), d + 6, bits);
  }
}

// The values of a page of int4, 32 dims of two positions at a time: f(position, d, low, high), also behind the last
// dim.
template <class F>
LLMC_INLINE void for_each_value(const i4* page, const PageLayout& layout, std::int64_t dims, F&& f) {
  const std::int64_t bytes = kv_bytes_of_nibbles(dims);
  const f16* scales = CacheView<i4>::scales_of<f16>(page, layout);
  alignas(64) float width[kLanes], least[kLanes];
  for (std::int64_t d = 0; d < dims; d += kNibbleDims) {
    if (d % kKvGroup == 0) {
      store(width, load(scales + d / kKvGroup * 2 * kLanes));
      store(least, load(scales + d / kKvGroup * 2 * kLanes + kLanes));
    }
    for (int j = 0; j < kLanes; j += 2) {
      f32x16 low[2], high[2];
      for (int i = 0; i < 2; ++i) {
        load_nibbles(page + (j + i) * bytes + d / 2, low[i], high[i]);
        low[i] = fmadd(low[i], broadcast(width[j + i]), broadcast(least[j + i]));
        high[i] = fmadd(high[i], broadcast(width[j + i]), broadcast(least[j + i]));
      }
      f(j, d, low, high);
    }
  }
}

// Converts a row of n strided floats; what follows up to a multiple of 16 becomes 0.
template <class T>
LLMC_INLINE void convert_row(const float* x, std::int64_t stride, std::int64_t n, T* y) {
  std::int64_t i = 0;
  for (; stride == 1 && i + kLanes <= n; i += kLanes) store(y + i, load(x + i));
  for (; i < n; i += kLanes) {
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

// Keys or values of a kv head are stored as (x - center) * scale, dim by dim; null: as if 0 and 1.
struct Shift {
  const float *center = nullptr, *scale = nullptr;

  Shift() = default;
  Shift(const Context& context, std::size_t input, std::int64_t kv_head) {
    const auto row = [&](std::size_t i) -> const float* {
      if (i >= context.in.size() || !context.in[i]) return nullptr;
      return context.in[i].as<const float>() + kv_head * context.in[i].stride[0];
    };
    center = row(input);
    scale = row(input + 1);
  }
  explicit operator bool() const { return center != nullptr || scale != nullptr; }
};

// Of inputs 5 to 8, key_center, key_scale, value_center and value_scale.
constexpr std::size_t kKeyShift = 5, kValueShift = 7;

// What is stored of a row, in place.
LLMC_INLINE void apply(const Shift& shift, float* x, std::int64_t n) {
  for (std::int64_t i = 0; shift && i < n; i += kLanes) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, n - i));
    f32x16 v = load(x + i, lanes);
    if (shift.center != nullptr) v = v - load(shift.center + i, lanes);
    if (shift.scale != nullptr) v = v * load(shift.scale + i, lanes);
    store(x + i, v, lanes);
  }
}

// Puts a key, converted, into lane `lane` of a page.
template <class T>
LLMC_INLINE void put_key(const T* key, std::int64_t dims, T* page, int lane) {
  if constexpr (std::is_same_v<T, bf16>) {
    copy_strided(key, 4, page + lane * 2, kLanes * 4, (dims + 1) / 2, 4);
  } else {
    for (std::int64_t d = 0; d < dims; ++d) page[d * kLanes + lane] = key[d];
  }
}

// Room for a row of the longer of keys and values: its numbers, and its codes or what it is converted to.
struct RowBuffer {
  float* numbers;
  std::byte* codes;

  static std::int64_t padded(std::int64_t dims) { return (dims + kKvGroup - 1) / kKvGroup * kKvGroup; }
  static std::int64_t bytes(std::int64_t dims) { return padded(dims) * 8; }
  RowBuffer(std::byte* memory, std::int64_t dims)
      : numbers(reinterpret_cast<float*>(memory)), codes(memory + padded(dims) * 4) {}
};

// Stores a key in lane `lane` of its page.
template <class T>
void store_key(const CacheView<T>& cache, const float* x, std::int64_t stride, const Shift& shift, T* page, int lane,
               const RowBuffer& buffer) {
  const std::int64_t dims = cache.key_dim;
  if (kQuantized<T> || shift) {
    convert_row(x, stride, dims, buffer.numbers);
    apply(shift, buffer.numbers, dims);
    x = buffer.numbers, stride = 1;
  }
  if constexpr (!kQuantized<T>) {
    T* key = reinterpret_cast<T*>(buffer.codes);
    convert_row(x, stride, dims, key);
    put_key(key, dims, page, lane);
    return;
  }
  auto* codes = reinterpret_cast<std::uint8_t*>(buffer.codes);
  if constexpr (kRotated<T>) rotate(buffer.numbers, dims, reinterpret_cast<float*>(buffer.codes));
  if constexpr (kScaled<T>) {
    CacheView<T>::template scales_of<float>(page, cache.key_page)[lane] = encode_row<T>(buffer.numbers, dims, codes);
    for (std::int64_t d = 0; d < dims; ++d) std::memcpy(page + d * kLanes + lane, codes + d, 1);
  } else if constexpr (std::is_same_v<T, i4>) {
    f16* scales = CacheView<T>::template scales_of<f16>(page, cache.key_page);
    for (std::int64_t d = 0; d < dims; d += kKvGroup, scales += 2 * kLanes) {
      const GroupScale scale = encode_group(buffer.numbers + d, std::min(kKvGroup, dims - d), 31.0f, codes + d);
      scales[lane] = scale.step;
      scales[kLanes + lane] = scale.least;
    }
    std::fill(codes + dims, codes + (dims + 7) / 8 * 8, std::uint8_t{0});
    i4* fifth = page + (dims + 1) / 2 * kLanes + lane;
    for (std::int64_t d = 0; d < dims; d += 8, fifth += kLanes) {
      unsigned bits = 0;
      for (int i = 0; i < 8; ++i) bits |= static_cast<unsigned>(codes[d + i] >> 4) << i;
      fifth->bits = static_cast<std::uint8_t>(bits);
    }
    for (std::int64_t d = 0; d < dims; d += 2) {
      page[d / 2 * kLanes + lane].bits = static_cast<std::uint8_t>((codes[d] & 15) | codes[d + 1] << 4);
    }
  }
}

// Stores a value as number `lane` of its page.
template <class T>
void store_value(const CacheView<T>& cache, const float* x, std::int64_t stride, const Shift& shift, T* page, int lane,
                 const RowBuffer& buffer) {
  const std::int64_t dims = cache.value_dim;
  if (kQuantized<T> || shift) {
    convert_row(x, stride, dims, buffer.numbers);
    apply(shift, buffer.numbers, dims);
    x = buffer.numbers, stride = 1;
  }
  if constexpr (!kQuantized<T>) {
    T* value = reinterpret_cast<T*>(buffer.codes);
    convert_row(x, stride, dims, value);
    std::copy_n(value, dims, page + lane * dims);
    return;
  }
  auto* codes = reinterpret_cast<std::uint8_t*>(buffer.codes);
  if constexpr (kRotatesValues<T>) rotate(buffer.numbers, dims, reinterpret_cast<float*>(buffer.codes));
  if constexpr (kScaled<T>) {
    CacheView<T>::template scales_of<float>(page, cache.value_page)[lane] = encode_row<T>(buffer.numbers, dims, codes);
    std::memcpy(page + lane * dims, codes, static_cast<std::size_t>(dims));
  } else if constexpr (std::is_same_v<T, i4>) {
    f16* scales = CacheView<T>::template scales_of<f16>(page, cache.value_page);
    for (std::int64_t d = 0; d < dims; d += kKvGroup, scales += 2 * kLanes) {
      const GroupScale scale = encode_group(buffer.numbers + d, std::min(kKvGroup, dims - d), 15.0f, codes + d);
      scales[lane] = scale.step;
      scales[kLanes + lane] = scale.least;
    }
    i4* value = page + lane * kv_bytes_of_nibbles(dims);
    std::fill(codes + dims, codes + RowBuffer::padded(dims), std::uint8_t{0});
    for (std::int64_t d = 0; d < dims; d += kNibbleDims, value += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        value[i].bits = static_cast<std::uint8_t>(codes[d + i] | codes[d + kLanes + i] << 4);
      }
    }
  }
}

}  // namespace llmc::LLMC_ISA
