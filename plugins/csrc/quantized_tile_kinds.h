// What AMX tiles of quantized products hold: codes, or numbers of bf16. Included by quantized_amx.h.
#pragma once
#include <bit>

#include "panels_amx.h"
#include "quantized_float.h"

namespace llmc::LLMC_ISA {

// A kind says what tiles hold, and how they are multiplied.
//   kPacked               packed weights are tiles as they are, if blocks fill them
//   steps(block)          64-byte rows of B
//   unpack(...)           writes them
//   multiply<C>           products of tiles: C 0 .. 3 with two blocks of rows, 4 .. 7 with one (see Tiles)
//   add(...)              what BlockScale::add does, without zeros that unpack() has subtracted
#define LLMC_TILE_PRODUCTS(instruction)       \
  if constexpr (C == 0) instruction(0, 4, 6); \
  if constexpr (C == 1) instruction(1, 4, 7); \
  if constexpr (C == 2) instruction(2, 5, 6); \
  if constexpr (C == 3) instruction(3, 5, 7); \
  if constexpr (C == 4) instruction(0, 4, 5); \
  if constexpr (C == 5) instruction(1, 4, 6); \
  if constexpr (C == 6) instruction(2, 4, 7); \
  if constexpr (C == 7) instruction(3, 4, 5);

template <Format F, Zero Z>
struct IntegerTiles {
  static_assert(kQuadBytes<F> == 4, "rows of x are codes, as A tiles are");
  // Codes of int4 minus zeros fit into signed bytes; those of int8 are multiplied as they are.
  static constexpr bool kSigned = F == Format::int4 && Z != Zero::offset;
  static constexpr bool kPacked = F == Format::int8;

  static std::int64_t steps(const Block& block) { return block.lines * (line_columns(F) / 4); }

  static void unpack(const QuantizedPanels& w, std::int64_t panel, const Block& block, std::byte* out) {
    __m512i centre = _mm512_set1_epi8(F == Format::int8 ? static_cast<char>(128) : 8);
    if constexpr (Z == Zero::integer) {  // of 16 rows, four times each
      const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.integer_zeros(panel, block.group)));
      centre = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(zeros), _mm512_set1_epi32(0x01010101));
    }
    const std::byte* p = w.lines_of(panel, block);
    for (std::int64_t l = 0; l < block.lines; ++l, p += 64) {
      const Line<F> line(p);
      _mm512_store_si512(out, kSigned ? _mm512_sub_epi8(line.first, centre) : line.first);
      out += 64;
      if constexpr (F == Format::int4) {
        _mm512_store_si512(out, kSigned ? _mm512_sub_epi8(line.second, centre) : line.second);
        out += 64;
      }
    }
  }

  template <int C>
  static LLMC_INLINE void multiply() {
    if constexpr (kSigned) {
      LLMC_TILE_PRODUCTS(_tile_dpbssd)
    } else {
      LLMC_TILE_PRODUCTS(_tile_dpbsud)
    }
  }

  static LLMC_INLINE f32x16 add(const BlockScale<Z>& scale, f32x16 acc, const std::byte* sums, float a, float sum) {
    i32x16 integers{_mm512_load_si512(sums)};
    if constexpr (!kSigned && Z == Zero::middle) {  // their sum times the middle code is not of the product
      integers = integers + broadcast_int(std::bit_cast<std::int32_t>(sum));
    }
    const f32x16 products = to_float(integers);
    if constexpr (kSigned || Z == Zero::middle) return fused(broadcast(a) * scale.scale, products, acc);
    return scale.add(acc, products, a, sum);
  }
  using Scale = BlockScale<Z>;
};

template <Format F, Zero Z>
struct Bfloat16Tiles {
  static constexpr bool kPacked = false;

  static std::int64_t steps(const Block& block) { return block.lines * (line_columns(F) / 2); }

  static void unpack(const QuantizedPanels& w, std::int64_t panel, const Block& block, std::byte* out) {
    expand<F, Z, true>(w, panel, block, out);
  }

  template <int C>
  static LLMC_INLINE void multiply() {
    LLMC_TILE_PRODUCTS(_tile_dpbf16ps)
  }

  using Scale = BlockScale<Z == Zero::offset ? Zero::offset : Zero::middle>;
  static LLMC_INLINE f32x16 add(const Scale& scale, f32x16 acc, const std::byte* sums, float a, float sum) {
    return scale.add(acc, load(reinterpret_cast<const float*>(sums)), a, sum);
  }
};

}  // namespace llmc::LLMC_ISA
