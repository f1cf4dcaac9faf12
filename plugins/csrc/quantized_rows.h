// Rows of x in the form in which quantized products read them. A prepared row: what is multiplied, in the order of the
// weight's lines; apart from it for each block the factor of x (float), and its sum (float; an int, times the middle
// code, where integer sums begin with it).
#pragma once
#include <limits>

#include "panels_vector.h"
#include "quantized_dot.h"

namespace llmc::LLMC_ISA {

// Bytes of one column of a prepared row.
inline std::int64_t column_bytes(const Quantization& how) {
  switch (how.compute) {
    case Compute::int8:
      return (how.format == Format::int8 ? kQuadBytes<Format::int8> : kQuadBytes<Format::int4>) / 4;
    case Compute::float32:
      return 4;
    default:
      return Bf16Format::kRowBytes / 2;
  }
}

// Whole vectors may be read and written behind the last column.
inline std::int64_t codes_bytes(const QuantizedPanels& w) {
  return (w.padded_columns() * column_bytes(w.how) + 63) / 64 * 64 + 64;
}

// An odd number of cache lines, so that the rows of a tile do not fall into one set of the first-level cache.
inline std::int64_t prepared_bytes(const QuantizedPanels& w) { return (codes_bytes(w) / 64 | 1) * 64; }

inline RowMemory row_memory(const QuantizedPanels& w, std::int64_t rows, Scratch& scratch) {
  const std::int64_t stride = prepared_bytes(w), pitch = rows < 16 ? rows : ((rows + 15) / 16 | 1) * 16;
  float* factor = scratch.array<float>(2 * w.blocks * pitch);
  return {scratch.array<std::byte>(rows * stride), stride, factor, factor + w.blocks * pitch, pitch};
}

template <class F>
LLMC_INLINE void each_sixteen(std::int64_t count, F&& f) {
  for (std::int64_t i = 0; i < count; i += 16) f(i, static_cast<int>(std::min<std::int64_t>(16, count - i)));
}

// To the nearest E4M3 number, ties to even; |x| <= 448.
inline float round_e4m3(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) < 0x3c800000) {  // below 2^-6: multiples of 2^-9
    return (x * 512.0f + 0x1.8p23f - 0x1.8p23f) / 512.0f;
  }
  bits = (bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000;
  std::memcpy(&x, &bits, 4);
  return x;
}

// How the columns of a unit are scaled: by a factor, or divided by a given scale and moved by a zero point. A unit that
// is not finite gets zeros, and the factor NaN.
struct UnitScale {
  float factor, multiplier;
  bool divide;
  float zero = 0.0f;

  LLMC_INLINE f32x16 apply(f32x16 x) const { return divide ? x / broadcast(multiplier) : x * broadcast(multiplier); }
  bool finite() const { return factor == factor; }
};

inline UnitScale unit_scale(const QuantizedPanels& w, const float* x, std::int64_t count, float largest) {
  f32x16 most = zero();
  std::int64_t i = 0;
  if (count >= 64) {
    f32x16 chain[4] = {zero(), zero(), zero(), zero()};
    for (; i + 64 <= count; i += 64) {
      for (int c = 0; c < 4; ++c) chain[c] = larger_bits(chain[c], abs(load(x + i + c * 16)));
    }
    most = larger_bits(larger_bits(chain[0], chain[1]), larger_bits(chain[2], chain[3]));
  }
  for (; i + 16 <= count; i += 16) most = larger_bits(most, abs(load(x + i)));
  if (i < count) most = larger_bits(most, abs(load(x + i, static_cast<int>(count - i))));
  if (any(~(most <= broadcast(std::numeric_limits<float>::max())))) {
    return {std::numeric_limits<float>::quiet_NaN(), 0.0f, false};
  }
  if (w.x_scale != nullptr) return {w.x_scale[0], w.x_scale[0], true, w.x_zero};
  const float amax = reduce_max(most), inverse = largest / amax;
  const bool tiny = !(inverse <= std::numeric_limits<float>::max());
  return {amax * (1.0f / largest), tiny ? 0.0f : inverse, false};
}

// Rounds the columns of a block to codes, 16 at a time, also behind the last column; gives their sum.
template <bool kDivide>
LLMC_INLINE std::int32_t round_codes(const UnitScale& scale, const float* x, std::int64_t count, std::int8_t* out) {
  i32x16 sum = zero_ints();
  const f32x16 multiplier = broadcast(scale.multiplier);
  const auto code = [&](f32x16 v, f32x16 z, std::int8_t* to) {
    // max|x| * (127 / max|x|) is rounded to 127: only a given scale can cut.
    v = kDivide ? max(broadcast(-128.0f), min(broadcast(127.0f), v / multiplier + z)) : v * multiplier;
    const i32x16 q = round_ints(v);
    sum = sum + q;
    store_codes(to, q);
  };
  const f32x16 z = broadcast(scale.zero);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) code(load(x + i), z, out + i);
  if (i < count) {  // behind the last column zeros stay
    float zeros[16];
    store(zeros, z);
    const int rest = static_cast<int>(count - i);
    code(load(x + i, rest), load(zeros, rest), out + i);
  }
  return static_cast<std::int32_t>(reduce_add(to_float(sum)));  // exact: at most 512 * 128
}

// Writes all lines, and what belongs to them.
template <Format F>
void prepare_int8(const QuantizedPanels& w, const float* x, std::byte* out, const RowMemory& memory, std::int64_t r) {
  float *factors = memory.factor + r, *totals = memory.sum + r;
  UnitScale scale{};
  // First the scales of all units, so that the processor has several of these chains of operations under way at once
  // (one thread, 128 columns in each unit: rows took 1.2 to 1.3 times as long in one loop). Multipliers wait in sums.
  for (std::int64_t b = 0; b < w.blocks; ++b) {
    const Block& block = w.block[b];
    if (block.unit != 0) scale = unit_scale(w, x + block.column, block.unit, 127.0f);
    factors[b * memory.pitch] = scale.factor;
    totals[b * memory.pitch] = scale.multiplier;
  }
  for (std::int64_t b = 0; b < w.blocks; ++b) {
    const Block& block = w.block[b];
    float* total = totals + b * memory.pitch;
    scale.factor = factors[b * memory.pitch];
    scale.multiplier = *total;
    constexpr std::int64_t kLine = line_columns(F) / 4 * kQuadBytes<F>;
    std::byte* to = out + block.line * kLine;
    alignas(64) std::int8_t codes[kQuadBytes<F> == 4 ? 1 : kBlockColumns + 16];
    auto* bytes = kQuadBytes<F> == 4 ? reinterpret_cast<std::int8_t*>(to) : codes;
    std::int32_t sum = 0;
    if (scale.finite()) {
      sum = w.x_scale != nullptr ? round_codes<true>(scale, x + block.column, block.columns, bytes)
                                 : round_codes<false>(scale, x + block.column, block.columns, bytes);
      if constexpr (kQuadBytes<F> != 4) spread_codes(codes, block.lines * line_columns(F), to);
    } else {
      std::memset(to, 0, static_cast<std::size_t>(block.lines * kLine));
    }
    const std::int32_t start = -sum * (F == Format::int8 ? 128 : 8);
    *total = static_cast<float>(sum);
    if (w.zero_kind == Zero::middle) std::memcpy(total, &start, 4);
  }
}

// For products in bfloat16; x rounded to it, or first scaled and rounded to E4M3.
inline void prepare_bfloat16(const QuantizedPanels& w, const float* x, std::byte* out, const RowMemory& memory,
                             std::int64_t r) {
  float *factor = memory.factor + r, *total = memory.sum + r;
  const std::int64_t line = line_columns(w.how.format), bytes = column_bytes(w.how);
  const bool fp8 = w.how.compute == Compute::fp8;
  UnitScale scale{1.0f, 1.0f, false};
  for (std::int64_t b = 0; b < w.blocks; ++b, factor += memory.pitch, total += memory.pitch) {
    const Block& block = w.block[b];
    if (fp8 && block.unit != 0) scale = unit_scale(w, x + block.column, block.unit, 448.0f);
    *factor = scale.factor;
    std::byte* to = out + block.line * line * bytes;
    f32x16 sum = zero();
    each_sixteen(scale.finite() ? block.columns : 0, [&](std::int64_t i, int n) {
      f32x16 v = load(x + block.column + i, n);
      if (fp8) {
        v = max(broadcast(-448.0f), min(broadcast(448.0f), scale.apply(v)));
        v = each_lane(v, round_e4m3);
      }
      bf16 rounded[16];
      store(rounded, v);
      sum = sum + load(rounded);
      if constexpr (Bf16Format::kRowBytes == 4) {
        std::memcpy(to + i * 2, rounded, 32);
      } else {
        store(reinterpret_cast<float*>(to) + i, load(rounded));
      }
    });
    *total = reduce_add(sum);
  }
}

inline void prepare_float32(const QuantizedPanels& w, const float* x, std::byte* out) {
  const std::int64_t line = line_columns(w.how.format);
  for (std::int64_t b = 0; b < w.blocks; ++b) {
    const Block& block = w.block[b];
    std::memcpy(out + block.line * line * 4, x + block.column, static_cast<std::size_t>(block.columns) * 4);
  }
}

// Writes row r of x in the form for these weights.
inline void prepare_row(const QuantizedPanels& w, const float* x, const RowMemory& memory, std::int64_t r) {
  std::byte* out = memory.data + r * memory.stride;
  const std::int64_t bytes = codes_bytes(w);
  // prepare_int8() writes the rest itself.
  const std::int64_t written = w.how.compute == Compute::int8 ? w.padded_columns() * column_bytes(w.how) : 0;
  std::memset(out + written, 0, static_cast<std::size_t>(bytes - written));
  switch (w.how.compute) {
    case Compute::int8:
      return w.how.format == Format::int8 ? prepare_int8<Format::int8>(w, x, out, memory, r)
                                          : prepare_int8<Format::int4>(w, x, out, memory, r);
    case Compute::float32:
      return prepare_float32(w, x, out);
    default:
      return prepare_bfloat16(w, x, out, memory, r);
  }
}

}  // namespace llmc::LLMC_ISA
