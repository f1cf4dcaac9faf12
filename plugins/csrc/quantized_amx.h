// Quantized products on AMX tiles: blocks of some panels are unpacked into B tiles, once for all rows of a task, and
// the sums of each block are scaled and added as the vector code does. Integer sums are exact, so their bits are those
// of the vector code; sums in bfloat16 are not, so there any number of rows takes this path. Included by
// quantized_panels.h.
#pragma once
#include "quantized_tile_kinds.h"

namespace llmc::LLMC_ISA {

// Blocks of columns are multiplied one after another, for 32 rows and two panels, or for 16 rows and four; while tiles
// are multiplied, the sums of the block before are scaled and added to the outputs so far.
template <class Kind>
class QuantizedTiles {
 public:
  explicit QuantizedTiles(const QuantizedProduct& product)
      : p_(product), column_bytes_(line_columns(p_.w.how.format) * column_bytes(p_.w.how)) {
    std::int64_t most = 0;
    for (std::int64_t b = 0; b < p_.w.blocks; ++b) most = std::max(most, Kind::steps(p_.w.block[b]));
    tile_rows_ = most <= 8 ? 8 : 16;
    packed_ = Kind::kPacked;
    for (std::int64_t b = 0; b < p_.w.blocks; ++b) packed_ &= Kind::steps(p_.w.block[b]) % 16 == 0;
  }

  void run(std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end) {
    // The rows of x stay in the second-level cache: long ones go in turns, and if need be their columns in parts.
    const std::int64_t bytes = p_.w.lines * column_bytes_;
    const std::int64_t step = (row_end - row_begin) * bytes > kTurnBytes ? kTurnRows : kTaskRows;
    for (std::int64_t row = row_begin; row < row_end; row += step) {
      const std::int64_t stop = std::min(row_end, row + step), parts = (stop - row) * bytes / kPartBytes + 1;
      for (std::int64_t part = 0; part < parts; ++part) {
        const Work work{row, stop, p_.w.blocks * part / parts, p_.w.blocks * (part + 1) / parts};
        if (work.begin < work.end) run(work, panel_begin, panel_end);
      }
    }
  }

 private:
  static constexpr std::int64_t kTurnBytes = 1 << 19, kTurnRows = 256, kPartBytes = 1 << 20;
  // Of weights that are unpacked at a time, or those of one block. With many rows, the more the fewer times the outputs
  // so far come from the second-level cache and go back.
  static constexpr std::int64_t most_bytes(bool wide) { return wide ? 49152 : 8192; }
  static constexpr std::int64_t kMostBytes = 65536;

  struct Work {
    std::int64_t row_begin, row_end, begin, end;  // rows, blocks
  };

  void run(const Work& work, std::int64_t panel, std::int64_t panel_end) {
    if (work.row_end - work.row_begin > 16) {
      for (; panel + 2 <= panel_end; panel += 2) panels<2, true>(work, panel);
      if (panel < panel_end) panels<1, true>(work, panel);
    } else {
      for (; panel + 4 <= panel_end; panel += 4) panels<4, false>(work, panel);
      for (; panel < panel_end; ++panel) panels<1, false>(work, panel);
    }
  }

  std::int64_t tiles(const Block& block) const { return (Kind::steps(block) + tile_rows_ - 1) / tile_rows_; }
  std::int64_t tile_bytes() const { return tile_rows_ * 64; }

  // The blocks from `begin` on for which there is room.
  std::int64_t range_end(std::int64_t begin, std::int64_t end, int panels, bool wide) const {
    const std::int64_t bytes = tile_bytes() * panels;
    std::int64_t used = tiles(p_.w.block[begin]), b = begin + 1;
    for (; b < end && (used + tiles(p_.w.block[b])) * bytes <= most_bytes(wide); ++b) used += tiles(p_.w.block[b]);
    return b;
  }

  template <int P, bool kWide>
  void panels(const Work& work, std::int64_t panel) {
    constexpr int kRows = kWide ? 32 : 16;
    const bool whole = p_.lanes(panel + P - 1) == 16;
    const std::int64_t groups = (work.row_end - work.row_begin + kRows - 1) / kRows;
    const bool far = (work.row_end - work.row_begin) * p_.y_stride * 4 > kTurnBytes;
    Adder<P> before;
    int parity = 0;
    for (std::int64_t begin = work.begin; begin < work.end;) {
      const std::int64_t end = range_end(begin, work.end, P, kWide),
                         stride = packed_ ? p_.w.panel_bytes() : unpack(panel, P, begin, end);
      const bool finish = end == p_.w.blocks, last = end == work.end, direct = last && whole && !(finish && p_.bias);
      std::int64_t steps = 0;
      for (std::int64_t b = begin; b < end; ++b) steps += tiles(p_.w.block[b]);
      Ahead<P> ahead = ahead_of<P, kWide>(end < work.end ? panel : panel + P, end < work.end ? end : work.begin,
                                          work.end, groups * steps * P);
      const bool ranges = !direct || begin != work.begin;  // else sums so far are of these rows alone
      float* acc = acc_;
      for (std::int64_t row = work.row_begin; row < work.row_end; row += kRows, acc += ranges ? kRows * P * 16 : 0) {
        const int count = static_cast<int>(std::min<std::int64_t>(kRows, work.row_end - row));
        const std::byte* x = p_.x.data + row * p_.x.stride;
        const std::byte* weights = packed_ ? p_.w.lines_of(panel, p_.w.block[begin]) : weights_;
        if (begin == work.begin && begin != 0) load_sums<P>(acc, row, count, panel);
        Outputs outputs;
        if (direct && far) {
          outputs.y = reinterpret_cast<const std::byte*>(p_.y + row * p_.y_stride + panel * 16);
          outputs.stride = p_.y_stride * 4;
        }
        const auto share = [&](std::int64_t b) { return kRows * (b - begin) / (end - begin); };
        for (std::int64_t b = begin; b < end; ++b, parity ^= 1) {
          if (outputs.y != nullptr) outputs.rows = static_cast<int>(share(b + 1) - share(b));
          weights = next_products<P, kWide>(x, count, weights, stride, b, parity, before, ahead, outputs);
          before = Adder<P>(*this, row, count, panel, b, parity, acc);
          if (b + 1 == end && direct) {
            before.to = p_.y + row * p_.y_stride + panel * 16, before.to_stride = p_.y_stride;
          }
        }
      }
      if (last) before.add(kRows);
      if (last && !direct) store_sums<P>(work, panel, finish);
      begin = end;
    }
  }

  // Fetches the packed weights of the blocks that come next, a few lines after each product of tiles: in a burst they
  // would wait for one another, and the products for them.
  template <int P>
  struct Ahead {
    const std::byte* from[P] = {};
    std::int64_t bytes = 0, share = 0, at = 0;  // of a panel; between two products; fetched so far
    int panel = 0;

    LLMC_INLINE void fetch() {
      for (std::int64_t i = 0; i < share && panel < P; ++i) {
        _mm_prefetch(from[panel] + at, _MM_HINT_T1);
        if ((at += 64) >= bytes) at = 0, ++panel;
      }
    }
  };

  // Fetches lines of y that will be written: where they are not in the second-level cache, the stores of outputs, one
  // after another, would each wait for theirs.
  struct Outputs {
    const std::byte* y = nullptr;
    std::int64_t stride = 0;
    int rows = 0;

    // Two lines of so many rows or fewer.
    LLMC_INLINE void fetch(int count) {
      for (; count > 0 && rows > 0; --count, --rows, y += stride) {
        __builtin_prefetch(y, 1);
        __builtin_prefetch(y + 64, 1);
      }
    }
  };

  template <int P, bool kWide>
  Ahead<P> ahead_of(std::int64_t panel, std::int64_t begin, std::int64_t work_end, std::int64_t products) const {
    const Block &first = p_.w.block[begin], &last = p_.w.block[range_end(begin, work_end, P, kWide) - 1];
    Ahead<P> ahead;
    for (int i = 0; i < P; ++i) ahead.from[i] = p_.w.lines_of(panel + i, first);
    ahead.bytes = (last.line + last.lines - first.line) * line_bytes(p_.w.how.format);
    ahead.share = (ahead.bytes / 64 * P + products - 1) / products;
    return ahead;
  }

  // Unpacks blocks; each is padded with zeros to whole tiles. Gives the bytes of a panel.
  std::int64_t unpack(std::int64_t panel, int panels, std::int64_t begin, std::int64_t end) {
    std::int64_t stride = 0;
    for (std::int64_t b = begin; b < end; ++b) stride += tiles(p_.w.block[b]) * tile_bytes();
    for (int i = 0; i < panels; ++i) {
      std::byte* out = weights_ + i * stride;
      for (std::int64_t b = begin; b < end; ++b) {
        const Block& block = p_.w.block[b];
        Kind::unpack(p_.w, panel + i, block, out);
        const std::int64_t written = Kind::steps(block) * 64, whole = tiles(block) * tile_bytes();
        if (written < whole) std::memset(out + written, 0, static_cast<std::size_t>(whole - written));
        out += whole;
      }
    }
    memory_barrier();
    return stride;
  }

  // Adds the sums of some blocks, as tiles have stored them, to the outputs so far. Outputs and sums: [rows][P][16].
  template <int P>
  struct Adder {
    typename Kind::Scale scale[P];
    const float *factor = nullptr, *total = nullptr, *from = nullptr;
    const std::byte* sums = nullptr;
    float* to = nullptr;
    std::int64_t to_stride = 0;
    int rows = 0;
    __mmask16 old = 0;  // none of the outputs so far in the first block

    Adder() = default;
    LLMC_INLINE Adder(QuantizedTiles& tiles, std::int64_t row, int count, std::int64_t panel, std::int64_t b,
                      int parity, float* acc)
        : factor(tiles.p_.x.factor + b * tiles.p_.x.pitch + row),
          total(tiles.p_.x.sum + b * tiles.p_.x.pitch + row),
          from(acc),
          sums(tiles.sums_[parity]),
          to(acc),
          to_stride(P * 16),
          rows(count),
          old(b == 0 ? 0 : 0xffff) {
      for (int i = 0; i < P; ++i) scale[i] = typename Kind::Scale(tiles.p_.w, panel + i, tiles.p_.w.block[b]);
    }

    // The next rows, `count` at most.
    LLMC_INLINE void add(int count) {
      count = std::min(count, rows);
      rows -= count;
      for (; count > 0; --count) add_row();
    }
    // The next kCount rows, which are there.
    template <int kCount>
    LLMC_INLINE void add_some() {
      rows -= kCount;
      LLMC_UNROLL
      for (int r = 0; r < kCount; ++r) add_row();
    }

    LLMC_INLINE void add_row() {
      LLMC_UNROLL
      for (int i = 0; i < P; ++i) {
        const f32x16 v{_mm512_maskz_loadu_ps(old, from + i * 16)};
        store(to + i * 16, Kind::add(scale[i], v, sums + i * 64, *factor, *total));
      }
      ++factor, ++total, sums += P * 64, from += P * 16, to += to_stride;
    }
  };

  // Chooses how many rows `before` adds between two products of tiles: with all of 32 rows, as many as divide them.
  template <int P, bool kWide>
  LLMC_INLINE const std::byte* next_products(const std::byte* x, int count, const std::byte* w, std::int64_t w_stride,
                                             std::int64_t b, int parity, const Adder<P>& before, Ahead<P>& ahead,
                                             Outputs& outputs) {
    if constexpr (kWide && P == 2) {
      if (count == 32 && before.rows == 32) {
        switch (tiles(p_.w.block[b])) {
          case 1:
            return whole_products<8>(x, w, w_stride, b, parity, before, ahead, outputs);
          case 2:
            return whole_products<4>(x, w, w_stride, b, parity, before, ahead, outputs);
          case 4:
            return whole_products<2>(x, w, w_stride, b, parity, before, ahead, outputs);
          case 8:
            return whole_products<1>(x, w, w_stride, b, parity, before, ahead, outputs);
          default:
            break;
        }
      }
    }
    Outputs none;
    if (kWide && count > 16) return products<P, kWide, 0>(x, count, w, w_stride, b, parity, before, ahead, none);
    return products<P, false, 0>(x, count, w, w_stride, b, parity, before, ahead, none);
  }

  // A function of its own: its loop then needs no memory for what it counts.
  template <int kSlice>
  [[gnu::noinline]] const std::byte* whole_products(const std::byte* x, const std::byte* w, std::int64_t w_stride,
                                                    std::int64_t b, int parity, const Adder<2>& before, Ahead<2>& ahead,
                                                    Outputs& outputs) {
    return products<2, true, kSlice>(x, 32, w, w_stride, b, parity, before, ahead, outputs);
  }

  // The products of block b, and what `before` adds, kSlice rows between two of them or, if it is 0, as many as are
  // needed. Gives the weights of the next.
  template <int P, bool kTwo, int kSlice>
  LLMC_INLINE const std::byte* products(const std::byte* x, int count, const std::byte* w, std::int64_t w_stride,
                                        std::int64_t b, int parity, Adder<P> before, Ahead<P>& ahead,
                                        Outputs& outputs) {
    kTwo ? state_.configure(16, count - 16, tile_rows_) : state_.configure(count, 0, tile_rows_);
    constexpr int kSums = kTwo ? 2 * P : P;
    const std::int64_t stride = p_.x.stride;
    std::byte* sums = sums_[parity];
    const Block& block = p_.w.block[b];
    const std::byte* a = x + block.line * column_bytes_;
    const std::int64_t steps = tiles(block), bytes = tile_bytes();
    const int slice = 32 / static_cast<int>(kSums * steps) + 1;
    const auto add = [&]() {
      if constexpr (kSlice != 0) {
        before.template add_some<kSlice>();
        outputs.fetch(kSlice);
      } else {
        before.add(slice);
      }
    };
    _tile_zero(0);
    if constexpr (P > 1) _tile_zero(1);
    if constexpr (P > 2 || kTwo) _tile_zero(2);
    if constexpr (kSums > 3) _tile_zero(3);
    for (std::int64_t t = 0; t < steps; ++t, a += 64, w += bytes) {
      _tile_loadd(4, a, stride);
      if constexpr (kTwo) {
        _tile_loadd(6, w, 64);
        Kind::template multiply<0>();
        add();
        _tile_loadd(5, a + 16 * stride, stride);
        Kind::template multiply<2>();
        _tile_zero(6);
        add();
        ahead.fetch();
        if constexpr (P > 1) {
          _tile_loadd(7, w + w_stride, 64);
          Kind::template multiply<1>();
          _tile_zero(4);
          add();
          Kind::template multiply<3>();
          _tile_zero(7);
          add();
          ahead.fetch();
        } else {
          _tile_zero(4);
        }
        _tile_zero(5);
      } else {
        _tile_loadd(5, w, 64);
        Kind::template multiply<4>();
        _tile_zero(5);
        add();
        ahead.fetch();
        if constexpr (P > 1) {
          _tile_loadd(6, w + w_stride, 64);
          Kind::template multiply<5>();
          _tile_zero(6);
          add();
          ahead.fetch();
        }
        if constexpr (P > 2) {
          _tile_loadd(7, w + 2 * w_stride, 64);
          Kind::template multiply<6>();
          _tile_zero(7);
          add();
          ahead.fetch();
          _tile_loadd(5, w + 3 * w_stride, 64);
          Kind::template multiply<7>();
          _tile_zero(5);
          add();
          ahead.fetch();
        }
        _tile_zero(4);
      }
    }
    store_tile<0>(reinterpret_cast<float*>(sums), P * 64);
    if constexpr (kTwo && P == 1) store_tile<2>(reinterpret_cast<float*>(sums + 1024), 64);
    if constexpr (P > 1) store_tile<1>(reinterpret_cast<float*>(sums + 64), P * 64);
    if constexpr (kTwo && P > 1) store_tile<2>(reinterpret_cast<float*>(sums + 2048), 128);
    if constexpr (kTwo && P > 1) store_tile<3>(reinterpret_cast<float*>(sums + 2048 + 64), 128);
    if constexpr (P > 2) store_tile<2>(reinterpret_cast<float*>(sums + 128), P * 64);
    if constexpr (P > 2) store_tile<3>(reinterpret_cast<float*>(sums + 192), P * 64);
    if constexpr (kSlice == 0) before.add(32);
    return w;
  }

  template <int P>
  void load_sums(float* acc, std::int64_t row, int count, std::int64_t panel) {
    for (int r = 0; r < count; ++r) {
      const float* y = p_.y + (row + r) * p_.y_stride + panel * 16;
      for (int i = 0; i < P; ++i) store(acc + (r * P + i) * 16, load(y + i * 16, p_.lanes(panel + i)));
    }
  }

  template <int P>
  void store_sums(const Work& work, std::int64_t panel, bool finish) {
    finish &= p_.bias != nullptr;
    for (int i = 0; i < P; ++i) {
      const int lanes = p_.lanes(panel + i);
      const f32x16 bias = finish ? load(p_.bias + (panel + i) * 16, lanes) : zero();
      for (std::int64_t row = work.row_begin; row < work.row_end; ++row) {
        const f32x16 sum = load(acc_ + ((row - work.row_begin) * P + i) * 16);
        store(p_.y + row * p_.y_stride + (panel + i) * 16, finish ? sum + bias : sum, lanes);
      }
    }
  }

  const QuantizedProduct& p_;
  const std::int64_t column_bytes_;  // of x, for a line
  std::int64_t tile_rows_;           // of B
  bool packed_;                      // weights are multiplied as they lie in memory
  Tiles state_;
  alignas(64) std::byte weights_[kMostBytes];
  alignas(64) std::byte sums_[2][4096];
  alignas(64) float acc_[kTaskRows * 32];
};

constexpr std::int64_t kFewIntegerRows = 3;  // up to here vectors are faster than tiles

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
