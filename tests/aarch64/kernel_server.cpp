// Runs kernels and plans for tests on another machine: requests on standard input, answers on standard output, each a
// frame of its length (int64) and so many bytes. remote_kernels.py is the other side, and has the order of the fields.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

#include "executor.h"

namespace {

using namespace llmc;
using Bytes = std::span<const std::byte>;

void read_all(void* data, std::size_t bytes) {
  if (std::fread(data, 1, bytes, stdin) != bytes) std::_Exit(0);  // the other side has gone
}

class Request {
 public:
  Request() {
    std::int64_t bytes = 0;
    read_all(&bytes, 8);
    frame_.resize(static_cast<std::size_t>(bytes));
    read_all(frame_.data(), frame_.size());
  }

  template <class T = std::int64_t>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  Bytes bytes() { return take(static_cast<std::size_t>(number())); }
  std::string text() {
    const Bytes b = bytes();
    return {reinterpret_cast<const char*>(b.data()), b.size()};
  }
  template <class T>
  std::vector<T> array() {
    const Bytes b = bytes();
    std::vector<T> values(b.size() / sizeof(T));
    std::copy(b.begin(), b.end(), reinterpret_cast<std::byte*>(values.data()));
    return values;
  }
  template <class F>
  auto list(F&& item) {
    std::vector<decltype(item())> items;
    for (std::int64_t n = number(); n > 0; --n) items.push_back(item());
    return items;
  }

 private:
  Bytes take(std::size_t bytes) {
    require(bytes <= frame_.size() - at_, "the request ends too early");
    at_ += bytes;
    return {frame_.data() + at_ - bytes, bytes};
  }

  std::vector<std::byte> frame_;
  std::size_t at_ = 0;
};

class Answer {
 public:
  void number(std::int64_t value) { append(&value, 8); }
  void bytes(const void* data, std::size_t count) {
    number(static_cast<std::int64_t>(count));
    append(data, count);
  }
  void text(const std::string& value) { bytes(value.data(), value.size()); }
  void texts(const std::vector<std::string>& values) {
    number(static_cast<std::int64_t>(values.size()));
    for (const std::string& value : values) text(value);
  }
  void send() const {
    const auto size = static_cast<std::int64_t>(frame_.size());
    std::fwrite(&size, 1, 8, stdout);
    std::fwrite(frame_.data(), 1, frame_.size(), stdout);
    std::fflush(stdout);
  }

 private:
  void append(const void* data, std::size_t count) {
    const auto* from = static_cast<const std::byte*>(data);
    frame_.insert(frame_.end(), from, from + count);
  }

  std::vector<std::byte> frame_;
};

// A copy of bytes between two pages that can't be touched, at the first or at the second of them.
class Guarded {
 public:
  Guarded(Bytes bytes, bool at_end) : size_(bytes.size()) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    room_ = (std::max<std::size_t>(size_, 1) + page - 1) / page * page;
    total_ = room_ + 2 * page;
    void* memory = mmap(nullptr, total_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    all_ = static_cast<std::byte*>(memory);
    inner_ = all_ + page;
    protect(PROT_READ | PROT_WRITE);
    data_ = inner_ + (at_end ? room_ - size_ : 0);
    std::copy(bytes.begin(), bytes.end(), data_);
  }
  Guarded(Guarded&& other) noexcept
      : all_(std::exchange(other.all_, nullptr)),
        inner_(other.inner_),
        data_(other.data_),
        size_(other.size_),
        room_(other.room_),
        total_(other.total_) {}
  ~Guarded() {
    if (all_ != nullptr) munmap(all_, total_);
  }
  void protect(int rights) {
    if (mprotect(inner_, room_, rights) != 0) throw std::bad_alloc();
  }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte *all_ = nullptr, *inner_ = nullptr, *data_ = nullptr;
  std::size_t size_, room_ = 0, total_ = 0;
};

std::map<std::string, Attributes::Value> read_attributes(Request& in) {
  std::map<std::string, Attributes::Value> attributes;
  for (std::int64_t n = in.number(); n > 0; --n) {
    auto& value = attributes[in.text()];
    const std::string kind = in.text();
    if (kind == "bool") value = in.number() != 0;
    if (kind == "int") value = in.number();
    if (kind == "float") value = in.number<double>();
    if (kind == "str") value = in.text();
  }
  return attributes;
}

Tensor read_tensor(Request& in, std::vector<Guarded>& memory, bool at_end, bool writable) {
  Tensor tensor;
  if (in.number() == 0) return tensor;
  tensor.dtype = dtype_of(in.text());
  const auto shape = in.array<std::int64_t>(), stride = in.array<std::int64_t>();
  require(shape.size() <= kMaxDims, "an array has more than 8 dimensions");
  tensor.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  std::copy(stride.begin(), stride.end(), tensor.stride);
  const auto offset = static_cast<std::size_t>(in.number());
  memory.emplace_back(in.bytes(), at_end);
  if (!writable) memory.back().protect(PROT_READ);
  tensor.data = memory.back().data() + offset;
  return tensor;
}

struct BatchArrays {
  std::vector<std::int32_t> position_ids, cu_seqlens, num_computed, block_tables, state_slots;
  std::vector<std::uint64_t> tree_mask;
  Batch batch;

  BatchArrays(Request& in, std::int64_t rows) {
    position_ids = in.array<std::int32_t>();
    cu_seqlens = in.array<std::int32_t>();
    num_computed = in.array<std::int32_t>();
    block_tables = in.array<std::int32_t>();
    tree_mask = in.array<std::uint64_t>();
    state_slots = in.array<std::int32_t>();
    batch.tokens = static_cast<std::int64_t>(position_ids.size());
    batch.rows = rows;
    batch.sequences = static_cast<std::int64_t>(num_computed.size());
    require(cu_seqlens.size() == num_computed.size() + 1, "cu_seqlens must have one entry more than num_computed");
    batch.position_ids = position_ids.data();
    batch.cu_seqlens = cu_seqlens.data();
    batch.num_computed = num_computed.data();
    batch.block_tables = block_tables.data();
    if (batch.sequences > 0) batch.max_blocks = static_cast<std::int64_t>(block_tables.size()) / batch.sequences;
    if (!tree_mask.empty()) {
      batch.tree_mask = tree_mask.data();
      batch.tree_words = static_cast<std::int64_t>(tree_mask.size()) / batch.tokens;
    }
    if (!state_slots.empty()) batch.state_slots = state_slots.data();
  }
};

KvMemory read_kv(Request& in) {
  const auto shapes = in.list([&] {
    const std::int64_t heads = in.number(), key_dim = in.number();
    return KvShape{heads, key_dim, in.number()};
  });
  const KvType type = kv_type_of(in.text());
  const std::int64_t block_size = in.number();
  return KvMemory(shapes, type, block_size, in.number());
}

Bytes slot_bytes(KvMemory& kv, std::size_t index, bool keys) {
  const KvSlot& slot = kv.cache().slots.at(index);
  const std::size_t block = keys ? kv.key_bytes(slot) : kv.value_bytes(slot);
  return {keys ? slot.keys : slot.values, block * static_cast<std::size_t>(kv.blocks())};
}

void run_op(Request& in, Answer& out) {
  static int calls = 0;
  const bool at_end = ++calls % 3 != 0;
  const std::string op = in.text(), isa = in.text();
  try {
    const int threads = static_cast<int>(in.number());
    const auto kernel = make_kernel(op, isa, Attributes(read_attributes(in)));
    std::vector<Guarded> memory, results;
    const auto inputs = in.list([&] { return read_tensor(in, memory, at_end, false); });
    const auto outputs = in.list([&] { return read_tensor(in, results, at_end, true); });
    const BatchArrays batch(in, 0);
    std::vector<KvMemory> kv;
    if (in.number() != 0) kv.push_back(read_kv(in));
    for (KvMemory& one : kv) {
      for (std::size_t i = 0; i < 2 * one.slots(); ++i) {
        const Bytes from = in.bytes(), to = slot_bytes(one, i / 2, i % 2 == 0);
        require(from.size() == to.size(), "a slot of the cache has another size");
        std::copy(from.begin(), from.end(), const_cast<std::byte*>(to.data()));
      }
    }
    WorkerPool pool(threads);
    ScratchPages scratch(true);
    KvCache none;
    const Awake awake(pool);
    kernel->run({inputs, outputs, pool, scratch, batch.batch, kv.empty() ? none : kv[0].cache()});
    out.text("");
    for (const Guarded& one : results) out.bytes(one.data(), one.size());
    for (KvMemory& one : kv) {
      for (std::size_t i = 0; i < 2 * one.slots(); ++i) {
        const Bytes bytes = slot_bytes(one, i / 2, i % 2 == 0);
        out.bytes(bytes.data(), bytes.size());
      }
    }
  } catch (const std::invalid_argument& error) {
    fail("llmc::" + op + ": " + error.what());
  }
}

// An executor with its weights.
struct Run {
  std::vector<Guarded> memory;
  std::unique_ptr<Executor> executor;

  explicit Run(Request& in) {
    const auto size = [&] {
      const std::int64_t constant = in.number(), tokens = in.number();
      return Size{constant, tokens, in.number()};
    };
    auto values = in.list([&] {
      ValueSpec value;
      value.name = in.text();
      const std::string storage = in.text();
      value.storage = storage == "weight" ? Storage::weight : storage == "batch" ? Storage::batch : Storage::arena;
      value.base = in.number();
      value.dtype = dtype_of(in.text());
      value.shape = in.list(size);
      value.strides = in.list(size);
      value.offset = size();
      return value;
    });
    auto steps = in.list([&] {
      StepSpec step;
      step.op = in.text();
      step.module = in.text();
      step.inputs = in.array<std::int64_t>();
      step.outputs = in.array<std::int64_t>();
      step.attributes = read_attributes(in);
      return step;
    });
    const auto arena = static_cast<std::size_t>(in.number());
    const auto buffers = in.list([&] {
      memory.emplace_back(in.bytes(), false);
      memory.back().protect(PROT_READ);
      return WeightBuffer{memory.back().data(), memory.back().size()};
    });
    KvMemory kv = read_kv(in);
    const int threads = static_cast<int>(in.number());
    const std::string isa = in.text();
    executor = std::make_unique<Executor>(std::move(values), std::move(steps), arena, buffers, std::move(kv), threads,
                                          isa, in.number() != 0);
  }
};

void run_plan(Executor& executor, Request& in) {
  const auto ids = in.array<std::int32_t>(), rows = in.array<std::int32_t>();
  const BatchArrays batch(in, static_cast<std::int64_t>(rows.size()));
  const std::int64_t upto = in.number();
  const auto adapters = in.array<std::int32_t>();
  const auto* const chosen_adapters = adapters.empty() ? nullptr : adapters.data();
  executor.run(batch.batch, ids.data(), rows.data(), upto, chosen_adapters, in.number());
}

void send_chosen(const Executor& executor, Answer& out) {
  const auto& [tokens, largest] = executor.chosen();
  out.bytes(tokens.data(), tokens.size() * sizeof tokens[0]);
  out.bytes(largest.data(), largest.size() * sizeof largest[0]);
}

void send_view(const Executor& executor, std::int64_t value, Answer& out) {
  const Tensor view = executor.view(value);
  std::size_t last = 0;
  for (int i = 0; i < view.ndim; ++i) last += static_cast<std::size_t>((view.shape[i] - 1) * view.stride[i]);
  const auto dims = static_cast<std::size_t>(view.ndim) * 8;
  out.text(dtype_name(view.dtype));
  out.bytes(view.shape, dims);
  out.bytes(view.stride, dims);
  out.bytes(view.data, view.numel() == 0 ? 0 : (last + 1) * item_size(view.dtype));
}

void serve(Request& in, Answer& out) {
  static std::map<std::int64_t, Run> runs;
  static std::int64_t made = 0;
  const std::string command = in.text();
  if (command == "run_op") return run_op(in, out);
  if (command == "executor") {
    runs.emplace(++made, Run(in));
    out.text("");
    return out.number(made);
  }
  if (command == "names") {
    out.text("");
    out.texts(supported_isas());
    return out.texts(known_ops());
  }
  const std::int64_t number = in.number();
  Executor& executor = *runs.at(number).executor;
  if (command == "run") run_plan(executor, in);
  if (command == "copy_block") {
    const std::int64_t source = in.number();
    executor.kv().copy_block(source, in.number());
  }
  if (command == "poison_block") executor.kv().poison_block(in.number());
  if (command == "drop") runs.erase(number);
  out.text("");
  if (command == "view") send_view(executor, in.number(), out);
  if (command == "chosen") send_chosen(executor, out);
}

}  // namespace

int main() {
  for (;;) {
    Request request;
    Answer answer;
    try {
      serve(request, answer);
    } catch (const std::exception& error) {
      answer = Answer();
      const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
      answer.text(memory ? std::string("no memory") : error.what());
    }
    answer.send();
  }
}
