// Where the codes and the scales of keys and values stand in a page: 16 positions of one kv head.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmc {

// What keys and values are stored as. e4m3, i8: codes with a scale for each head and position. i4: codes of 4 bits for
// values and of 5 for keys, whose errors weigh more, with a step and a least value for each 64 dims of a head and
// position.
enum class KvType : std::uint8_t { f32, bf16, f16, e4m3, i8, i4 };

constexpr std::int64_t kPagePositions = 16;
constexpr std::int64_t kKvGroup = 64;     // dims of i4 that share a step
constexpr std::int64_t kNibbleDims = 32;  // of a value in 16 bytes

// Bytes of a page's codes, and of the scales behind them.
struct PageLayout {
  std::int64_t codes, scales;
  constexpr std::int64_t bytes() const { return codes + scales; }
};

constexpr std::int64_t kv_groups(std::int64_t dims) { return (dims + kKvGroup - 1) / kKvGroup; }

constexpr std::int64_t kv_bytes_of_nibbles(std::int64_t dims) { return (dims + kNibbleDims - 1) / kNibbleDims * 16; }

// Codes [dims][16]; of bf16 [dims / 2][16][2] (pairs of dims), of i4 [dims / 2][16], the even dim in the low half, and
// the fifth bits behind as [dims / 8][16]. Scales: float32 [16], of i4 float16 [groups][2][16] (steps, then least
// values).
constexpr PageLayout key_layout(KvType type, std::int64_t dims) {
  switch (type) {
    case KvType::f32:
      return {dims * kPagePositions * 4, 0};
    case KvType::bf16:
      return {(dims + 1) / 2 * 2 * kPagePositions * 2, 0};
    case KvType::f16:
      return {dims * kPagePositions * 2, 0};
    case KvType::e4m3:
    case KvType::i8:
      return {dims * kPagePositions, kPagePositions * 4};
    case KvType::i4:
      return {((dims + 1) / 2 + (dims + 7) / 8) * kPagePositions, kv_groups(dims) * 2 * kPagePositions * 2};
  }
  return {0, 0};
}

// Codes [16][dims]; of i4 [16][dims / 32][16]: 16 dims in the low halves, the next 16 in the high ones.
constexpr PageLayout value_layout(KvType type, std::int64_t dims) {
  switch (type) {
    case KvType::f32:
      return {kPagePositions * dims * 4, 0};
    case KvType::bf16:
    case KvType::f16:
      return {kPagePositions * dims * 2, 0};
    case KvType::e4m3:
    case KvType::i8:
      return {kPagePositions * dims, kPagePositions * 4};
    case KvType::i4:
      return {kPagePositions * kv_bytes_of_nibbles(dims), kv_groups(dims) * 2 * kPagePositions * 2};
  }
  return {0, 0};
}

// Copies numbers of `bytes` each, which may stand apart (strides in bytes).
static inline void copy_strided(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride,
                                std::int64_t count, std::int64_t bytes) {
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  for (std::int64_t i = 0; i < count; ++i, source += from_stride, target += to_stride) {
    std::memcpy(target, source, static_cast<std::size_t>(bytes));
  }
}

// Copies what pages of keys, or of values, hold of a position to another one; scales included. (static: each
// instruction set has its own.)
static inline void copy_position(KvType type, bool keys, const PageLayout& layout, const std::byte* from_page,
                                 std::int64_t from, std::byte* to_page, std::int64_t to) {
  constexpr std::int64_t p = kPagePositions;
  if (keys) {
    const std::int64_t bytes = type == KvType::f32 || type == KvType::bf16 ? 4 : type == KvType::f16 ? 2 : 1;
    const std::int64_t count = layout.codes / (p * bytes);
    copy_strided(from_page + from * bytes, p * bytes, to_page + to * bytes, p * bytes, count, bytes);
  } else {
    const std::int64_t bytes = layout.codes / p;
    std::memcpy(to_page + to * bytes, from_page + from * bytes, static_cast<std::size_t>(bytes));
  }
  const std::int64_t size = type == KvType::i4 ? 2 : 4;
  copy_strided(from_page + layout.codes + from * size, p * size, to_page + layout.codes + to * size, p * size,
               layout.scales / (p * size), size);
}

}  // namespace llmc
