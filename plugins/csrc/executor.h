// Runs a plan: every step of the model natively, one call for each batch.
#pragma once
#include <mutex>
#include <utility>

#include "cpu_features.h"
#include "logits.h"
#include "memory.h"
#include "thread_pool.h"

namespace llmc {

// constant + tokens * T + rows * N, the form of every size in a plan.
struct Size {
  std::int64_t constant = 0, tokens = 0, rows = 0;
  std::int64_t at(std::int64_t t, std::int64_t n) const;
};

enum class Storage { arena, weight, batch };

// A view of the arena (base: byte offset), of a weight (base: its index), or of a batch input (base: 0 input_ids,
// 1 position_ids, 2 logit_rows, 3 and 4 the adapter of each token and of each logit row). Strides and offset in
// elements.
struct ValueSpec {
  std::string name;
  Storage storage = Storage::arena;
  std::int64_t base = 0;
  DType dtype = DType::f32;
  std::vector<Size> shape, strides;
  Size offset;
};

// inputs and outputs are indices of values; -1 is an absent optional input.
struct StepSpec {
  std::string op, module;
  std::vector<std::int64_t> inputs, outputs;
  std::map<std::string, Attributes::Value> attributes;
};

struct WeightBuffer {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct StepTime {
  std::int64_t step = 0, begin_ns = 0, end_ns = 0;
};

class Executor {
 public:
  // Makes every kernel; fails with the step that has none, or whose attributes are wrong. The weights stay the
  // caller's.
  Executor(std::vector<ValueSpec> values, std::vector<StepSpec> steps, std::size_t arena_bytes,
           std::vector<WeightBuffer> weights, KvMemory kv, int threads, const std::string& isa, bool poison);

  // Runs the steps before `upto` on a batch, whose arrays are copied first. With poison, the arena is filled with NaN.
  // adapters [S]: the LoRA adapter of each sequence, -1: none; null: no sequence has one. choose_from: the value [rows,
  // columns] of whose rows the largest numbers are wanted; -1: none. Fails, before anything is
  // written, if the batch contradicts itself or the cache, or a view leaves its memory.
  void run(const Batch& batch, const std::int32_t* input_ids, const std::int32_t* logit_rows, std::int64_t upto,
           const std::int32_t* adapters = nullptr, std::int64_t choose_from = -1);

  // Goes on with the last batch: the steps from `begin` to before `upto`.
  void resume(std::int64_t begin, std::int64_t upto);

  // Where the largest number of each row of `choose_from` stands, as of the last run, and that number.
  const std::pair<std::vector<std::int32_t>, std::vector<float>>& chosen() const { return chosen_; }

  // The view as of the last run.
  Tensor view(std::int64_t value) const;
  std::size_t steps() const { return steps_.size(); }
  KvMemory& kv() { return kv_; }

  void trace(bool on) { tracing_ = on; }
  std::vector<StepTime> take_times() { return std::exchange(times_, {}); }

 private:
  struct Step {
    StepSpec spec;
    std::unique_ptr<Kernel> kernel;
    std::vector<Tensor> in, out;
  };
  // The batch's arrays, kept so that views of them stay valid.
  struct Arrays {
    std::vector<std::int32_t> input_ids, position_ids, logit_rows, cu_seqlens, num_computed, block_tables, state_slots;
    std::vector<std::int32_t> adapters, row_adapters;
    std::vector<std::uint64_t> tree_mask;
  };

  void set_adapters(const std::int32_t* adapters);
  void check_batch(const Batch& batch, const std::int32_t* logit_rows) const;
  bool copy_batch(const Batch& batch, const std::int32_t* input_ids, const std::int32_t* logit_rows);
  void resolve();
  Tensor resolve(const ValueSpec& value);
  void run_steps(std::int64_t begin, std::int64_t upto);
  void run_step(std::size_t index);
  void choose(std::int64_t value);

  std::vector<ValueSpec> values_;
  std::vector<Step> steps_;
  std::vector<WeightBuffer> weights_;
  std::vector<Tensor> views_;
  Pages arena_;
  ScratchPages scratch_;
  KvMemory kv_;
  WorkerPool pool_;
  Batch batch_;
  Arrays arrays_;
  std::mutex running_;
  bool poison_ = false, tracing_ = false;
  std::vector<StepTime> times_;
  std::pair<std::vector<std::int32_t>, std::vector<float>> chosen_;
};

}  // namespace llmc
