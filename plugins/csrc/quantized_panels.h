// Products with quantized weights (quantized_linear, moe): y[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n].
#pragma once
#include "panels.h"
#include "quantized_float.h"
#ifdef __AMX_INT8__
#include "quantized_amx.h"
#endif

namespace llmc::LLMC_ISA {

// Rows [rows, k] in x in the form for such weights, converted into scratch memory by all threads.
inline PreparedRows prepare(const QuantizedPanels& w, const float* x, std::int64_t rows, std::int64_t stride,
                            const Context& context) {
  const RowMemory memory = row_memory(w, rows, context.scratch);
  const auto convert = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) prepare_row(w, x + r * stride, memory, r);
  };
  if (rows * w.columns < 16384) {
    convert(0, rows, 0);
  } else {
    context.pool.split(rows, 1, convert);
  }
  return memory.rows(rows);
}

template <Format F, Zero Z>
void multiply_as(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                 std::int64_t panel_end) {
  switch (p.w.how.compute) {
    case Compute::int8:
      if constexpr (F != Format::fp8) {
#ifdef __AMX_INT8__
        return integer_tiles<F, Z>(p, row_begin, row_end, panel_begin, panel_end);
#else
        return integer_vectors<F, Z>(p, row_begin, row_end, panel_begin, panel_end);
#endif
      }
      break;
    case Compute::float32:
      return expanded_vectors<F, Z, false>(p, row_begin, row_end, panel_begin, panel_end);
    default:
#ifdef __AMX_INT8__
      return bfloat16_tiles<F, Z>(p, row_begin, row_end, panel_begin, panel_end);
#else
      return expanded_vectors<F, Z, true>(p, row_begin, row_end, panel_begin, panel_end);
#endif
  }
}

template <Format F>
void multiply_as(const QuantizedProduct& p, std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin,
                 std::int64_t panel_end) {
  switch (p.w.zero_kind) {
    case Zero::middle:
      return multiply_as<F, Zero::middle>(p, row_begin, row_end, panel_begin, panel_end);
    case Zero::integer:
      if constexpr (F != Format::fp8) {
        return multiply_as<F, Zero::integer>(p, row_begin, row_end, panel_begin, panel_end);
      }
      break;
    case Zero::offset:
      if constexpr (F != Format::fp8) {
        return multiply_as<F, Zero::offset>(p, row_begin, row_end, panel_begin, panel_end);
      }
      break;
  }
}

// Rows [row_begin, row_end) and panels [panel_begin, panel_end) of the product, on the calling thread, as in panels.h.
inline void multiply(const QuantizedPanels& w, const PreparedRows& x, std::int64_t row_begin, std::int64_t row_end,
                     std::int64_t panel_begin, std::int64_t panel_end, const float* bias, float* y,
                     std::int64_t y_stride) {
  const QuantizedProduct product{w, x, bias, y, y_stride};
  switch (w.how.format) {
    case Format::int8:
      return multiply_as<Format::int8>(product, row_begin, row_end, panel_begin, panel_end);
    case Format::int4:
      return multiply_as<Format::int4>(product, row_begin, row_end, panel_begin, panel_end);
    case Format::fp8:
      return multiply_as<Format::fp8>(product, row_begin, row_end, panel_begin, panel_end);
  }
}

}  // namespace llmc::LLMC_ISA
