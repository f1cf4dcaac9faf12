// What a kernel sees, and how it gets into the table: no Python and no torch below bindings.cpp.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "kv_layout.h"

namespace llmc {

enum class DType : std::uint8_t { f32, bf16, f16, i32, i64, boolean, u8 };

constexpr int kMaxDims = 8;

// A strided view. Strides are in elements; a stride of 0 broadcasts. An absent optional input has data == nullptr.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = 0;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t stride[kMaxDims] = {};

  explicit operator bool() const { return data != nullptr; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
};

// Attributes of a step. Every one has to be read by the kernel's constructor; the executor refuses leftovers.
class Attributes {
 public:
  using Value = std::variant<std::int64_t, double, std::string, bool>;
  explicit Attributes(std::map<std::string, Value> values) : values_(std::move(values)) {}
  std::int64_t integer(const std::string& name) const;
  double real(const std::string& name) const;
  bool flag(const std::string& name) const;
  const std::string& text(const std::string& name) const;
  // What an attribute is if a plan leaves it out (stored_attributes of plugins/op.py).
  std::int64_t integer(const std::string& name, std::int64_t otherwise) const;
  std::string text(const std::string& name, const char* otherwise) const;
  std::vector<std::string> unread() const;

 private:
  const Value& get(const std::string& name) const;
  std::map<std::string, Value> values_;
  mutable std::map<std::string, bool> read_;
};

// What is known of the step's sequences, for the ops that mix rows (attention, and recurrent ops later). Rows of
// sequence s are cu_seqlens[s] .. cu_seqlens[s + 1]; its row r has absolute slot num_computed[s] + r in the cache.
// position_ids differ from slots only under a tree mask.
struct Batch {
  std::int64_t tokens = 0;           // T
  std::int64_t rows = 0;             // N, logit rows
  std::int64_t sequences = 0;        // S
  const std::int32_t* position_ids;  // [T]
  const std::int32_t* cu_seqlens;    // [S + 1]
  const std::int32_t* num_computed;  // [S] tokens of the sequence that are in the cache before this step
  const std::int32_t* block_tables;  // [S, max_blocks]
  std::int64_t max_blocks = 0;
  const std::uint64_t* tree_mask =
      nullptr;  // [T, tree_words]: bit j of row r: new row j of the sequence is an ancestor or r itself
  std::int64_t tree_words = 0;
  const std::int32_t* state_slots = nullptr;  // [S] per-sequence state of recurrent ops
};

// The paged cache of one attention slot: pages [blocks, kv_heads, block / 16] of keys and of values (kv_layout.h).
struct KvSlot {
  std::byte* keys = nullptr;
  std::byte* values = nullptr;
  KvType type = KvType::f32;
  std::int64_t kv_heads = 0, key_dim = 0, value_dim = 0;
};

struct KvCache {
  std::int64_t block_size = 16;
  std::int64_t blocks = 0;
  std::vector<KvSlot> slots;
};

// Persistent threads. parallel() returns when every part is done. Parts are numbered; which thread runs which part
// never changes a result, since threads split outputs and never sums.
class ThreadPool {
 public:
  virtual ~ThreadPool() = default;
  virtual int size() const = 0;
  // Runs body(thread) once for each thread = 0 .. size() - 1, at the same time if the system lets it: a number for its
  // scratch memory, not which thread of the system it is. The caller runs some of them.
  virtual void run(void (*body)(void* data, int thread), void* data) = 0;

  template <class F>
  void on_all(F&& f) {
    run([](void* d, int thread) { (*static_cast<std::remove_reference_t<F>*>(d))(thread); }, &f);
  }
  // Splits [0, count) into one contiguous range per thread, each a multiple of grain: f(begin, end, thread).
  template <class F>
  void split(std::int64_t count, std::int64_t grain, F&& f) {
    const std::int64_t units = (count + grain - 1) / grain;
    const int threads = static_cast<int>(std::min<std::int64_t>(size(), units));
    if (threads <= 1) {
      if (count > 0) f(std::int64_t{0}, count, 0);
      return;
    }
    on_all([&](int thread) {
      if (thread >= threads) return;
      const std::int64_t begin = std::min(count, units * thread / threads * grain);
      const std::int64_t end = std::min(count, units * (thread + 1) / threads * grain);
      if (begin < end) f(begin, end, thread);
    });
  }
  // The same ranges of grain, taken by whichever thread is free: f(begin, end, thread). For long work on machines where
  // threads lose time to others.
  template <class F>
  void share(std::int64_t count, std::int64_t grain, F&& f) {
    if (size() <= 1 || count <= grain) {
      if (count > 0) f(std::int64_t{0}, count, 0);
      return;
    }
    std::atomic<std::int64_t> next{0};
    on_all([&](int thread) {
      for (;;) {
        const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= count) return;
        f(begin, std::min(count, begin + grain), thread);
      }
    });
  }
};

// Memory that lasts until the kernel's run() returns; 64-byte aligned. Grows on the first large steps, then never
// again. get() belongs to the thread that called run(), outside of parallel sections.
class Scratch {
 public:
  virtual ~Scratch() = default;
  virtual void* get(std::size_t bytes) = 0;
  template <class T>
  T* array(std::int64_t count) {
    return static_cast<T*>(get(static_cast<std::size_t>(count) * sizeof(T)));
  }
};

struct Context {
  std::span<const Tensor> in;
  std::span<const Tensor> out;
  ThreadPool& pool;
  Scratch& scratch;
  const Batch& batch;
  KvCache& kv;
};

// One step of a plan: the constructor reads the attributes once, run() is called at each step of the model.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void run(const Context& context) = 0;
};

using KernelMaker = std::unique_ptr<Kernel> (*)(const Attributes&);

// kernel_table()[isa][op]. An op that has no kernel of a level uses that of the next lower one.
std::map<std::string, std::map<std::string, KernelMaker>>& kernel_table();

struct Registration {
  Registration(const char* isa, const char* op, KernelMaker maker) { kernel_table()[isa].emplace(op, maker); }
};

// Argument errors: what, where. Thrown before anything is written.
[[noreturn]] void fail(const std::string& message);
inline void require(bool condition, const char* message) {
  if (!condition) fail(message);
}

}  // namespace llmc

#define LLMC_STRING_(x) #x
#define LLMC_STRING(x) LLMC_STRING_(x)

// In rope_cpu.cpp, inside namespace llmc::LLMC_ISA { class Rope : public Kernel { public: explicit Rope(const
// Attributes&); ... }; } LLMC_KERNEL(rope, Rope)
#define LLMC_KERNEL(op, type)                                                                       \
  namespace llmc::LLMC_ISA {                                                                        \
  static const Registration op##_entry{LLMC_STRING(LLMC_ISA), #op, [](const Attributes& a) {        \
                                         return std::unique_ptr<Kernel>(std::make_unique<type>(a)); \
                                       }};                                                          \
  }
