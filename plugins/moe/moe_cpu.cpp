// Mixture of experts: rows are grouped by expert, so that the weights of a chosen expert are read once and those of the
// others not at all. A row's result does not depend on the rows beside it: products are batch-invariant (panels.h), and
// a token's experts are added in the order of its choices.
#include <optional>

#include "activations.h"
#include "quantized_panels.h"

namespace llmc::LLMC_ISA {
namespace {

constexpr std::int64_t kScratch = std::int64_t{64} << 20;  // bytes of intermediate values; more tokens go in turns
constexpr std::int64_t kFewPanels = 16;                    // panels of a task when few rows stream the weights

// The rows of one expert: pairs [first, last).
struct Group {
  std::int64_t expert, first, last;
};

// Rows [row, row_end) of a group times panels [panel, panel_end).
struct Task {
  const Group* group;
  std::int64_t row, row_end, panel, panel_end;
};

// The choices of some tokens, grouped by expert; within an expert in the order of the tokens. A pair is a token's
// choice of an expert that exists.
struct Routing {
  std::int64_t pairs = 0, groups = 0;
  Group* group;           // [groups]
  std::int64_t* token;    // [pairs]
  std::int64_t* pair_of;  // [tokens, choices], -1 where there is none
};

class Moe : public Kernel {
 public:
  explicit Moe(const Attributes& attributes)
      : gated_(attributes.flag("gated")),
        interleaved_(attributes.flag("interleaved")),
        clamped_swiglu_(attributes.text("function") == "gpt_oss"),
        alpha_(static_cast<float>(attributes.real("alpha"))),
        limit_(static_cast<float>(attributes.real("limit"))),
        activation_(find_activation(clamped_swiglu_ ? "silu" : attributes.text("function"))) {
    require(gated_ || !clamped_swiglu_, "gpt_oss is a gated function");
    const std::string format = attributes.text("format", "plain"), compute = attributes.text("compute", "plain");
    const std::int64_t group = attributes.integer("group", 0), x_group = attributes.integer("x_group", 0);
    inner_ = attributes.integer("inner", 0);
    require(inner_ >= 0, "inner must be the number of down's columns, or 0");
    if (format != "plain") {
      how_.emplace(format, compute, group, x_group);
    } else {
      require(compute == "plain" && group == 0 && x_group == 0, "plain experts have no compute, group and x_group");
    }
  }

  void run(const Context& context) override {
    if (how_) {
      run_as(context, check<QuantizedPanels>(context));
    } else {
      run_as(context, check<Panels>(context));
    }
  }

 private:
  template <class W>
  struct Shape {
    std::int64_t tokens, choices, hidden, inner, experts;
    W gate_up, down;  // of expert 0; the others follow
  };

  struct Memory {
    RowMemory x, inner;    // [pairs]
    float *gate_up, *out;  // [pairs, 2I or I], [pairs, H]
    float* split;          // [threads, 2I]
    Routing routing;
    std::int64_t* count;  // [experts]
    Task* tasks;
    std::int64_t most_tasks;
  };

  template <class W>
  void run_as(const Context& context, const Shape<W>& shape) const {
    if (shape.tokens == 0) return;
    const std::int64_t up_bytes = prepared_bytes(shape.gate_up), down_bytes = prepared_bytes(shape.down);
    Memory memory;
    const std::int64_t of_pair =
        up_bytes + down_bytes + (shape.hidden + shape.inner + shape.gate_up.rows + shape.hidden) * 4;
    const std::int64_t tokens = std::clamp<std::int64_t>(kScratch / (of_pair * shape.choices + 1), 1, shape.tokens);
    allocate(memory, shape, tokens, context);
    for (std::int64_t first = 0; first < shape.tokens; first += tokens) {
      run(context, shape, memory, first, std::min(tokens, shape.tokens - first));
    }
  }

  template <class W>
  Shape<W> check(const Context& context) const {
    require(context.in.size() >= 5 && context.in.size() <= 11 && context.out.size() == 1,
            "takes x, ids, weights, gate_up, down, two biases that may be absent, and scales and zeros of both "
            "weights if they are quantized, and gives y");
    const Tensor &x = context.in[0], &ids = context.in[1], &weights = context.in[2], &y = context.out[0];
    const auto matrix = [](const Tensor& t, DType dtype) { return t && t.dtype == dtype && t.ndim == 2; };
    require(matrix(x, DType::f32) && matrix(y, DType::f32), "x and y must be float32 [T, H]");
    require(x.shape[0] == y.shape[0] && x.shape[1] == y.shape[1], "x and y must be float32 [T, H]");
    require((x.stride[1] == 1 && y.stride[1] == 1) || x.shape[1] == 1, "the columns of x and y must be contiguous");
    require(matrix(ids, DType::i64) && matrix(weights, DType::f32), "ids must be int64 and weights float32, [T, K]");
    require(ids.shape[0] == x.shape[0] && weights.shape[0] == x.shape[0] && ids.shape[1] == weights.shape[1],
            "ids must be int64 and weights float32, [T, K]");
    const Tensor &gate_up = context.in[3], &down = context.in[4];
    require(gate_up.ndim >= 4 && down.ndim == gate_up.ndim && gate_up.shape[0] == down.shape[0],
            "gate_up and down must be packed, for the same experts");
    require(gate_up.dtype == down.dtype, "gate_up and down must have one dtype");

    Shape<W> shape{x.shape[0], ids.shape[1], x.shape[1], inner_size(context), gate_up.shape[0], {}, {}};
    const std::int64_t rows = gated_ ? 2 * shape.inner : shape.inner;
    if constexpr (std::is_same_v<W, Panels>) {
      for (std::size_t i = 7; i < context.in.size(); ++i) {
        require(!context.in[i], "plain experts have no scales and zeros");
      }
      shape.gate_up = panels_of(gate_up, 1, rows, shape.hidden);
      shape.down = panels_of(down, 1, shape.hidden, shape.inner);
      for (const auto& [tensor, panels] : {std::pair(&gate_up, &shape.gate_up), std::pair(&down, &shape.down)}) {
        require(tensor->stride[0] == panels->panels() * panels->panel_bytes() / item_bytes(tensor->dtype) ||
                    shape.experts == 1,
                "packed weights must be contiguous");
      }
    } else {
      shape.gate_up = quantized_panels(*how_, gate_up, input(context, 7), input(context, 8), 1, rows, shape.hidden);
      shape.down = quantized_panels(*how_, down, input(context, 9), input(context, 10), 1, shape.hidden, shape.inner);
      lay_out_blocks(shape.gate_up, context.scratch);
      lay_out_blocks(shape.down, context.scratch);
    }
    check_bias(input(context, 5), shape.experts, rows);
    check_bias(input(context, 6), shape.experts, shape.hidden);
    return shape;
  }

  // An input that may be absent.
  static Tensor input(const Context& context, std::size_t index) {
    return index < context.in.size() ? context.in[index] : Tensor();
  }

  static std::int64_t item_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

  // Packed weights are padded: without `inner` and a bias only whole lines of columns are known, so of bf16 experts I
  // is even.
  std::int64_t inner_size(const Context& context) const {
    const Tensor &down = context.in[4], bias = input(context, 5);
    if (inner_ != 0) return inner_;
    if (bias && bias.ndim == 2) return gated_ ? bias.shape[1] / 2 : bias.shape[1];
    if (how_) return down.shape[2] * line_columns(how_->format);
    return down.dtype == DType::bf16 ? down.shape[2] * 2 : down.shape[2];
  }

  static void check_bias(const Tensor& bias, std::int64_t experts, std::int64_t size) {
    if (!bias) return;
    require(bias.dtype == DType::f32 && bias.ndim == 2 && bias.shape[0] == experts && bias.shape[1] == size,
            "biases must be float32 [E, 2I] (or [E, I]) and [E, H]");
    require(bias.stride[1] == 1 || size == 1, "biases must be contiguous");
  }

  template <class W>
  void allocate(Memory& memory, const Shape<W>& shape, std::int64_t tokens, const Context& context) const {
    Scratch& scratch = context.scratch;
    const std::int64_t pairs = tokens * shape.choices;
    memory.x = row_memory(shape.gate_up, pairs, scratch);
    memory.inner = row_memory(shape.down, pairs, scratch);
    memory.gate_up = scratch.array<float>(pairs * shape.gate_up.rows);
    memory.out = scratch.array<float>(pairs * shape.hidden);
    memory.split = scratch.array<float>(context.pool.size() * 2 * shape.inner);
    memory.routing.group = scratch.array<Group>(std::min(pairs, shape.experts));
    memory.routing.token = scratch.array<std::int64_t>(pairs);
    memory.routing.pair_of = scratch.array<std::int64_t>(pairs);
    memory.count = scratch.array<std::int64_t>(shape.experts + 1);
    const std::int64_t panels = std::max(shape.gate_up.panels(), shape.down.panels());
    memory.most_tasks = (std::min(pairs, shape.experts) + pairs / kTaskRows) * (panels / kTaskPanels + 1);
    memory.tasks = scratch.array<Task>(memory.most_tasks);
  }

  template <class W>
  void run(const Context& context, const Shape<W>& shape, Memory& memory, std::int64_t first,
           std::int64_t tokens) const {
    route(context, shape, memory, first, tokens);
    const Routing& routing = memory.routing;
    const Tensor& x = context.in[0];
    share_rows(context.pool, routing.pairs, shape.hidden, [&](std::int64_t pair, int) {
      const float* row = x.as<const float>() + routing.token[pair] * x.stride[0];
      prepare_row(shape.gate_up, row, memory.x, pair);
    });
    products(context, shape.gate_up, memory.x.rows(routing.pairs), input(context, 5), memory, memory.gate_up);
    share_rows(context.pool, routing.pairs, shape.gate_up.rows * 4, [&](std::int64_t pair, int thread) {
      float* row = memory.gate_up + pair * shape.gate_up.rows;
      activate(row, shape.inner, memory.split + thread * 2 * shape.inner);
      prepare_row(shape.down, row, memory.inner, pair);
    });
    products(context, shape.down, memory.inner.rows(routing.pairs), input(context, 6), memory, memory.out);
    share_rows(context.pool, tokens, shape.choices * shape.hidden,
               [&](std::int64_t token, int) { add_up(context, shape, memory, first, token); });
  }

  // Fills in the routing of tokens first .. first + tokens - 1.
  template <class W>
  static void route(const Context& context, const Shape<W>& shape, Memory& memory, std::int64_t first,
                    std::int64_t tokens) {
    const Tensor& ids = context.in[1];
    Routing& routing = memory.routing;
    const auto id_of = [&](std::int64_t t, std::int64_t k) {
      return ids.as<const std::int64_t>()[(first + t) * ids.stride[0] + k * ids.stride[1]];
    };
    const auto exists = [&](std::int64_t id) { return id >= 0 && id < shape.experts; };
    std::fill_n(memory.count, shape.experts, std::int64_t{0});
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t k = 0; k < shape.choices; ++k) {
        if (const std::int64_t id = id_of(t, k); exists(id)) ++memory.count[id];
      }
    }
    routing.pairs = routing.groups = 0;
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      const std::int64_t size = memory.count[e];
      memory.count[e] = routing.pairs;  // from here on: where the expert's next pair goes
      if (size > 0) routing.group[routing.groups++] = {e, routing.pairs, routing.pairs + size};
      routing.pairs += size;
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t k = 0; k < shape.choices; ++k) {
        const std::int64_t id = id_of(t, k);
        const std::int64_t pair = exists(id) ? memory.count[id]++ : -1;
        routing.pair_of[t * shape.choices + k] = pair;
        if (pair >= 0) routing.token[pair] = first + t;
      }
    }
  }

  // f(row, thread) for all rows, by all threads if each is worth so many operations.
  template <class F>
  static void share_rows(ThreadPool& pool, std::int64_t rows, std::int64_t work, F&& f) {
    const auto range = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t row = begin; row < end; ++row) f(row, thread);
    };
    if (rows * work < 16384) {
      range(0, rows, 0);
    } else {
      pool.split(rows, 1, range);
    }
  }

  // Every group's rows times its expert's weight; y [pairs, rows of the weight].
  template <class W>
  static void products(const Context& context, const W& w, const PreparedRows& rows, const Tensor& bias, Memory& memory,
                       float* y) {
    const Routing& routing = memory.routing;
    std::int64_t count = 0;
    for (std::int64_t g = 0; g < routing.groups; ++g) {
      const Group& group = routing.group[g];
      const std::int64_t size = group.last - group.first, step = size <= kFewRows ? kFewPanels : kTaskPanels;
      for (std::int64_t panel = 0; panel < w.panels(); panel += step) {
        for (std::int64_t row = 0; row < size; row += kTaskRows) {
          memory.tasks[count++] = {&group, row, std::min(size, row + kTaskRows), panel,
                                   std::min(w.panels(), panel + step)};
        }
      }
    }
    context.pool.share(count, 1, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        const Task& task = memory.tasks[i];
        const Group& group = *task.group;
        const W expert = w.expert(group.expert);
        const float* b = bias ? bias.as<const float>() + group.expert * bias.stride[0] : nullptr;
        multiply(expert, rows.from(group.first, group.last - group.first), task.row, task.row_end, task.panel,
                 task.panel_end, b, y + group.first * w.rows, w.rows);
      }
    });
  }

  // The gated (or plain) activation of a row, into its first `inner` places.
  void activate(float* row, std::int64_t inner, float* split) const {
    if (!gated_) return activation_.apply(row, row, inner);
    float *gate = row, *up = row + inner;
    if (interleaved_) {
      gate = split;
      up = split + inner;
      for (std::int64_t i = 0; i < inner; ++i) {
        gate[i] = row[2 * i];
        up[i] = row[2 * i + 1];
      }
    }
    if (limit_ > 0) {
      const f32x16 most = broadcast(limit_), least = broadcast(-limit_);
      each_vector(inner, [&](std::int64_t i, int n) {
        store(gate + i, min(most, load(gate + i, n)), n);
        store(up + i, max(least, min(most, load(up + i, n))), n);
      });
    }
    if (!clamped_swiglu_) return activation_.gate(gate, up, row, inner);
    each_vector(inner, [&](std::int64_t i, int n) {
      const f32x16 g = load(gate + i, n);
      store(row + i, g * sigmoid(g * alpha_) * (load(up + i, n) + 1.0f), n);
    });
  }

  template <class F>
  static void each_vector(std::int64_t count, F&& f) {
    for (std::int64_t i = 0; i < count; i += 16) f(i, static_cast<int>(std::min<std::int64_t>(16, count - i)));
  }

  template <class W>
  static void add_up(const Context& context, const Shape<W>& shape, const Memory& memory, std::int64_t first,
                     std::int64_t token) {
    const Tensor &weights = context.in[2], &y = context.out[0];
    const float* weight = weights.as<const float>() + (first + token) * weights.stride[0];
    float* out = y.as<float>() + (first + token) * y.stride[0];
    const std::int64_t* pairs = memory.routing.pair_of + token * shape.choices;
    each_vector(shape.hidden, [&](std::int64_t i, int n) {
      f32x16 sum = zero();
      for (std::int64_t k = 0; k < shape.choices; ++k) {
        if (pairs[k] < 0) continue;
        sum = fmadd(broadcast(weight[k * weights.stride[1]]), load(memory.out + pairs[k] * shape.hidden + i, n), sum);
      }
      store(out + i, sum, n);
    });
  }

  const bool gated_, interleaved_, clamped_swiglu_;
  const float alpha_, limit_;
  const Activation& activation_;
  std::optional<Quantization> how_;
  std::int64_t inner_ = 0;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(moe, Moe)
