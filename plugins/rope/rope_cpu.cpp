// y[t, h, i] = x[t, h, index[0, i]] * a[t, i] + x[t, h, index[2, i]] * b[t, i] with the coefficients of position p[t]:
// a = sign[0] * table[p, index[1]], b = sign[1] * table[p, index[3]].
#include "simd.h"

namespace llmc::LLMC_ISA {
namespace {

// Outputs [begin, end) whose two inputs lie at i + first and i + second (straight), at i + first and (i ^ 1) + second
// (neighbours: interleaved pairs), or anywhere.
struct Run {
  enum Kind { straight, neighbours, scattered } kind;
  std::int64_t begin, end, first, second;
};

struct Pairing {
  const std::int32_t *first, *second;  // index[0] and index[2], or of the coefficients index[1] and index[3]
  std::int64_t size;

  bool straight(std::int64_t i, std::int64_t from) const {
    return first[i] - i == first[from] - from && second[i] - i == second[from] - from;
  }
  bool neighbours(std::int64_t i, std::int64_t from) const {
    return first[i] - i == first[from] - from && second[i] - (i ^ 1) == second[from] - (from ^ 1);
  }
  template <class Same>
  std::int64_t length(std::int64_t from, Same same) const {
    std::int64_t i = from + 1;
    while (i < size && same(i)) ++i;
    return i - from;
  }
  std::vector<Run> runs() const {
    std::vector<Run> found;
    for (std::int64_t i = 0; i < size;) {
      const std::int64_t line = length(i, [&](std::int64_t j) { return straight(j, i); });
      const std::int64_t pairs = i % 2 == 0 ? length(i, [&](std::int64_t j) { return neighbours(j, i); }) / 2 * 2 : 0;
      if (pairs > line) {
        found.push_back({Run::neighbours, i, i + pairs, first[i] - i, second[i] - (i ^ 1)});
        i += pairs;
      } else if (line >= 4) {
        found.push_back({Run::straight, i, i + line, first[i] - i, second[i] - i});
        i += line;
      } else if (!found.empty() && found.back().kind == Run::scattered && found.back().end == i) {
        found.back().end = ++i;
      } else {
        found.push_back({Run::scattered, i, i + 1, 0, 0});
        ++i;
      }
    }
    return found;
  }
};

class Rope : public Kernel {
 public:
  explicit Rope(const Attributes&) {}

  void run(const Context& context) override {
    check(context);
    const Tensor &x = context.in[0], &positions = context.in[1], &table = context.in[2], &y = context.out[0];
    const std::int64_t tokens = y.shape[0], heads = y.shape[1], size = y.shape[2];
    const int threads = context.pool.size();
    float* coefficients = context.scratch.array<float>(2 * size * threads);
    const auto range = [&](std::int64_t begin, std::int64_t end, int thread) {
      float *a = coefficients + 2 * size * thread, *b = a + size;
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int64_t p = position(positions, t);
        find_coefficients(table.as<const float>() + p * table.stride[0], a, b);
        for (std::int64_t h = 0; h < heads; ++h) {
          rotate(x.as<const float>() + t * x.stride[0] + h * x.stride[1], a, b,
                 y.as<float>() + t * y.stride[0] + h * y.stride[1]);
        }
      }
    };
    if (y.numel() < 8192) {
      range(0, tokens, 0);
    } else {
      context.pool.split(tokens, 1, range);
    }
  }

 private:
  static std::int64_t position(const Tensor& positions, std::int64_t t) {
    if (positions.dtype == DType::i32) return positions.as<const std::int32_t>()[t * positions.stride[0]];
    return positions.as<const std::int64_t>()[t * positions.stride[0]];
  }

  // Calls f(i, lanes) for 16 outputs of a run after the other; the lanes of whole vectors are known when this is
  // compiled.
  template <class F>
  static LLMC_INLINE void for_each_vector(const Run& run, F&& f) {
    std::int64_t i = run.begin;
    for (; i + 16 <= run.end; i += 16) f(i, 16);
    if (i < run.end) f(i, static_cast<int>(run.end - i));
  }

  // a and b from the row of the table of one position.
  void find_coefficients(const float* row, float* a, float* b) const {
    const std::int32_t *first = index_.data() + size_, *second = first + 2 * size_;
    const float *sign = sign_.data(), *other_sign = sign + size_;
    for (const Run& run : coefficient_runs_) {
      if (run.kind == Run::straight) {
        for_each_vector(run, [&](std::int64_t i, int lanes) {
          store(a + i, load(sign + i, lanes) * load(row + i + run.first, lanes), lanes);
          store(b + i, load(other_sign + i, lanes) * load(row + i + run.second, lanes), lanes);
        });
        continue;
      }
      for (std::int64_t i = run.begin; i < run.end; ++i) {
        a[i] = sign[i] * row[first[i]];
        b[i] = other_sign[i] * row[second[i]];
      }
    }
  }

  void rotate(const float* x, const float* a, const float* b, float* y) const {
    for (const Run& run : runs_) {
      if (run.kind == Run::scattered) {
        const std::int32_t *first = index_.data(), *second = first + 2 * size_;
        for (std::int64_t i = run.begin; i < run.end; ++i) y[i] = x[first[i]] * a[i] + x[second[i]] * b[i];
        continue;
      }
      for_each_vector(run, [&](std::int64_t i, int lanes) {
        f32x16 other = load(x + i + run.second, lanes);
        if (run.kind == Run::neighbours) other = swap_pairs(other);
        store(y + i, load(x + i + run.first, lanes) * load(a + i, lanes) + other * load(b + i, lanes), lanes);
      });
    }
  }

  void check(const Context& context) {
    require(context.in.size() == 5 && context.out.size() == 1,
            "takes x, position_ids, table, index and sign, and gives y");
    const Tensor &x = context.in[0], &positions = context.in[1], &table = context.in[2], &y = context.out[0];
    require(x && x.dtype == DType::f32 && x.ndim == 3 && (x.stride[2] == 1 || x.shape[2] == 1),
            "x must be float32 [T, H, D] with contiguous heads");
    require(y && y.dtype == DType::f32 && y.ndim == 3 && (y.stride[2] == 1 || y.shape[2] == 1) &&
                y.shape[0] == x.shape[0] && y.shape[1] == x.shape[1],
            "y must be float32 [T, H, Do] with contiguous heads");
    require(positions && (positions.dtype == DType::i32 || positions.dtype == DType::i64) && positions.ndim == 1 &&
                positions.shape[0] == x.shape[0],
            "position_ids must be int32 or int64 [T]");
    require(table && table.dtype == DType::f32 && table.ndim == 2 && (table.stride[1] == 1 || table.shape[1] == 1),
            "table must be float32 [P, U] with contiguous rows");
    learn(context.in[3], context.in[4], x.shape[2], table.shape[1], y.shape[2]);
    for (std::int64_t t = 0; t < x.shape[0]; ++t) {
      const std::int64_t p = position(positions, t);
      if (p < 0 || p >= table.shape[0]) {
        fail("position " + std::to_string(p) + " is beyond the " + std::to_string(table.shape[0]) +
             " positions of the engine; build it with a larger --max-seq-len");
      }
    }
  }

  // Reads index and sign, which are weights and stay the same, at the first run.
  void learn(const Tensor& index, const Tensor& sign, std::int64_t inputs, std::int64_t columns, std::int64_t outputs) {
    if (size_ == outputs && learned_ == index.data && inputs_ == inputs) return;
    require(index && index.dtype == DType::i32 && index.ndim == 2 && index.shape[0] == 4 && index.shape[1] == outputs,
            "index must be int32 [4, Do]");
    require(sign && sign.dtype == DType::f32 && sign.ndim == 2 && sign.shape[0] == 2 && sign.shape[1] == outputs,
            "sign must be float32 [2, Do]");
    index_.clear();
    sign_.clear();
    for (std::int64_t row = 0; row < 4; ++row) {
      for (std::int64_t i = 0; i < outputs; ++i) {
        const std::int32_t value = index.as<const std::int32_t>()[row * index.stride[0] + i * index.stride[1]];
        require(value >= 0 && value < (row % 2 == 0 ? inputs : columns), "index points outside of x or of the table");
        index_.push_back(value);
      }
    }
    for (std::int64_t row = 0; row < 2; ++row) {
      for (std::int64_t i = 0; i < outputs; ++i) {
        sign_.push_back(sign.as<const float>()[row * sign.stride[0] + i * sign.stride[1]]);
      }
    }
    const std::int32_t* rows = index_.data();
    runs_ = Pairing{rows, rows + 2 * outputs, outputs}.runs();
    coefficient_runs_ = Pairing{rows + outputs, rows + 3 * outputs, outputs}.runs();
    size_ = outputs;
    inputs_ = inputs;
    learned_ = index.data;
  }

  std::vector<std::int32_t> index_;  // [4, Do]
  std::vector<float> sign_;          // [2, Do]
  std::vector<Run> runs_, coefficient_runs_;
  std::int64_t size_ = -1, inputs_ = -1;
  const void* learned_ = nullptr;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(rope, Rope)
