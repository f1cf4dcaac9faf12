#include "executor.h"

#include <chrono>
#include <cstring>
#include <utility>

namespace llmc {
namespace {

std::int64_t multiply(std::int64_t a, std::int64_t b) {
  std::int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) fail("a size of the plan overflows");
  return result;
}

std::int64_t add(std::int64_t a, std::int64_t b) {
  std::int64_t result;
  if (__builtin_add_overflow(a, b, &result)) fail("a size of the plan overflows");
  return result;
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Copies an array; true if it moved.
template <class T>
bool assign(std::vector<T>& target, const T* source, std::int64_t count, const T*& view) {
  const T* before = target.data();
  if (source == nullptr) {
    target.clear();
    view = nullptr;
  } else {
    target.assign(source, source + count);
    view = target.data();
  }
  return target.data() != before;
}

std::string place(const StepSpec& step) {
  return "llmc::" + step.op + (step.module.empty() ? "" : " (" + step.module + ")") + ": ";
}

}  // namespace

std::int64_t Size::at(std::int64_t t, std::int64_t n) const {
  return add(constant, add(multiply(tokens, t), multiply(rows, n)));
}

Executor::Executor(std::vector<ValueSpec> values, std::vector<StepSpec> steps, std::size_t arena_bytes,
                   std::vector<WeightBuffer> weights, KvMemory kv, int threads, const std::string& isa, bool poison)
    : values_(std::move(values)),
      weights_(std::move(weights)),
      arena_(arena_bytes),
      scratch_(poison),
      kv_(std::move(kv)),
      pool_(threads),
      poison_(poison) {
  const auto count = static_cast<std::int64_t>(values_.size());
  for (const ValueSpec& value : values_) {
    if (value.shape.size() != value.strides.size() || value.shape.size() > kMaxDims) {
      fail("value '" + value.name + "' needs as many strides as dimensions, at most 8");
    }
    const auto bases = static_cast<std::int64_t>(value.storage == Storage::weight ? weights_.size() : 5);
    if (value.base < 0 || (value.storage != Storage::arena && value.base >= bases)) {
      fail("value '" + value.name + "' has no base " + std::to_string(value.base));
    }
  }
  for (StepSpec& spec : steps) {
    for (const std::int64_t index : spec.inputs) {
      if (index < -1 || index >= count) fail(place(spec) + "no input value " + std::to_string(index));
    }
    for (const std::int64_t index : spec.outputs) {
      if (index < 0 || index >= count) fail(place(spec) + "no output value " + std::to_string(index));
      if (values_[static_cast<std::size_t>(index)].storage != Storage::arena)
        fail(place(spec) + "output is not in the arena");
    }
    std::unique_ptr<Kernel> kernel;
    try {
      kernel = make_kernel(spec.op, isa, Attributes(spec.attributes));
    } catch (const std::invalid_argument& error) {
      fail(place(spec) + error.what());
    }
    steps_.push_back({std::move(spec), std::move(kernel), {}, {}});
    steps_.back().in.resize(steps_.back().spec.inputs.size());
    steps_.back().out.resize(steps_.back().spec.outputs.size());
  }
  views_.resize(values_.size());
}

void Executor::check_batch(const Batch& batch, const std::int32_t* logit_rows) const {
  require(batch.tokens >= 1 && batch.sequences >= 1, "the batch is empty");
  require(batch.cu_seqlens[0] == 0 && batch.cu_seqlens[batch.sequences] == batch.tokens,
          "cu_seqlens must go from 0 to the number of tokens");
  for (std::int64_t s = 0; s < batch.sequences; ++s) {
    const std::int64_t rows = std::int64_t{batch.cu_seqlens[s + 1]} - batch.cu_seqlens[s];
    require(rows >= 1, "cu_seqlens must grow");
    require(batch.num_computed[s] >= 0, "num_computed is negative");
    const std::int64_t blocks = (batch.num_computed[s] + rows + kv_.block_size() - 1) / kv_.block_size();
    require(blocks <= batch.max_blocks || kv_.slots() == 0, "block_tables is too narrow for the sequence");
    for (std::int64_t b = 0; b < std::min(blocks, batch.max_blocks); ++b) {
      const std::int32_t block = batch.block_tables[s * batch.max_blocks + b];
      require(block >= 0 && block < kv_.blocks(), "block_tables names a block that the cache does not have");
    }
    require(batch.tree_words == 0 || rows <= batch.tree_words * 64, "tree_mask has too few bits for the rows");
  }
  for (std::int64_t t = 0; t < batch.tokens; ++t) require(batch.position_ids[t] >= 0, "position_ids is negative");
  for (std::int64_t n = 0; n < batch.rows; ++n) {
    require(logit_rows[n] >= 0 && logit_rows[n] < batch.tokens, "logit_rows names a row that the batch does not have");
  }
}

// Of the batch that was copied. Views of these arrays are resolved after it, whenever their sizes change.
void Executor::set_adapters(const std::int32_t* adapters) {
  arrays_.adapters.assign(static_cast<std::size_t>(batch_.tokens), -1);
  arrays_.row_adapters.assign(static_cast<std::size_t>(batch_.rows), -1);
  if (adapters == nullptr) return;
  for (std::int64_t s = 0; s < batch_.sequences; ++s) {
    std::fill(arrays_.adapters.begin() + batch_.cu_seqlens[s], arrays_.adapters.begin() + batch_.cu_seqlens[s + 1],
              adapters[s]);
  }
  for (std::size_t n = 0; n < arrays_.row_adapters.size(); ++n) {
    arrays_.row_adapters[n] = arrays_.adapters[static_cast<std::size_t>(arrays_.logit_rows[n])];
  }
}

bool Executor::copy_batch(const Batch& batch, const std::int32_t* input_ids, const std::int32_t* logit_rows) {
  bool moved = batch.tokens != batch_.tokens || batch.rows != batch_.rows;
  batch_ = batch;
  const std::int32_t* unused;
  moved |= assign(arrays_.input_ids, input_ids, batch.tokens, unused);
  moved |= assign(arrays_.logit_rows, logit_rows, batch.rows, unused);
  moved |= assign(arrays_.position_ids, batch.position_ids, batch.tokens, batch_.position_ids);
  assign(arrays_.cu_seqlens, batch.cu_seqlens, batch.sequences + 1, batch_.cu_seqlens);
  assign(arrays_.num_computed, batch.num_computed, batch.sequences, batch_.num_computed);
  assign(arrays_.block_tables, batch.block_tables, batch.sequences * batch.max_blocks, batch_.block_tables);
  assign(arrays_.state_slots, batch.state_slots, batch.sequences, batch_.state_slots);
  assign(arrays_.tree_mask, batch.tree_mask, batch.tokens * batch.tree_words, batch_.tree_mask);
  return moved;
}

// The view for this batch's sizes, checked to stay within its memory.
Tensor Executor::resolve(const ValueSpec& value) {
  Tensor view;
  view.dtype = value.dtype;
  view.ndim = static_cast<int>(value.shape.size());
  std::int64_t first = value.offset.at(batch_.tokens, batch_.rows);
  std::int64_t last = first;
  bool empty = false;
  for (int i = 0; i < view.ndim; ++i) {
    const auto axis = static_cast<std::size_t>(i);
    view.shape[i] = value.shape[axis].at(batch_.tokens, batch_.rows);
    view.stride[i] = value.strides[axis].at(batch_.tokens, batch_.rows);
    if (view.shape[i] < 0) fail("value '" + value.name + "' has a negative size");
    empty |= view.shape[i] == 0;
    if (view.shape[i] < 2) continue;
    const std::int64_t reach = multiply(view.shape[i] - 1, view.stride[i]);
    (reach < 0 ? first : last) = add(reach < 0 ? first : last, reach);
  }
  const auto size = static_cast<std::int64_t>(item_size(value.dtype));
  std::byte* memory = arena_.data();
  std::int64_t bytes = static_cast<std::int64_t>(arena_.size()), base = 0;
  if (value.storage == Storage::arena) {
    base = value.base;
  } else if (value.storage == Storage::weight) {
    const WeightBuffer& weight = weights_[static_cast<std::size_t>(value.base)];
    memory = const_cast<std::byte*>(weight.data);  // kernels only write outputs, which are in the arena
    bytes = static_cast<std::int64_t>(weight.bytes);
  } else {
    std::vector<std::int32_t>* inputs[] = {&arrays_.input_ids, &arrays_.position_ids, &arrays_.logit_rows,
                                           &arrays_.adapters, &arrays_.row_adapters};
    auto& input = *inputs[value.base];
    memory = reinterpret_cast<std::byte*>(input.data());
    bytes = static_cast<std::int64_t>(input.size()) * 4;
  }
  const std::int64_t begin = add(base, multiply(first, size)), end = add(base, multiply(add(last, 1), size));
  if (!empty && (begin < 0 || end > bytes)) {
    fail("value '" + value.name + "' reaches byte " + std::to_string(begin < 0 ? begin : end) + " of " +
         std::to_string(bytes) + "; the batch is larger than the plan allows, or the plan is damaged");
  }
  const std::int64_t start = value.offset.at(batch_.tokens, batch_.rows);
  // An empty view keeps a valid pointer: null would mean that the input is absent.
  static std::byte nothing[64];
  view.data = empty ? nothing : memory + base + start * size;
  return view;
}

void Executor::resolve() {
  for (std::size_t i = 0; i < values_.size(); ++i) views_[i] = resolve(values_[i]);
  for (Step& step : steps_) {
    for (std::size_t i = 0; i < step.in.size(); ++i) {
      const std::int64_t index = step.spec.inputs[i];
      step.in[i] = index < 0 ? Tensor() : views_[static_cast<std::size_t>(index)];
    }
    for (std::size_t i = 0; i < step.out.size(); ++i) {
      step.out[i] = views_[static_cast<std::size_t>(step.spec.outputs[i])];
    }
  }
}

void Executor::run(const Batch& batch, const std::int32_t* input_ids, const std::int32_t* logit_rows, std::int64_t upto,
                   const std::int32_t* adapters, std::int64_t choose_from) {
  const std::unique_lock lock(running_, std::try_to_lock);
  require(lock.owns_lock(), "the executor is already running a batch in another thread");
  check_batch(batch, logit_rows);
  const bool moved = copy_batch(batch, input_ids, logit_rows);
  set_adapters(adapters);
  if (moved) {
    try {
      resolve();
    } catch (...) {
      batch_.tokens = 0;  // nothing is resolved for this size
      throw;
    }
  }
  if (poison_) std::memset(arena_.data(), 0xff, arena_.size());
  const Awake awake(pool_);
  run_steps(0, upto);
  chosen_ = {};
  if (choose_from >= 0) choose(choose_from);
}

// Each thread looks at columns of all rows: those that it has just computed, in a product of few rows.
void Executor::choose(std::int64_t value) {
  const Tensor rows = view(value);
  require(
      rows.dtype == DType::f32 && rows.ndim == 2 && rows.shape[1] > 0 && (rows.stride[1] == 1 || rows.shape[1] == 1),
      "only of float32 [rows, columns], contiguous in columns, the largest are found");
  const auto count = static_cast<std::size_t>(rows.shape[0]), parts = static_cast<std::size_t>(pool_.size());
  std::vector<Largest> found(count * parts, Largest{0, -1});
  pool_.split(rows.shape[1], 16, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t r = 0; r < rows.shape[0]; ++r) {
      Largest& own = found[static_cast<std::size_t>(thread) * count + static_cast<std::size_t>(r)];
      own = largest(rows.as<const float>() + r * rows.stride[0] + begin, end - begin);
      own.index += static_cast<std::int32_t>(begin);
    }
  });
  for (std::size_t r = 0; r < count; ++r) {
    Largest best = found[r];
    for (std::size_t part = 1; part < parts; ++part) {
      const Largest& other = found[part * count + r];
      if (other.index >= 0 && other.key > best.key) best = other;
    }
    chosen_.first.push_back(best.index);
    chosen_.second.push_back(rows.as<const float>()[static_cast<std::int64_t>(r) * rows.stride[0] + best.index]);
  }
}

void Executor::resume(std::int64_t begin, std::int64_t upto) {
  const std::unique_lock lock(running_, std::try_to_lock);
  require(lock.owns_lock(), "the executor is already running a batch in another thread");
  require(batch_.tokens > 0, "no batch has been run");
  require(begin >= 0, "begin is negative");
  const Awake awake(pool_);
  run_steps(begin, upto);
}

void Executor::run_steps(std::int64_t begin, std::int64_t upto) {
  const std::int64_t end = std::min(static_cast<std::int64_t>(steps_.size()), upto);
  for (std::int64_t i = begin; i < end; ++i) run_step(static_cast<std::size_t>(i));
}

void Executor::run_step(std::size_t index) {
  Step& step = steps_[index];
  const std::int64_t begin = tracing_ ? now_ns() : 0;
  try {
    step.kernel->run({step.in, step.out, pool_, scratch_, batch_, kv_.cache()});
  } catch (const std::invalid_argument& error) {
    scratch_.reset();
    fail(place(step.spec) + error.what());
  } catch (...) {
    scratch_.reset();
    throw;
  }
  scratch_.reset();
  if (tracing_) times_.push_back({static_cast<std::int64_t>(index), begin, now_ns()});
}

Tensor Executor::view(std::int64_t value) const {
  require(value >= 0 && value < static_cast<std::int64_t>(views_.size()), "there is no such value");
  require(batch_.tokens > 0, "no batch has been run");
  return views_[static_cast<std::size_t>(value)];
}

}  // namespace llmc
