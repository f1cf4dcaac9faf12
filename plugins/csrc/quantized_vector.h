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

// Rows and panels of a tile, from what registers hold. 16 vectors of integers wait for one another's products and loads
// least; sums of blocks go to the stack where they have to. With two panels 512 rows of int4 took 1.45 times as long.
#if defined(__AVX512F__)
constexpr int kIntegerRows = 4;
constexpr int integer_panels(int) { return 4; }
#elif defined(__AVX2__) || defined(LLMC_NEON)
constexpr int kIntegerRows = 4;
constexpr int integer_panels(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int kIntegerRows = 2;
constexpr int integer_panels(int) { return 1; }
#endif

// R rows by P panels, blocks [begin, end). Between ranges of blocks the sums wait in y, exactly as they are. kFetch:
// the panels that come next are fetched meanwhile.
template <Format F, Zero Z, int R, int P, bool kFetch>
void integer_block(const QuantizedProduct& p, std::int64_t row, std::int64_t panel, std::int64_t begin,
                   std::int64_t end) {
  const QuantizedPanels& w = p.w;
  const std::byte* x = p.x.data + row * p.x.stride;
  const std::int64_t x_stride = p.x.stride, panel_bytes = w.panel_bytes();
  const auto* starts = reinterpret_cast<const std::int32_t*>(p.x.sum + row);
  float* y = p.y + row * p.y_stride + panel * 16;
  const int last = p.lanes(panel + P - 1);
  const auto lanes = [&](int i) { return i + 1 < P ? 16 : last; };
  constexpr std::int64_t kLine = line_columns(F) / 4 * kQuadBytes<F>;
  const std::int64_t next = panel + 2 * P <= w.panels() ? P * panel_bytes : 0;

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
      for (int i = 0; i < P; ++i) {
        const std::byte* bytes = lines + i * panel_bytes + l * 64;
        if constexpr (kFetch) __builtin_prefetch(bytes + next, 0, 2);
        const Line<F> line(bytes);
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
template <Format F, Zero Z, int R, bool kFetch, int P = integer_panels(R)>
void integer_rows(const QuantizedProduct& p, std::int64_t row, std::int64_t panel, std::int64_t panel_end,
                  std::int64_t begin, std::int64_t end) {
  for (; panel + P <= panel_end; panel += P) integer_block<F, Z, R, P, kFetch>(p, row, panel, begin, end);
  if constexpr (P > 1) integer_rows<F, Z, R, false, P / 2>(p, row, panel, panel_end, begin, end);
}

// Few rows read each weight once: no ranges. Many rows read a slab of four panels again and again from the cache.
constexpr std::int64_t kSlabPanels = 4, kRangeLines = 512;

template <Format F, Zero Z, bool kFetch>
void integer_slabs(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                   std::int64_t panel_end) {
  const bool once = row_end - row_begin <= kIntegerRows;
  const std::int64_t slab = once ? panel_end - panel_begin : kSlabPanels, lines = once ? p.w.lines : kRangeLines;
  for (std::int64_t panel = panel_begin; panel < panel_end; panel += slab) {
    const std::int64_t stop = std::min(panel_end, panel + slab);
    std::int64_t begin = 0;
    do {
      std::int64_t end = begin;
      while (end < p.w.blocks && p.w.block[end].line - p.w.block[begin].line < lines) ++end;
      std::int64_t row = row_begin;
      for (; row + kIntegerRows <= row_end; row += kIntegerRows) {
        integer_rows<F, Z, kIntegerRows, kFetch>(p, row, panel, stop, begin, end);
      }
      switch (row_end - row) {
        case 3:
          integer_rows<F, Z, std::min(3, kIntegerRows), kFetch>(p, row, panel, stop, begin, end);
          break;
        case 2:
          integer_rows<F, Z, 2, kFetch>(p, row, panel, stop, begin, end);
          break;
        case 1:
          integer_rows<F, Z, 1, kFetch>(p, row, panel, stop, begin, end);
          break;
        default:
          break;
      }
      begin = end;
    } while (begin < p.w.blocks);
  }
}

// Up to 64 rows take a weight from memory, where the processor foresees the lines of a long panel by itself, but not
// those of the next one. 16 rows of 576 columns in int4 took 1.5 times as long without; where the weight is in the
// cache, fetching costs up to a tenth.
template <Format F, Zero Z>
void integer_vectors(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                     std::int64_t panel_end) {
  if (row_end - row_begin <= 64 && p.w.lines <= kRangeLines) {
    integer_slabs<F, Z, true>(p, row_begin, row_end, panel_begin, panel_end);
  } else {
    integer_slabs<F, Z, false>(p, row_begin, row_end, panel_begin, panel_end);
  }
}

}  // namespace llmc::LLMC_ISA
