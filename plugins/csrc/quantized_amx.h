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
    const std::byte *x = p_.x.data + row * p_.x.stride, *weights = weights_[0];
    for (std::int64_t b = begin; b < end; ++b) {
      const Block& block = p_.w.block[b];
      const std::int64_t steps = tiles(block);
      block_products<P, kTwo>(x, block.line * column_bytes_, weights, steps, panel, b, b > begin ? b - 1 : -1, count);
      weights += steps * 1024;
    }
    add_block<P, kTwo>(x, count, panel, end - 1);
    store_sums<P>(row, all, panel, end == p_.w.blocks);
  }

  // The products of block b; meanwhile those of the block before are added (-1: there is none). What tiles store takes
  // a while until it can be loaded. With one step the two are interleaved tile by tile, since a processor that shares
  // its core sees no further ahead: groups of 32 went from 190 to 220 operations a cycle.
  template <int P, bool kTwo>
  LLMC_INLINE void block_products(const std::byte* x, std::int64_t offset, const std::byte* weights, std::int64_t steps,
                                  std::int64_t panel, std::int64_t b, std::int64_t before, int count) {
    const std::int64_t stride = p_.x.stride;
    auto& sums = sums_[b % 2];
    _tile_zero(0);
    if constexpr (P > 1) _tile_zero(1);
    if constexpr (kTwo) _tile_zero(2);
    if constexpr (P > 1 && kTwo) _tile_zero(3);
    for (std::int64_t t = 0; t < steps; ++t) {
      const std::byte* a = x + offset + t * 64;
      _tile_loadd(4, a, stride);
      _tile_loadd(6, weights + t * 1024, 64);
      Kind::template multiply<0>();
      if constexpr (kTwo) _tile_loadd(5, a + 16 * stride, stride);
      if constexpr (kTwo) Kind::template multiply<2>();
      if constexpr (P > 1) _tile_loadd(7, weights + kTiles * 1024 + t * 1024, 64);
      if constexpr (P > 1) Kind::template multiply<1>();
      if constexpr (P > 1 && kTwo) Kind::template multiply<3>();
    }
    const Adder adder(*this, x, panel, P, before < 0 ? b : before);
    const int first = before < 0 ? 0 : kTwo ? 16 : count, second = before < 0 || !kTwo ? 0 : count;
    store_tile<0>(reinterpret_cast<float*>(sums[0]), 64);
    adder.template add<0>(first);
    if constexpr (P > 1) store_tile<1>(reinterpret_cast<float*>(sums[1]), 64);
    if constexpr (P > 1) adder.template add<1>(first);
    if constexpr (kTwo) store_tile<2>(reinterpret_cast<float*>(sums[2]), 64);
    if constexpr (kTwo) adder.template add<2>(second);
    if constexpr (P > 1 && kTwo) store_tile<3>(reinterpret_cast<float*>(sums[3]), 64);
    if constexpr (P > 1 && kTwo) adder.template add<3>(second);
  }

  // Adds what tiles have stored of a block to the outputs so far.
  struct Adder {
    typename Kind::Scale scale[2];
    const std::byte *factor, *total, *sums;
    std::int64_t stride;
    float* acc;

    LLMC_INLINE Adder(QuantizedTiles& tiles, const std::byte* x, std::int64_t panel, int panels, std::int64_t b)
        : scale{{tiles.p_.w, panel, tiles.p_.w.block[b]}, {tiles.p_.w, panel + panels - 1, tiles.p_.w.block[b]}},
          factor(reinterpret_cast<const std::byte*>(row_factors(tiles.p_.w, x) + b)),
          total(reinterpret_cast<const std::byte*>(row_sums(tiles.p_.w, x) + b)),
          sums(tiles.sums_[b % 2][0]),
          stride(tiles.p_.x.stride),
          acc(tiles.acc_) {}

    // Tile T has rows 0 .. or 16 .., of the first panel or the second.
    template <int T>
    LLMC_INLINE void add(int rows) const {
      const std::byte *f = factor + T / 2 * 16 * stride, *s = total + T / 2 * 16 * stride;
      float* out = acc + T / 2 * 512 + T % 2 * 16;
      for (int r = 0; r < rows; ++r, f += stride, s += stride, out += 32) {
        const float a = *reinterpret_cast<const float*>(f), sum = *reinterpret_cast<const float*>(s);
        store(out, Kind::add(scale[T % 2], load(out), sums + T * 1024 + r * 64, a, sum));
      }
    }
  };

  template <int P, bool kTwo>
  void add_block(const std::byte* x, int count, std::int64_t panel, std::int64_t b) {
    const Adder adder(*this, x, panel, P, b);
    adder.template add<0>(kTwo ? 16 : count);
    if constexpr (P > 1) adder.template add<1>(kTwo ? 16 : count);
    if constexpr (kTwo) adder.template add<2>(count);
    if constexpr (P > 1 && kTwo) adder.template add<3>(count);
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
  alignas(64) std::byte sums_[2][4][1024];
  alignas(64) float acc_[32 * 32];
};

constexpr std::int64_t kFewIntegerRows = 8;  // up to here vectors are faster than tiles

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
