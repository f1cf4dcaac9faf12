// The product with vector instructions. Included by panels.h.
#pragma once
#include "simd.h"

namespace llmc::LLMC_ISA {

// A packed weight (plugins/linear/packing.py): panels of 16 rows, for each of them [columns][16], or for bf16
// [ceil(columns / 2)][16][2].
struct Panels {
  const std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0;

  std::int64_t panels() const { return (rows + 15) / 16; }
  std::int64_t steps() const { return dtype == DType::bf16 ? (columns + 1) / 2 : columns; }
  std::int64_t step_bytes() const { return dtype == DType::f16 ? 32 : 64; }
  std::int64_t panel_bytes() const { return steps() * step_bytes(); }
  // Of the experts that follow one another; this is the first.
  Panels expert(std::int64_t index) const { return {data + index * panels() * panel_bytes(), dtype, rows, columns}; }
};

// The weight in a tensor whose dims from `axis` on are a packed matrix of so many rows and columns.
inline Panels panels_of(const Tensor& tensor, int axis, std::int64_t rows, std::int64_t columns) {
  Panels w{tensor.as<const std::byte>(), tensor.dtype, rows, columns};
  const bool pairs = tensor.dtype == DType::bf16;
  require(tensor.dtype == DType::f32 || tensor.dtype == DType::f16 || pairs,
          "packed weights must be float32, bfloat16 or float16");
  bool fits = tensor.ndim == axis + (pairs ? 4 : 3) && tensor.shape[axis] == w.panels() &&
              tensor.shape[axis + 1] == w.steps() && tensor.shape[axis + 2] == 16;
  if (fits && pairs) fits = tensor.shape[axis + 3] == 2;
  require(fits, "the packed weight has another shape than the input's columns and the output's ask for");
  std::int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= axis; --i) {
    require(tensor.stride[i] == stride || tensor.shape[i] == 1, "packed weights must be contiguous");
    stride *= tensor.shape[i];
  }
  return w;
}

// Rows of x as multiply() reads them; stride in bytes. For quantized weights also the factor and the sum of each block
// of each row: [blocks][pitch].
struct PreparedRows {
  const std::byte* data = nullptr;
  std::int64_t stride = 0, rows = 0;
  const float *factor = nullptr, *sum = nullptr;
  std::int64_t pitch = 0;

  PreparedRows from(std::int64_t first, std::int64_t count) const {
    return {data + first * stride, stride, count, factor + first, sum + first, pitch};
  }
};

// Memory for them.
struct RowMemory {
  std::byte* data = nullptr;
  std::int64_t stride = 0;
  float *factor = nullptr, *sum = nullptr;
  std::int64_t pitch = 0;

  PreparedRows rows(std::int64_t count) const { return {data, stride, count, factor, sum, pitch}; }
};

struct Product {
  Panels w;
  PreparedRows x;
  const float* bias;
  float* y;
  std::int64_t y_stride;
};

// A format says how one step of a panel (16 rows by one column, or by two of bf16) is read, and what of x goes with it.
struct F32Format {
  using Step = f32x16;
  static constexpr std::int64_t kWeightBytes = 64, kRowBytes = 4;
  static LLMC_INLINE Step load_step(const std::byte* w) { return load(reinterpret_cast<const float*>(w)); }
  static LLMC_INLINE f32x16 add(f32x16 sum, Step w, const std::byte* x) {
    return fmadd(w, broadcast(*reinterpret_cast<const float*>(x)), sum);
  }
};
struct F16Format {
  using Step = f32x16;
  static constexpr std::int64_t kWeightBytes = 32, kRowBytes = 4;
  static LLMC_INLINE Step load_step(const std::byte* w) { return load(reinterpret_cast<const f16*>(w)); }
  static LLMC_INLINE f32x16 add(f32x16 sum, Step w, const std::byte* x) {
    return fmadd(w, broadcast(*reinterpret_cast<const float*>(x)), sum);
  }
};
#ifdef LLMC_BF16_DOT
struct Bf16Format {  // x: bf16
  using Step = bf16x32;
  static constexpr std::int64_t kWeightBytes = 64, kRowBytes = 4;
  static LLMC_INLINE Step load_step(const std::byte* w) { return load_pairs(reinterpret_cast<const bf16*>(w)); }
  static LLMC_INLINE f32x16 add(f32x16 sum, Step w, const std::byte* x) {
    return dot_pairs(sum, w, broadcast_pair(reinterpret_cast<const bf16*>(x)));
  }
};
#else
struct Bf16Format {  // x: float, rounded to bf16
  struct Step {
    f32x16 even, odd;
  };
  static constexpr std::int64_t kWeightBytes = 64, kRowBytes = 8;
  static LLMC_INLINE Step load_step(const std::byte* w) {
    return split_pairs<Step>(load_pairs(reinterpret_cast<const bf16*>(w)));
  }
  static LLMC_INLINE f32x16 add(f32x16 sum, const Step& w, const std::byte* x) {
    const float* pair = reinterpret_cast<const float*>(x);
    return fmadd(w.even, broadcast(pair[0]), fmadd(w.odd, broadcast(pair[1]), sum));
  }
};
#endif

// Bytes of a prepared row; 0: rows are read in place. An odd number of cache lines, so that the rows of a tile do not
// fall into one set of the first-level cache.
inline std::int64_t prepared_bytes(const Panels& w) {
  if (w.dtype != DType::bf16) return 0;
  const std::int64_t used = (w.columns + 31) / 32 * 32 / 2 * Bf16Format::kRowBytes;
  const std::int64_t lines = (used + 63) / 64;
  return (lines | 1) * 64;
}

inline RowMemory row_memory(const Panels& w, std::int64_t rows, Scratch& scratch) {
  const std::int64_t bytes = prepared_bytes(w), stride = bytes != 0 ? bytes : w.columns * 4;
  return {scratch.array<std::byte>(rows * stride), stride};
}

// Writes row r of x in the form for these weights; what lies beyond its columns is zero.
inline void prepare_row(const Panels& w, const float* x, const RowMemory& memory, std::int64_t r) {
  std::byte* out = memory.data + r * memory.stride;
  if (w.dtype != DType::bf16) {
    std::memcpy(out, x, static_cast<std::size_t>(w.columns) * 4);
    return;
  }
  const std::int64_t padded = (w.columns + 31) / 32 * 32;
  for (std::int64_t k = 0; k < padded; k += 16) {
    const std::int64_t left = w.columns - k;
    const f32x16 v = left >= 16 ? load(x + k) : left > 0 ? load(x + k, static_cast<int>(left)) : zero();
    if constexpr (Bf16Format::kRowBytes == 4) {
      store(reinterpret_cast<bf16*>(out) + k, v);
    } else {
      bf16 rounded[16];
      store(rounded, v);
      store(reinterpret_cast<float*>(out) + k, load(rounded));
    }
  }
}

// Registers decide how many rows and panels are in flight. Of few rows a pass over the weights takes up to kPassRows.
// While memory is what it waits for, one panel at a time is best, since the processor foresees one stream best (one
// thread, bfloat16: 1 row 1.15 times as fast as with four panels, 8 rows 1.5 times).
#if defined(__AVX512F__)
constexpr int kRows = 6, kPassRows = 8, kPassPanels = 2, kMostPasses = 2;
constexpr int panels_for(int) { return 4; }
constexpr int pass_panels(int) { return 1; }
#elif defined(__AVX2__)
constexpr int kRows = 6, kPassRows = kRows, kPassPanels = 1, kMostPasses = 1;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int pass_panels(int rows) { return panels_for(rows); }
#elif defined(LLMC_NEON)
constexpr int kRows = 4, kPassRows = kRows, kPassPanels = 1, kMostPasses = 1;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int pass_panels(int rows) { return panels_for(rows); }
#else
constexpr int kRows = 2, kPassRows = kRows, kPassPanels = 1, kMostPasses = 1;
constexpr int panels_for(int rows) { return rows == 1 ? 2 : 1; }
constexpr int pass_panels(int rows) { return panels_for(rows); }
#endif
constexpr std::int64_t kFewRows = 16;  // up to here the weight's bytes are the cost
#ifdef __AMX_BF16__
constexpr std::int64_t kTaskRows = 512, kTaskPanels = 16;
#else
constexpr std::int64_t kTaskRows = 96, kTaskPanels = 4;
#endif
constexpr std::int64_t kBlockSteps = 1024;  // a block of steps: its weights stay in the second-level cache

#if defined(LLMC_NEON) && defined(LLMC_BF16_DOT)
// What add_steps() does, for panel i and an even number of rows: an instruction adds two steps of two outputs and two
// rows, one step after the other as two dot products do, and so with their bits.
template <int R, int P>
LLMC_INLINE void add_matrices(f32x16 (&sum)[R][P], int i, const std::byte* w, const std::byte* x, std::int64_t x_stride,
                              std::int64_t begin, std::int64_t end) {
  constexpr int kPairs = R / 2;
  float32x4_t product[kPairs][8];
  LLMC_UNROLL
  for (int n = 0; n < kPairs * 4; ++n) {
    const float32x4_t first = sum[n / 4 * 2][i].v[n % 4], second = sum[n / 4 * 2 + 1][i].v[n % 4];
    product[n / 4][n % 4 * 2] = vzip1q_f32(first, second);
    product[n / 4][n % 4 * 2 + 1] = vzip2q_f32(first, second);
  }
  std::int64_t s = begin;
  for (; s + 1 < end; s += 2) {
    const bf16x32 a = Bf16Format::load_step(w + s * 64), b = Bf16Format::load_step(w + s * 64 + 64);
    bfloat16x8_t rows[kPairs];
    LLMC_UNROLL
    for (int r = 0; r < kPairs; ++r) {
      const auto* p = reinterpret_cast<const std::uint16_t*>(x + 2 * r * x_stride + s * 4);
      rows[r] = vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(p), vld1_u16(p + x_stride / 2)));
    }
    LLMC_UNROLL
    for (int q = 0; q < 4; ++q) {
      const bfloat16x8_t even = vreinterpretq_bf16_u32(vzip1q_u32(a.v[q], b.v[q]));
      const bfloat16x8_t odd = vreinterpretq_bf16_u32(vzip2q_u32(a.v[q], b.v[q]));
      LLMC_UNROLL
      for (int r = 0; r < kPairs; ++r) {
        product[r][2 * q] = vbfmmlaq_f32(product[r][2 * q], even, rows[r]);
        product[r][2 * q + 1] = vbfmmlaq_f32(product[r][2 * q + 1], odd, rows[r]);
      }
    }
  }
  LLMC_UNROLL
  for (int n = 0; n < kPairs * 4; ++n) {
    const float32x4_t even = product[n / 4][n % 4 * 2], odd = product[n / 4][n % 4 * 2 + 1];
    sum[n / 4 * 2][i].v[n % 4] = vuzp1q_f32(even, odd);
    sum[n / 4 * 2 + 1][i].v[n % 4] = vuzp2q_f32(even, odd);
  }
  if (s == end) return;
  const bf16x32 last = Bf16Format::load_step(w + s * 64);
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) sum[r][i] = Bf16Format::add(sum[r][i], last, x + r * x_stride + s * 4);
}
#endif

// Adds steps [begin, end) of P panels, so many bytes apart, times R rows. Meanwhile steps of kFetch panels that are
// `ahead` bytes behind these are fetched into the second-level cache.
template <class F, int kFetch = 0, int R, int P>
LLMC_INLINE void add_steps(f32x16 (&sum)[R][P], const std::byte* w, std::int64_t panel_bytes, const std::byte* x,
                           std::int64_t x_stride, std::int64_t begin, std::int64_t end, std::int64_t ahead = 0) {
#if defined(LLMC_NEON) && defined(LLMC_BF16_DOT)
  if constexpr (std::is_same_v<F, Bf16Format> && R % 2 == 0) {
    LLMC_UNROLL
    for (int i = 0; i < P; ++i) add_matrices(sum, i, w + i * panel_bytes, x, x_stride, begin, end);
    return;
  }
#endif
  for (std::int64_t s = begin; s < end; ++s) {
    LLMC_UNROLL
    for (int i = 0; i < kFetch; ++i) __builtin_prefetch(w + ahead + i * panel_bytes + s * F::kWeightBytes, 0, 2);
    typename F::Step step[P];
    LLMC_UNROLL
    for (int i = 0; i < P; ++i) step[i] = F::load_step(w + i * panel_bytes + s * F::kWeightBytes);
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      LLMC_UNROLL
      for (int i = 0; i < P; ++i) sum[r][i] = F::add(sum[r][i], step[i], x + r * x_stride + s * F::kRowBytes);
    }
  }
}

// R rows by P panels, steps [begin, end). Between blocks of steps the sums wait in y, exactly as they are.
template <class F, int R, int P, int kFetch>
void multiply_block(const Product& p, std::int64_t row, std::int64_t panel, std::int64_t begin, std::int64_t end,
                    std::int64_t ahead) {
  const std::int64_t panel_bytes = p.w.panel_bytes(), x_stride = p.x.stride;
  const std::byte* w = p.w.data + panel * panel_bytes;
  const std::byte* x = p.x.data + row * x_stride;
  float* y = p.y + row * p.y_stride + panel * 16;
  const int last_lanes = static_cast<int>(std::min<std::int64_t>(16, p.w.rows - (panel + P - 1) * 16));
  const auto lanes = [&](int i) { return i + 1 < P ? 16 : last_lanes; };

  f32x16 sum[R][P];
  if (begin == 0) {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      LLMC_UNROLL
      for (int i = 0; i < P; ++i) sum[r][i] = zero();
    }
  } else {
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      LLMC_UNROLL
      for (int i = 0; i < P; ++i) sum[r][i] = load(y + r * p.y_stride + i * 16, lanes(i));
    }
  }
  add_steps<F, kFetch>(sum, w, panel_bytes, x, x_stride, begin, end, ahead);
  const bool finish = end == p.w.steps() && p.bias != nullptr;
  LLMC_UNROLL
  for (int i = 0; i < P; ++i) {
    const f32x16 bias = finish ? load(p.bias + (panel + i) * 16, lanes(i)) : zero();
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      store(y + r * p.y_stride + i * 16, finish ? sum[r][i] + bias : sum[r][i], lanes(i));
    }
  }
}

// Calls run with the number of rows, at most kMost, as a constant.
template <int kMost = kPassRows, int R = 1, class Run>
void with_rows(std::int64_t rows, const Run& run) {
  if constexpr (R < kMost) {
    if (rows > R) return with_rows<kMost, R + 1>(rows, run);
  }
  run(std::integral_constant<int, R>());
}

// Up to kPassRows times `passes` rows in even passes over kPassPanels panels at a time. run(R, how many panels to
// fetch, first row, first panel, end of panels, by how many panels what is fetched is ahead): the first passes fetch
// one each of the next panels.
template <class Run>
void in_passes(std::int64_t passes, std::int64_t row, std::int64_t row_end, std::int64_t panel_begin,
               std::int64_t panel_end, const Run& run) {
  constexpr int P = kPassPanels;
  const std::int64_t rows = row_end - row;
  for (std::int64_t panel = panel_begin; panel < panel_end; panel += P) {
    const std::int64_t stop = std::min(panel_end, panel + P);
    for (std::int64_t pass = 0; pass < passes; ++pass) {
      const std::int64_t begin = rows * pass / passes, end = rows * (pass + 1) / passes;
      with_rows(end - begin, [&](auto count) {
        if (pass < P) {
          run(count, std::integral_constant<int, 1>(), row + begin, panel, stop, P + pass);
        } else {
          run(count, std::integral_constant<int, 0>(), row + begin, panel, stop, 0);
        }
      });
    }
  }
}

// R rows of panels [panel, panel_end).
template <class F, int R, int kFetch = 0, int P = panels_for(R)>
void multiply_rows(const Product& p, std::int64_t row, std::int64_t panel, std::int64_t panel_end, std::int64_t begin,
                   std::int64_t end, std::int64_t ahead = 0) {
  for (; panel + P <= panel_end; panel += P) multiply_block<F, R, P, kFetch>(p, row, panel, begin, end, ahead);
  if constexpr (P > 1) multiply_rows<F, R, 0, P / 2>(p, row, panel, panel_end, begin, end);
}

// Many rows keep a slab of panels in the cache, and of what comes next each of the first tiles fetches a part.
template <class F>
void multiply_many(const Product& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                   std::int64_t panel_end) {
  constexpr int P = panels_for(kRows);
  const std::int64_t steps = p.w.steps(), tiles = (row_end - row_begin) / kRows;
  for (std::int64_t panel = panel_begin; panel < panel_end; panel += P) {
    const std::int64_t stop = std::min(panel_end, panel + P);
    std::int64_t begin = 0;
    do {
      const std::int64_t end = std::min(steps, begin + kBlockSteps);
      const std::int64_t next =
          end < steps ? (end - begin) * F::kWeightBytes : P * p.w.panel_bytes() - begin * F::kWeightBytes;
      std::int64_t fetched = end < steps || stop + P <= p.w.panels() ? 0 : P;
      std::int64_t row = row_begin;
      for (; row + kRows <= row_end; row += kRows) {
        const std::int64_t ahead = next + fetched * p.w.panel_bytes();
        if (fetched == P) {
          multiply_rows<F, kRows>(p, row, panel, stop, begin, end);
        } else if (tiles == 1) {
          multiply_rows<F, kRows, P>(p, row, panel, stop, begin, end, ahead);
          fetched = P;
        } else {
          multiply_rows<F, kRows, (P + 1) / 2>(p, row, panel, stop, begin, end, ahead);
          fetched += (P + 1) / 2;
        }
      }
      if (row < row_end) {
        with_rows(row_end - row, [&](auto rest) { multiply_rows<F, rest()>(p, row, panel, stop, begin, end); });
      }
      begin = end;
    } while (begin < steps);
  }
}

template <class F>
void multiply_vectors(const Product& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                      std::int64_t panel_end) {
  const std::int64_t steps = p.w.steps(), bytes = p.w.panel_bytes(),
                     passes = (row_end - row_begin + kPassRows - 1) / kPassRows;
  if (passes > kMostPasses) {
    multiply_many<F>(p, row_begin, row_end, panel_begin, panel_end);
  } else if (passes > 1) {
    in_passes(passes, row_begin, row_end, panel_begin, panel_end,
              [&](auto rows, auto fetch, std::int64_t row, std::int64_t panel, std::int64_t stop, std::int64_t ahead) {
                multiply_rows<F, rows(), fetch(), kPassPanels>(p, row, panel, stop, 0, steps, ahead * bytes);
              });
  } else if (passes == 1) {
    with_rows(row_end - row_begin, [&](auto rows) {
      constexpr int P = pass_panels(rows());
      multiply_rows<F, rows(), P, P>(p, row_begin, panel_begin, panel_end, 0, steps, P * bytes);
    });
  }
}

}  // namespace llmc::LLMC_ISA
