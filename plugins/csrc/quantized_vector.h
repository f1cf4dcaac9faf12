// Integer products of quantized weights with vector instructions.
//
// The order of the additions is part of the format: a block's sum of products of codes is an exact integer, and blocks
// are added as acc = fused(a * scale, sum - zero * sum of x, acc). So an output has the same bits with any instruction
// set, any number of rows, and any number of threads.
#pragma once
#include "quantized_rows.h"

namespace llmc::LLMC_ISA {

struct QuantizedProduct {
  const QuantizedPanels& w;
  PreparedRows x;
  const float* bias;
  float* y;
  std::int64_t y_stride;

  int lanes(std::int64_t panel) const { return static_cast<int>(std::min<std::int64_t>(16, w.rows - panel * 16)); }
};

// What a block adds to the outputs of a panel: its scales and zeros.
template <Zero Z>
struct BlockScale {
  f32x16 scale, zero;

  BlockScale() = default;
  BlockScale(const QuantizedPanels& w, std::int64_t panel, const Block& block) {
    scale = w.scales(panel, block.group);
    if constexpr (Z == Zero::integer) zero = load_bytes(w.integer_zeros(panel, block.group));
    if constexpr (Z == Zero::offset) zero = w.offsets(panel, block.group);
  }

  // acc and a block of products; `sum` of x, and its factor. Integers and their products are exact in floats.
  LLMC_INLINE f32x16 add(f32x16 acc, f32x16 products, float factor, float sum) const {
    const f32x16 a = broadcast(factor);
    if constexpr (Z == Zero::offset) return fused(a, fused(scale, products, zero * sum), acc);
    if constexpr (Z == Zero::integer) products = products - zero * sum;
    return fused(a * scale, products, acc);
  }
};

// Rows and panels of a tile of many rows, from what registers hold. 16 vectors of integers wait for one another's
// products and loads least; sums of blocks go to the stack where they have to. With two panels 512 rows of int4
// took 1.45 times as long. Few rows: as of other weights (one thread, 1 row: one panel is 1.31 times as fast as four
// with int4, 1.13 with int8), but int4 is not so bound to memory.
#if defined(__AVX512F__)
constexpr int kIntegerRows = 4, kIntegerPanels = 4;
constexpr int integer_pass_panels(Format format, int rows) {
  return format == Format::int4 && rows > 4 ? kPassPanels : 1;
}

// Up to so many rows read the weights once. (One thread, int8: 9 rows took 0.75 to 0.85 of the time of two passes, 12
// rows 0.9 to 1, 14 rows 1.05.)
constexpr int integer_pass_rows(Format format) { return format == Format::int4 ? 7 : 12; }

// How often the weights are read for so many rows; 0: tiles of many rows are better. (One thread, int8: 14 rows in two
// passes took 0.65 of the time of tiles.)
constexpr std::int64_t integer_passes(Format format, std::int64_t rows) {
  if (rows <= integer_pass_rows(format)) return 1;
  if (format == Format::int4) return rows >= 10 && rows <= 14 ? 2 : 0;
  return rows <= 2 * kPassRows ? 2 : 0;
}
#else
#if defined(__AVX2__) || defined(LLMC_NEON)
constexpr int kIntegerRows = 4, kIntegerPanels = 1;
constexpr int integer_pass_panels(Format, int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int kIntegerRows = 2, kIntegerPanels = 1;
constexpr int integer_pass_panels(Format, int) { return 1; }
#endif
constexpr int integer_pass_rows(Format) { return kIntegerRows; }
constexpr std::int64_t integer_passes(Format, std::int64_t rows) { return rows <= kIntegerRows ? 1 : 0; }
#endif

// R rows by P panels, blocks [begin, end). Between ranges of blocks the sums wait in y, exactly as they are. Meanwhile
// the lines of kFetch panels that are `ahead` bytes behind these are fetched into the second-level cache.
template <Format F, Zero Z, int R, int P, int kFetch>
void integer_block(const QuantizedProduct& p, std::int64_t row, std::int64_t panel, std::int64_t begin,
                   std::int64_t end, std::int64_t ahead) {
  const QuantizedPanels& w = p.w;
  const std::byte* x = p.x.data + row * p.x.stride;
  const std::int64_t x_stride = p.x.stride, panel_bytes = w.panel_bytes();
  const auto* starts = reinterpret_cast<const std::int32_t*>(p.x.sum + row);
  float* y = p.y + row * p.y_stride + panel * 16;
  const int last = p.lanes(panel + P - 1);
  const auto lanes = [&](int i) { return i + 1 < P ? 16 : last; };
  constexpr std::int64_t kLine = line_columns(F) / 4 * kQuadBytes<F>;

  f32x16 acc[R][P];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int i = 0; i < P; ++i) acc[r][i] = begin == 0 ? zero() : load(y + r * p.y_stride + i * 16, lanes(i));
  }
  for (std::int64_t b = begin; b < end; ++b) {
    const Block& block = w.block[b];
    i32x16 sum[R][P];
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      const std::int64_t at = b * p.x.pitch + r;
      i32x16 start = zero_ints();
      if constexpr (kSignedLines<F>) {
        if constexpr (Z != Zero::middle) start = broadcast_int(128 * static_cast<std::int32_t>(p.x.sum[at + row]));
      } else if constexpr (Z == Zero::middle) {
        start = broadcast_int(starts[at]);
      }
      LLMC_UNROLL
      for (int i = 0; i < P; ++i) sum[r][i] = start;
    }
    const std::byte* lines = w.lines_of(panel, block);
    const std::byte* codes = x + block.line * kLine;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    constexpr bool kMatrices = R % 2 == 0;
    if constexpr (kMatrices) {
      for (int i = 0; i < P; ++i) {
        add_matrices<F>(sum, i, lines + i * panel_bytes, block.lines, codes, x_stride);
      }
    }
#else
    constexpr bool kMatrices = false;
#endif
    for (std::int64_t l = 0; !kMatrices && l < block.lines; ++l) {
      LLMC_UNROLL
      for (int i = 0; i < kFetch; ++i) __builtin_prefetch(lines + ahead + i * panel_bytes + l * 64, 0, 2);
      LLMC_UNROLL
      for (int i = 0; i < P; ++i) {
        const Line<F> line(lines + i * panel_bytes + l * 64);
        LLMC_UNROLL
        for (int r = 0; r < R; ++r) sum[r][i] = dot(sum[r][i], line, codes + r * x_stride + l * kLine);
      }
    }
    LLMC_UNROLL
    for (int i = 0; i < P; ++i) {
      const BlockScale<Z> scale(w, panel + i, block);
      LLMC_UNROLL
      for (int r = 0; r < R; ++r) {
        const std::int64_t at = b * p.x.pitch + row + r;
        acc[r][i] = scale.add(acc[r][i], to_float(sum[r][i]), p.x.factor[at], p.x.sum[at]);
      }
    }
  }
  const bool finish = end == w.blocks && p.bias != nullptr;
  LLMC_UNROLL
  for (int i = 0; i < P; ++i) {
    const f32x16 bias = finish ? load(p.bias + (panel + i) * 16, lanes(i)) : zero();
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      store(y + r * p.y_stride + i * 16, finish ? acc[r][i] + bias : acc[r][i], lanes(i));
    }
  }
}

// R rows of panels [panel, panel_end), P at a time as long as there are so many.
template <Format F, Zero Z, int R, int P, int kFetch>
void integer_rows(const QuantizedProduct& p, std::int64_t row, std::int64_t panel, std::int64_t panel_end,
                  std::int64_t begin, std::int64_t end, std::int64_t ahead) {
  for (; panel + P <= panel_end; panel += P) integer_block<F, Z, R, P, kFetch>(p, row, panel, begin, end, ahead);
  if constexpr (P > 1) integer_rows<F, Z, R, P / 2, 0>(p, row, panel, panel_end, begin, end, 0);
}

// Few rows: the weights are read once, from memory with kFetch.
template <Format F, Zero Z, bool kFetch>
void few_integer_rows(const QuantizedProduct& p, std::int64_t row, std::int64_t rows, std::int64_t panel,
                      std::int64_t panel_end, std::int64_t begin, std::int64_t end) {
  with_rows<kFetch ? integer_pass_rows(F) : kIntegerRows>(rows, [&](auto count) {
    constexpr int R = count(), P = kFetch || R >= kIntegerRows ? integer_pass_panels(F, R) : kIntegerPanels;
    integer_rows<F, Z, R, P, kFetch ? P : 0>(p, row, panel, panel_end, begin, end, P * p.w.panel_bytes());
  });
}

// Many rows read a slab of panels again and again from the cache, and ranges of them if they are long.
constexpr std::int64_t kRangeLines = 512;

// The processor foresees the lines of a long panel by itself, but not those of the next ones: with each panel's rows
// those of the next are fetched. Of many rows the first tiles fetch a part each: all of it beside the first four rows
// would keep memory busy, and them waiting (16 rows of int8 took 1.15 times as long).
template <Format F, Zero Z>
void many_integer_rows(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end,
                       std::int64_t panel_begin, std::int64_t panel_end) {
  const QuantizedPanels& w = p.w;
  constexpr int R = kIntegerRows, P = kIntegerPanels;
  const std::int64_t each = (row_end - row_begin) / R >= P ? 1 : (P + 1) / 2;
  for (std::int64_t panel = panel_begin; panel < panel_end; panel += P) {
    const std::int64_t stop = std::min(panel_end, panel + P);
    for (std::int64_t begin = 0, end = 0; begin < w.blocks; begin = end) {
      const std::int64_t first = w.block[begin].line;
      while (end < w.blocks && w.block[end].line - first < kRangeLines) ++end;
      // The same panels' next range, or the first range of the next panels.
      const std::int64_t ahead = end < w.blocks ? (w.block[end].line - first) * 64 : P * w.panel_bytes() - first * 64;
      std::int64_t fetched = end < w.blocks || stop + P <= w.panels() ? 0 : P;
      std::int64_t row = row_begin;
      for (; row + R <= row_end; row += R) {
        if (fetched >= P) {
          integer_rows<F, Z, R, P, 0>(p, row, panel, stop, begin, end, 0);
        } else if (each == 1) {
          integer_rows<F, Z, R, P, 1>(p, row, panel, stop, begin, end, ahead + fetched * w.panel_bytes());
        } else {
          integer_rows<F, Z, R, P, (P + 1) / 2>(p, row, panel, stop, begin, end, ahead + fetched * w.panel_bytes());
        }
        fetched += each;
      }
      if (row < row_end) few_integer_rows<F, Z, false>(p, row, row_end - row, panel, stop, begin, end);
    }
  }
}

template <Format F, Zero Z>
void integer_vectors(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                     std::int64_t panel_end) {
  const std::int64_t rows = row_end - row_begin, passes = integer_passes(F, rows);
  if (passes == 0) {
    many_integer_rows<F, Z>(p, row_begin, row_end, panel_begin, panel_end);
  } else if (passes == 1) {
    few_integer_rows<F, Z, true>(p, row_begin, rows, panel_begin, panel_end, 0, p.w.blocks);
  } else {
    in_passes(passes, row_begin, row_end, panel_begin, panel_end,
              [&](auto count, auto fetch, std::int64_t row, std::int64_t panel, std::int64_t stop, std::int64_t ahead) {
                integer_rows<F, Z, count(), kPassPanels, fetch()>(p, row, panel, stop, 0, p.w.blocks,
                                                                  ahead * p.w.panel_bytes());
              });
  }
}

}  // namespace llmc::LLMC_ISA
