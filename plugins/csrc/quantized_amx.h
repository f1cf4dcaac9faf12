// Quantized products on AMX tiles: blocks of some panels are unpacked into B tiles, once for all rows of a task, and
// the sums of each block are scaled and added as the vector code does. Integer sums are exact, so their bits are those
// of the vector code; sums in bfloat16 are not, so there any number of rows takes this path. Included by
// quantized_panels.h.
#pragma once
#include "panels_amx.h"
#include "quantized_float.h"

namespace llmc::LLMC_ISA {

// A kind says what tiles hold, and how they are multiplied: with the numbers of panels_amx.h:
// sums 0 and 1 of the first 16 rows and 2 and 3 of the others, rows 4 5, weights 6 7 (the intrinsics want literals).
//   steps(block)          64-byte rows of B
//   unpack(...)           writes them
//   add(...)              what BlockScale::add does, without zeros that unpack() has subtracted
template <Format F, Zero Z>
struct IntegerTiles {
  static_assert(kQuadBytes<F> == 4, "rows of x are codes, as A tiles are");
  // Codes minus zeros fit into signed bytes unless int8 has zeros of its own.
  static constexpr bool kSigned = Z == Zero::middle || (Z == Zero::integer && F == Format::int4);

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
      if constexpr (C == 0) _tile_dpbssd(0, 4, 6);
      if constexpr (C == 1) _tile_dpbssd(1, 4, 7);
      if constexpr (C == 2) _tile_dpbssd(2, 5, 6);
      if constexpr (C == 3) _tile_dpbssd(3, 5, 7);
    } else {
      if constexpr (C == 0) _tile_dpbsud(0, 4, 6);
      if constexpr (C == 1) _tile_dpbsud(1, 4, 7);
      if constexpr (C == 2) _tile_dpbsud(2, 5, 6);
      if constexpr (C == 3) _tile_dpbsud(3, 5, 7);
    }
  }

  static LLMC_INLINE f32x16 add(const BlockScale<Z>& scale, f32x16 acc, const std::byte* sums, float a, float sum) {
    const f32x16 products = to_float(i32x16{_mm512_load_si512(sums)});
    if constexpr (kSigned) return fused(broadcast(a) * scale.scale, products, acc);
    return scale.add(acc, products, a, sum);
  }
  using Scale = BlockScale<Z>;
};

template <Format F, Zero Z>
struct Bfloat16Tiles {
  static std::int64_t steps(const Block& block) { return block.lines * (line_columns(F) / 2); }

  static void unpack(const QuantizedPanels& w, std::int64_t panel, const Block& block, std::byte* out) {
    expand<F, Z, true>(w, panel, block, out);
  }

  template <int C>
  static LLMC_INLINE void multiply() {
    if constexpr (C == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (C == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (C == 3) _tile_dpbf16ps(3, 5, 7);
  }

  using Scale = BlockScale<Z == Zero::offset ? Zero::offset : Zero::middle>;
  static LLMC_INLINE f32x16 add(const Scale& scale, f32x16 acc, const std::byte* sums, float a, float sum) {
    return scale.add(acc, load(reinterpret_cast<const float*>(sums)), a, sum);
  }
};

template <class Kind>
class QuantizedTiles {
 public:
  explicit QuantizedTiles(const QuantizedProduct& product)
      : p_(product), column_bytes_(line_columns(p_.w.how.format) * column_bytes(p_.w.how)) {}

  void run(std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end) {
    for (std::int64_t panel = panel_begin; panel < panel_end; panel += 2) {
      const int panels = static_cast<int>(std::min<std::int64_t>(2, panel_end - panel));
      std::int64_t begin = 0;
      do {
        const std::int64_t end = unpack(panel, panels, begin);
        std::int64_t row = row_begin;
        for (; row_end - row > 16; row += 32) {
          const int second = static_cast<int>(std::min<std::int64_t>(16, row_end - row - 16));
          panels == 2 ? rows<2, true>(row, second, panel, begin, end) : rows<1, true>(row, second, panel, begin, end);
        }
        if (row < row_end) {
          const int first = static_cast<int>(row_end - row);
          panels == 2 ? rows<2, false>(row, first, panel, begin, end) : rows<1, false>(row, first, panel, begin, end);
        }
        begin = end;
      } while (begin < p_.w.blocks);
    }
  }

 private:
  static constexpr std::int64_t kTiles = 16;  // of a panel that are unpacked at a time: a block, or more

  static std::int64_t tiles(const Block& block) { return (Kind::steps(block) + 15) / 16; }

  // Unpacks blocks from `begin` on, as many as there is room for; each is padded with zeros to whole tiles.
  std::int64_t unpack(std::int64_t panel, int panels, std::int64_t begin) {
    std::int64_t end = begin, used = 0;
    for (; end < p_.w.blocks && used + tiles(p_.w.block[end]) <= kTiles; ++end) {
      const Block& block = p_.w.block[end];
      for (int i = 0; i < panels; ++i) {
        std::byte* out = weights_[i] + used * 1024;
        Kind::unpack(p_.w, panel + i, block, out);
        const std::int64_t written = Kind::steps(block) * 64, whole = tiles(block) * 1024;
        if (written < whole) std::memset(out + written, 0, static_cast<std::size_t>(whole - written));
      }
      used += tiles(block);
    }
    memory_barrier();
    return end;
  }

  // Blocks [begin, end) of 16 rows and `count` more, or of `count` rows; the sums so far wait in y.
  template <int P, bool kTwo>
  void rows(std::int64_t row, int count, std::int64_t panel, std::int64_t begin, std::int64_t end) {
    kTwo ? state_.configure(16, count) : state_.configure(count, 0);
    const int all = kTwo ? 16 + count : count;
    load_sums<P>(row, all, panel, begin == 0);
    const std::byte* weights = weights_[0];
    for (std::int64_t b = begin; b < end; ++b) {
      const Block& block = p_.w.block[b];
      const std::int64_t steps = tiles(block);
      products<P, kTwo>(p_.x.data + row * p_.x.stride + block.line * column_bytes_, weights, steps);
      weights += steps * 1024;
      const typename Kind::Scale scale[2] = {{p_.w, panel, block}, {p_.w, panel + P - 1, block}};
      for (int half = 0; half < (kTwo ? 2 : 1); ++half) {
        const int in_half = kTwo && half == 0 ? 16 : count;
        for (int r = 0; r < in_half; ++r) {
          const std::byte* of_row = p_.x.data + (row + half * 16 + r) * p_.x.stride;
          const float a = row_factors(p_.w, of_row)[b], sum = row_sums(p_.w, of_row)[b];
          float* acc = acc_ + (half * 16 + r) * 32;
          for (int i = 0; i < P; ++i) {
            store(acc + i * 16, Kind::add(scale[i], load(acc + i * 16), sums_[half * 2 + i] + r * 64, a, sum));
          }
        }
      }
    }
    store_sums<P>(row, all, panel, end == p_.w.blocks);
  }

  template <int P, bool kTwo>
  LLMC_INLINE void products(const std::byte* x, const std::byte* weights, std::int64_t steps) {
    const std::int64_t stride = p_.x.stride;
    _tile_zero(0);
    if constexpr (P > 1) _tile_zero(1);
    if constexpr (kTwo) _tile_zero(2);
    if constexpr (P > 1 && kTwo) _tile_zero(3);
    for (std::int64_t t = 0; t < steps; ++t) {
      _tile_loadd(4, x + t * 64, stride);
      _tile_loadd(6, weights + t * 1024, 64);
      Kind::template multiply<0>();
      if constexpr (kTwo) _tile_loadd(5, x + t * 64 + 16 * stride, stride);
      if constexpr (kTwo) Kind::template multiply<2>();
      if constexpr (P > 1) _tile_loadd(7, weights + kTiles * 1024 + t * 1024, 64);
      if constexpr (P > 1) Kind::template multiply<1>();
      if constexpr (P > 1 && kTwo) Kind::template multiply<3>();
    }
    store_tile<0>(reinterpret_cast<float*>(sums_[0]), 64);
    if constexpr (P > 1) store_tile<1>(reinterpret_cast<float*>(sums_[1]), 64);
    if constexpr (kTwo) store_tile<2>(reinterpret_cast<float*>(sums_[2]), 64);
    if constexpr (P > 1 && kTwo) store_tile<3>(reinterpret_cast<float*>(sums_[3]), 64);
  }

  template <int P>
  void load_sums(std::int64_t row, int count, std::int64_t panel, bool first) {
    for (int r = 0; r < count; ++r) {
      const float* y = p_.y + (row + r) * p_.y_stride + panel * 16;
      for (int i = 0; i < P; ++i) {
        store(acc_ + r * 32 + i * 16, first ? zero() : load(y + i * 16, p_.lanes(panel + i)));
      }
    }
  }

  template <int P>
  void store_sums(std::int64_t row, int count, std::int64_t panel, bool last) {
    for (int i = 0; i < P; ++i) {
      const int lanes = p_.lanes(panel + i);
      const bool finish = last && p_.bias != nullptr;
      const f32x16 bias = finish ? load(p_.bias + (panel + i) * 16, lanes) : zero();
      for (int r = 0; r < count; ++r) {
        const f32x16 sum = load(acc_ + r * 32 + i * 16);
        store(p_.y + (row + r) * p_.y_stride + (panel + i) * 16, finish ? sum + bias : sum, lanes);
      }
    }
  }

  const QuantizedProduct& p_;
  const std::int64_t column_bytes_;  // of x, for a line
  Tiles state_;
  alignas(64) std::byte weights_[2][kTiles * 1024];
  alignas(64) std::byte sums_[4][1024];
  alignas(64) float acc_[32 * 32];
};

constexpr std::int64_t kFewIntegerRows = 6;  // up to here vectors are faster than tiles

template <Format F, Zero Z>
void integer_tiles(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                   std::int64_t panel_end) {
  if (row_end - row_begin <= kFewIntegerRows) {
    return integer_vectors<F, Z>(p, row_begin, row_end, panel_begin, panel_end);
  }
  QuantizedTiles<IntegerTiles<F, Z>> tiles(p);
  tiles.run(row_begin, row_end, panel_begin, panel_end);
}

template <Format F, Zero Z>
void bfloat16_tiles(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                    std::int64_t panel_end) {
  QuantizedTiles<Bfloat16Tiles<F, Z>> tiles(p);
  tiles.run(row_begin, row_end, panel_begin, panel_end);
}

}  // namespace llmc::LLMC_ISA
