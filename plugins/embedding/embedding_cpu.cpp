// y = weight[ids], from a plain weight [V, H] or from one that is packed for the output layer, quantized or not.
#include <optional>

#include "quantized.h"

namespace llmc::LLMC_ISA {
namespace {

template <class T>
void plain_row(const T* row, float* y, std::int64_t width) {
  for (std::int64_t i = 0; i < width; i += 16) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(16, width - i));
    store(y + i, load(row + i, lanes), lanes);
  }
}

// Row `lane` of a panel [width][16], or [width / 2][16][2] in pairs.
template <class T>
void packed_row(const T* panel, std::int64_t lane, bool pairs, float* y, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) {
    const std::int64_t offset = pairs ? (i / 2 * 16 + lane) * 2 + i % 2 : i * 16 + lane;
    y[i] = to_float(panel[offset]);
  }
}

float e4m3(std::uint8_t code) {
  const std::uint32_t rest = code & 0x7fu, bits = (rest << 20) + (120u << 23);
  float x = static_cast<float>(rest) * 0x1p-9f;  // below 2^-6
  if (rest >= 8) std::memcpy(&x, &bits, 4);
  return code & 0x80u ? -x : x;
}

// The numbers that the codes of a row stand for, as packing.dequantize computes them.
void quantized_row(const QuantizedPanels& w, std::int64_t id, float* y) {
  const Format format = w.how.format;
  const std::int64_t line = line_columns(format), panel = id / 16, lane = id % 16;
  const std::int64_t group = w.how.group == 0 ? w.columns : w.how.group, lines = (group + line - 1) / line;
  const auto* data = reinterpret_cast<const std::uint8_t*>(w.data) + panel * w.panel_bytes();
  for (std::int64_t g = 0; g < w.groups; ++g) {
    const std::int64_t index = (panel * w.groups + g) * 16 + lane;
    const float scale = w.scale_dtype == DType::f16 ? to_float(reinterpret_cast<const f16*>(w.scale)[index])
                                                    : reinterpret_cast<const float*>(w.scale)[index];
    float centre = format == Format::int8 ? 128.0f : 8.0f, offset = 0.0f;
    if (w.zero_kind == Zero::integer) centre = static_cast<float>(reinterpret_cast<const std::uint8_t*>(w.zero)[index]);
    if (w.zero_kind == Zero::offset) offset = reinterpret_cast<const float*>(w.zero)[index];
    const std::int64_t count = std::min(group, w.columns - g * group);
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t j = k % line;
      const std::uint8_t* bytes = data + (g * lines + k / line) * line_bytes(format) + lane * (line_bytes(format) / 16);
      float* out = y + g * group + k;
      if (format == Format::fp8) {
        *out = e4m3(bytes[j]) * scale;
        continue;
      }
      const int code = format == Format::int8 ? bytes[j] : j < 4 ? bytes[j] & 15 : bytes[j - 4] >> 4;
      const float number = static_cast<float>(code);
      *out = w.zero_kind == Zero::offset ? number * scale + offset : (number - centre) * scale;
    }
  }
}

struct Table {
  const Tensor& weight;
  std::int64_t width;
  std::optional<QuantizedPanels> quantized = {};

  bool packed() const { return weight.ndim > 2; }

  template <class T>
  void copy(std::int64_t id, float* y) const {
    const T* data = weight.as<const T>();
    if (packed()) {
      packed_row(data + id / 16 * weight.stride[0], id % 16, weight.ndim == 4, y, width);
    } else {
      plain_row(data + id * weight.stride[0], y, width);
    }
  }
  void copy(std::int64_t id, float* y) const {
    if (quantized) return quantized_row(*quantized, id, y);
    switch (weight.dtype) {
      case DType::f32:
        return copy<float>(id, y);
      case DType::bf16:
        return copy<bf16>(id, y);
      default:
        return copy<f16>(id, y);
    }
  }
  // Fails unless the weight is [V, H], or packed from that; gives V, with the rows that padding adds.
  std::int64_t rows() const {
    if (quantized) return quantized->panels() * 16;
    const DType dtype = weight.dtype;
    require(weight && (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16),
            "weight must be float32, bfloat16 or float16");
    if (!packed()) {
      require(weight.ndim == 2 && weight.shape[1] == width && (weight.stride[1] == 1 || width == 1),
              "weight must be [V, H] with contiguous rows");
      return weight.shape[0];
    }
    const bool pairs = dtype == DType::bf16;
    const std::int64_t steps = pairs ? (width + 1) / 2 : width;
    bool fits = weight.ndim == (pairs ? 4 : 3) && weight.shape[1] == steps && weight.shape[2] == 16;
    fits = fits && (!pairs || (weight.shape[3] == 2 && weight.stride[3] == 1));
    fits = fits && weight.stride[2] == (pairs ? 2 : 1) && (weight.stride[1] == (pairs ? 32 : 16) || steps == 1);
    require(fits, "the packed weight is not one of rows as wide as y");
    return weight.shape[0] * 16;
  }
};

class Embedding : public Kernel {
 public:
  explicit Embedding(const Attributes& attributes) {
    const std::string format = attributes.text("format", "plain");
    const std::int64_t group = attributes.integer("group", 0);
    require(format != "plain" || group == 0, "a plain table has no groups");
    if (format != "plain") how_.emplace(format, "float32", group, 0);
  }

  void run(const Context& context) override {
    require(context.in.size() >= 2 && context.in.size() <= 4 && context.out.size() == 1,
            "takes ids and weight, and scale and zero of a quantized one, and gives y");
    const Tensor &ids = context.in[0], &y = context.out[0];
    require(ids && (ids.dtype == DType::i32 || ids.dtype == DType::i64), "ids must be int32 or int64");
    bool fits = y && y.dtype == DType::f32 && y.ndim == ids.ndim + 1;
    for (int i = 0; fits && i < ids.ndim; ++i) fits = y.shape[i] == ids.shape[i];
    require(fits, "y must be float32 with the shape of ids and one more axis");
    require(y.stride[y.ndim - 1] == 1 || y.shape[y.ndim - 1] == 1, "the rows of y must be contiguous");
    Table table{context.in[1], y.shape[y.ndim - 1]};
    const Tensor scale = context.in.size() > 2 ? context.in[2] : Tensor();
    const Tensor zero = context.in.size() > 3 ? context.in[3] : Tensor();
    if (how_) {
      const std::int64_t padded = table.weight.ndim == 4 ? table.weight.shape[0] * 16 : 0;
      table.quantized = quantized_panels(*how_, table.weight, scale, zero, 0, padded, table.width);
    } else {
      require(!scale && !zero, "a plain table has no scales and zeros");
    }
    const std::int64_t rows = table.rows(), count = ids.numel();
    const auto id_at = [&](std::int64_t index) {
      std::int64_t offset = 0;
      for (int i = ids.ndim - 1; i >= 0; index /= ids.shape[i], --i) offset += index % ids.shape[i] * ids.stride[i];
      return ids.dtype == DType::i32 ? std::int64_t{ids.as<const std::int32_t>()[offset]}
                                     : ids.as<const std::int64_t>()[offset];
    };
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t id = id_at(i);
      if (id < 0 || id >= rows) {
        fail("token id " + std::to_string(id) + " is not one of the weight's " + std::to_string(rows) + " rows");
      }
    }
    const auto range = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t index = begin; index < end; ++index) {
        std::int64_t offset = 0, rest = index;
        for (int i = ids.ndim - 1; i >= 0; rest /= ids.shape[i], --i) offset += rest % ids.shape[i] * y.stride[i];
        table.copy(id_at(index), y.as<float>() + offset);
      }
    };
    if (count * table.width < 16384) {
      range(0, count, 0);
    } else {
      context.pool.split(count, 1, range);
    }
  }

 private:
  std::optional<Quantization> how_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(embedding, Embedding)
