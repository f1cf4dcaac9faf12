// Products with packed weights (linear, moe): y[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n].
//
// Every output is one chain of additions in K order, the same for any number of rows, so a row has the same bits alone
// and in a batch. Levels without bf16 dot products round x to bf16 and keep the order in which they add (odd, even).
#pragma once
#include "panels_vector.h"
#ifdef __AMX_BF16__
#include "panels_amx.h"
#endif

namespace llmc::LLMC_ISA {

// The format of rows for such weights, [rows, k] in x: in place, or converted into scratch memory by all threads.
inline PreparedRows prepare(const Panels& w, const float* x, std::int64_t rows, std::int64_t stride,
                            const Context& context) {
  if (prepared_bytes(w) == 0) return {reinterpret_cast<const std::byte*>(x), stride * 4, rows};
  const RowMemory memory = row_memory(w, rows, context.scratch);
  const auto convert = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) prepare_row(w, x + r * stride, memory, r);
  };
  if (rows * w.columns < 32768) {
    convert(0, rows, 0);
  } else {
    context.pool.split(rows, 1, convert);
  }
  return memory.rows(rows);
}

// Rows [row_begin, row_end) and panels [panel_begin, panel_end) of the product, on the calling thread. bias [rows of
// the weight] may be null. Row r of the product is at y + r * y_stride.
inline void multiply(const Panels& w, const PreparedRows& x, std::int64_t row_begin, std::int64_t row_end,
                     std::int64_t panel_begin, std::int64_t panel_end, const float* bias, float* y,
                     std::int64_t y_stride) {
  const Product product{w, x, bias, y, y_stride};
#ifdef __AMX_BF16__
  if (w.dtype == DType::bf16) return multiply_amx(product, row_begin, row_end, panel_begin, panel_end);
#endif
  switch (w.dtype) {
    case DType::f32:
      return multiply_vectors<F32Format>(product, row_begin, row_end, panel_begin, panel_end);
    case DType::f16:
      return multiply_vectors<F16Format>(product, row_begin, row_end, panel_begin, panel_end);
    default:
      return multiply_vectors<Bf16Format>(product, row_begin, row_end, panel_begin, panel_end);
  }
}

// The whole product, on all threads; W: Panels, or quantized ones.
template <class W>
void multiply(const W& w, const PreparedRows& x, const float* bias, float* y, std::int64_t y_stride, ThreadPool& pool) {
  const std::int64_t panels = w.panels();
  if (x.rows <= kFewRows) {  // decode: each thread streams one range of the weight
    pool.split(panels, 1, [&](std::int64_t begin, std::int64_t end, int) {
      multiply(w, x, 0, x.rows, begin, end, bias, y, y_stride);
    });
    return;
  }
  // Tasks are large enough to use what they load into the caches, and small enough for every thread to have several.
  // Those that share weights follow one another.
  std::int64_t task_rows = kTaskRows, task_panels = kTaskPanels, row_tasks, panel_tasks;
  for (;;) {
    row_tasks = (x.rows + task_rows - 1) / task_rows;
    panel_tasks = (panels + task_panels - 1) / task_panels;
    if (row_tasks * panel_tasks >= 4 * pool.size() || task_panels <= 4) break;
    task_panels /= 2;
  }
  pool.share(row_tasks * panel_tasks, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t row = task % row_tasks * task_rows, panel = task / row_tasks * task_panels;
      multiply(w, x, row, std::min(x.rows, row + task_rows), panel, std::min(panels, panel + task_panels), bias, y,
               y_stride);
    }
  });
}

}  // namespace llmc::LLMC_ISA
