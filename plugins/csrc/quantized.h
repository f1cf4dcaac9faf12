// Quantized weights (plugins/quantized_linear): what they are, and the checks of their tensors. The layout is that of
// plugins/quantized_linear/packing.py.
#pragma once
#include "simd.h"

namespace llmc::LLMC_ISA {

enum class Format : std::uint8_t { int8, int4, fp8 };
enum class Compute : std::uint8_t { int8, float32, bfloat16, fp8 };
enum class Zero : std::uint8_t { middle, integer, offset };  // a constant, codes, or floats that are added

constexpr std::int64_t kBlockColumns = 512;  // a sum of so many products of codes is exact in a float

constexpr std::int64_t line_columns(Format format) {
  return format == Format::int8 ? 4 : format == Format::int4 ? 8 : 2;
}
constexpr std::int64_t line_bytes(Format format) { return format == Format::fp8 ? 32 : 64; }

// Columns [column, column + columns), lines [line, line + lines) of a panel, with one scale for the weight and one for
// x. `unit` > 0: a unit of x, so many columns with one scale, begins here.
struct Block {
  std::int64_t column, columns, line, lines, group, unit;
};

// The attributes of an op.
struct Quantization {
  Format format = Format::int8;
  Compute compute = Compute::int8;
  std::int64_t group = 0, x_group = 0;

  static Format format_of(const std::string& name) {
    if (name == "int8") return Format::int8;
    if (name == "int4") return Format::int4;
    if (name == "fp8") return Format::fp8;
    fail("there is no quantized format '" + name + "'; choose one of int8, int4, fp8");
  }

  static Compute compute_of(Format format, const std::string& name) {
    const bool fp8 = format == Format::fp8;
    if (name == "float32") return Compute::float32;
    if (name == "bfloat16") return Compute::bfloat16;
    if (name == "int8" && !fp8) return Compute::int8;
    if (name == "fp8" && fp8) return Compute::fp8;
    fail("these weights can't be computed as '" + name + "'; choose one of " + (fp8 ? "fp8" : "int8") +
         ", float32, bfloat16");
  }

  Quantization() = default;
  Quantization(const std::string& format_name, const std::string& compute_name, std::int64_t columns_of_group,
               std::int64_t columns_of_x)
      : format(format_of(format_name)),
        compute(compute_of(format, compute_name)),
        group(columns_of_group),
        x_group(columns_of_x) {
    require(group >= 0 && x_group >= 0, "group and x_group must be numbers of columns, or 0");
    require(x_group == 0 || rounds_x(), "x_group must be 0 where x is not rounded to int8 or fp8");
  }

  // Whether x gets a scale.
  bool rounds_x() const { return compute == Compute::int8 || compute == Compute::fp8; }
};

// A packed weight with its scales.
struct QuantizedPanels {
  Quantization how;
  Zero zero_kind = Zero::middle;
  DType scale_dtype = DType::f32;
  const std::byte *data = nullptr, *scale = nullptr, *zero = nullptr;
  std::int64_t rows = 0, columns = 0, lines = 0, groups = 0;
  const Block* block = nullptr;
  std::int64_t blocks = 0;
  const float* x_scale = nullptr;
  float x_zero = 0.0f;

  std::int64_t panels() const { return (rows + 15) / 16; }
  std::int64_t panel_bytes() const { return lines * line_bytes(how.format); }
  // The columns of a prepared row, with those that fill lines.
  std::int64_t padded_columns() const { return lines * line_columns(how.format); }

  const std::byte* lines_of(std::int64_t panel, const Block& b) const {
    return data + panel * panel_bytes() + b.line * line_bytes(how.format);
  }
  // Of 16 rows.
  f32x16 scales(std::int64_t panel, std::int64_t group) const {
    const std::int64_t index = (panel * groups + group) * 16;
    return scale_dtype == DType::f16 ? load(reinterpret_cast<const f16*>(scale) + index)
                                     : load(reinterpret_cast<const float*>(scale) + index);
  }
  const std::uint8_t* integer_zeros(std::int64_t panel, std::int64_t group) const {
    return reinterpret_cast<const std::uint8_t*>(zero) + (panel * groups + group) * 16;
  }
  f32x16 offsets(std::int64_t panel, std::int64_t group) const {
    return load(reinterpret_cast<const float*>(zero) + (panel * groups + group) * 16);
  }

  QuantizedPanels expert(std::int64_t index) const {
    QuantizedPanels w = *this;
    const std::int64_t numbers = index * panels() * groups * 16;
    w.data += index * panels() * panel_bytes();
    w.scale += numbers * (scale_dtype == DType::f16 ? 2 : 4);
    if (zero != nullptr) w.zero += numbers * (zero_kind == Zero::integer ? 1 : 4);
    return w;
  }
};

// The number of groups of so many columns; 0: one.
inline std::int64_t count_groups(std::int64_t columns, std::int64_t group) {
  return group == 0 ? 1 : (columns + group - 1) / group;
}

inline std::int64_t count_lines(Format format, std::int64_t columns, std::int64_t group) {
  const std::int64_t line = line_columns(format);
  if (group == 0 || group >= columns) return (columns + line - 1) / line;
  return columns / group * ((group + line - 1) / line) + (columns % group + line - 1) / line;
}

// Whether a tensor's axes from `axis` on are these, contiguous.
inline bool is_packed(const Tensor& tensor, int axis, std::initializer_list<std::int64_t> shape) {
  if (tensor.ndim != axis + static_cast<int>(shape.size())) return false;
  std::int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= axis; --i) {
    const std::int64_t size = shape.begin()[i - axis];
    if (tensor.shape[i] != size || (tensor.stride[i] != stride && size > 1)) return false;
    stride *= size;
  }
  // Experts follow one another.
  for (int i = axis - 1; i >= 0; --i) {
    if (tensor.stride[i] != stride && tensor.shape[i] > 1) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

// The weight in tensors whose axes from `axis` on are a packed matrix of so many rows and columns.
inline QuantizedPanels quantized_panels(const Quantization& how, const Tensor& weight, const Tensor& scale,
                                        const Tensor& zero, int axis, std::int64_t rows, std::int64_t columns) {
  QuantizedPanels w;
  w.how = how;
  w.rows = rows;
  w.columns = columns;
  w.groups = count_groups(columns, how.group);
  w.lines = count_lines(how.format, columns, how.group);
  require(columns >= 1, "x has no columns");
  require(weight && weight.dtype == DType::u8, "quantized weights must be uint8");
  require(is_packed(weight, axis, {w.panels(), w.lines, 16, how.format == Format::fp8 ? 2 : 4}),
          "the quantized weight is not packed for the columns of the input and of the output, or not contiguous");
  require(scale && (scale.dtype == DType::f32 || scale.dtype == DType::f16) &&
              is_packed(scale, axis, {w.panels(), w.groups, 16}),
          "scale must be float32 or float16 [panels, groups, 16], contiguous");
  if (zero) {
    require(how.format != Format::fp8, "fp8 weights have no zeros");
    require((zero.dtype == DType::u8 || zero.dtype == DType::f32) && is_packed(zero, axis, {w.panels(), w.groups, 16}),
            "zero must be uint8 or float32 [panels, groups, 16], contiguous");
    w.zero_kind = zero.dtype == DType::u8 ? Zero::integer : Zero::offset;
  }
  for (int i = 0; i < axis; ++i) {
    require(scale.shape[i] == weight.shape[i] && (!zero || zero.shape[i] == weight.shape[i]),
            "weight, scale and zero must be for the same experts");
  }
  if (how.x_group != 0 && how.x_group < columns) {
    const bool divides = how.group == 0 || how.group >= columns || how.group % how.x_group == 0;
    require(divides && (how.x_group == how.group || how.x_group % line_columns(how.format) == 0),
            "x_group must divide the group, and be a multiple of the columns of a line");
  }
  w.data = weight.as<const std::byte>();
  w.scale = scale.as<const std::byte>();
  w.zero = zero.as<const std::byte>();
  w.scale_dtype = scale.dtype;
  return w;
}

// Fills in the blocks, in scratch memory: pieces of each unit of x in each group.
inline void lay_out_blocks(QuantizedPanels& w, Scratch& scratch) {
  const std::int64_t line = line_columns(w.how.format), all = w.columns;
  const std::int64_t group = w.how.group == 0 ? std::max<std::int64_t>(all, 1) : w.how.group;
  const bool units = w.how.x_group != 0 && w.how.x_group < all;
  const std::int64_t unit = units ? std::min(w.how.x_group, group) : group;
  Block* block = scratch.array<Block>(all / std::min({unit, group, kBlockColumns}) + 2 * (all / unit + w.groups) + 2);
  std::int64_t count = 0, at = 0;
  for (std::int64_t g = 0, start = 0; start < all; ++g, start += group) {
    const std::int64_t stop = std::min(all, start + group);
    for (std::int64_t first = start; first < stop; first += unit) {
      const std::int64_t last = std::min(stop, first + unit);
      for (std::int64_t begin = first; begin < last; begin += kBlockColumns) {
        const std::int64_t size = std::min(last, begin + kBlockColumns) - begin, lines = (size + line - 1) / line;
        const std::int64_t new_unit = begin == first ? (units ? last - first : begin == 0 ? all : 0) : 0;
        block[count++] = {begin, size, at, lines, g, new_unit};
        at += lines;
      }
    }
  }
  w.block = block;
  w.blocks = count;
}

}  // namespace llmc::LLMC_ISA
