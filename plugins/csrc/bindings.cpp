// The Python face of the kernels (plugins/kernels.py and runtime/devices/cpu.py use it); nothing below knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "ceilings.h"
#include "executor.h"
#include "logits.h"

namespace nb = nanobind;
using namespace llmc;

namespace {

template <class T, int N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Sizes = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

// (address or None for an absent input, dtype, shape, strides in elements); the caller keeps the memory.
using ViewArgument =
    std::optional<std::tuple<std::uintptr_t, std::string, std::vector<std::int64_t>, std::vector<std::int64_t>>>;
// (name, "arena" | "weight" | "batch", base, dtype, shape, strides, offset)
using ValueArgument =
    std::tuple<std::string, std::string, std::int64_t, std::string, std::vector<Sizes>, std::vector<Sizes>, Sizes>;
// (op, module, inputs, outputs, attributes)
using StepArgument =
    std::tuple<std::string, std::string, std::vector<std::int64_t>, std::vector<std::int64_t>, nb::dict>;

Tensor to_tensor(const ViewArgument& argument) {
  Tensor view;
  if (!argument) return view;
  const auto& [address, dtype, shape, strides] = *argument;
  require(shape.size() == strides.size() && shape.size() <= kMaxDims, "an array has more than 8 dimensions");
  view.data = reinterpret_cast<void*>(address);
  view.dtype = dtype_of(dtype);
  view.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  std::copy(strides.begin(), strides.end(), view.stride);
  return view;
}

std::vector<Tensor> to_tensors(const std::vector<ViewArgument>& arguments) {
  std::vector<Tensor> views;
  for (const ViewArgument& argument : arguments) views.push_back(to_tensor(argument));
  return views;
}

std::map<std::string, Attributes::Value> to_attributes(const nb::dict& values) {
  std::map<std::string, Attributes::Value> attributes;
  for (const auto& [key, value] : values) {
    auto& target = attributes[nb::cast<std::string>(key)];
    if (nb::isinstance<nb::bool_>(value)) {  // before int: a bool is one in Python
      target = nb::cast<bool>(value);
    } else if (nb::isinstance<nb::int_>(value)) {
      target = nb::cast<std::int64_t>(value);
    } else if (nb::isinstance<nb::float_>(value)) {
      target = nb::cast<double>(value);
    } else {
      target = nb::cast<std::string>(value);
    }
  }
  return attributes;
}

Size to_size(const Sizes& size) { return {std::get<0>(size), std::get<1>(size), std::get<2>(size)}; }

ValueSpec to_value(const ValueArgument& argument) {
  const auto& [name, storage, base, dtype, shape, strides, offset] = argument;
  ValueSpec value{name, Storage::arena, base, dtype_of(dtype), {}, {}, to_size(offset)};
  if (storage == "weight") {
    value.storage = Storage::weight;
  } else if (storage == "batch") {
    value.storage = Storage::batch;
  } else if (storage != "arena") {
    fail("value '" + name + "' has the unknown storage '" + storage + "'");
  }
  for (const Sizes& size : shape) value.shape.push_back(to_size(size));
  for (const Sizes& size : strides) value.strides.push_back(to_size(size));
  return value;
}

// What a batch consists of, in the order of the arguments of run().
struct BatchArguments {
  Array<std::int32_t, 1> position_ids, cu_seqlens, num_computed;
  Array<std::int32_t, 2> block_tables;
  std::optional<Array<std::uint64_t, 2>> tree_mask;
  std::optional<Array<std::int32_t, 1>> state_slots;

  Batch view(std::size_t rows) const {
    Batch batch;
    batch.tokens = static_cast<std::int64_t>(position_ids.shape(0));
    batch.rows = static_cast<std::int64_t>(rows);
    batch.sequences = static_cast<std::int64_t>(num_computed.shape(0));
    require(cu_seqlens.shape(0) == num_computed.shape(0) + 1, "cu_seqlens must have one entry more than num_computed");
    require(block_tables.shape(0) == num_computed.shape(0), "block_tables must have a row for each sequence");
    batch.position_ids = position_ids.data();
    batch.cu_seqlens = cu_seqlens.data();
    batch.num_computed = num_computed.data();
    batch.block_tables = block_tables.data();
    batch.max_blocks = static_cast<std::int64_t>(block_tables.shape(1));
    if (tree_mask) {
      require(tree_mask->shape(0) == position_ids.shape(0), "tree_mask must have a row for each token");
      batch.tree_mask = tree_mask->data();
      batch.tree_words = static_cast<std::int64_t>(tree_mask->shape(1));
      require(batch.tree_words >= 1, "tree_mask has no bits");
    }
    if (state_slots) {
      require(state_slots->shape(0) == num_computed.shape(0), "state_slots must have an entry for each sequence");
      batch.state_slots = state_slots->data();
    }
    return batch;
  }
};

nb::dlpack::dtype array_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return nb::dtype<float>();
    case DType::bf16:
      return nb::dtype<std::uint16_t>();  // numpy has none: the bits
    case DType::f16:
      return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    case DType::i32:
      return nb::dtype<std::int32_t>();
    case DType::i64:
      return nb::dtype<std::int64_t>();
    case DType::boolean:
      return nb::dtype<bool>();
    case DType::u8:
      return nb::dtype<std::uint8_t>();
  }
  fail("dtype out of range");
}

nb::ndarray<nb::numpy> to_array(const Tensor& view, nb::handle owner) {
  std::size_t shape[kMaxDims];
  for (int i = 0; i < view.ndim; ++i) shape[i] = static_cast<std::size_t>(view.shape[i]);
  return {view.data, static_cast<std::size_t>(view.ndim), shape, owner, view.stride, array_dtype(view.dtype)};
}

nb::dlpack::dtype kv_array_dtype(KvType type) {
  switch (type) {
    case KvType::f32:
      return array_dtype(DType::f32);
    case KvType::bf16:
      return array_dtype(DType::bf16);
    case KvType::f16:
      return array_dtype(DType::f16);
    default:
      return nb::dtype<std::uint8_t>();  // codes and scales
  }
}

// Keys or values of a slot as [blocks, bytes of a block / item size].
nb::ndarray<nb::numpy> slot_array(KvMemory& memory, std::int64_t index, bool keys, nb::handle owner) {
  require(index >= 0 && index < static_cast<std::int64_t>(memory.slots()), "there is no such KV slot");
  const KvSlot& slot = memory.cache().slots[static_cast<std::size_t>(index)];
  const nb::dlpack::dtype dtype = kv_array_dtype(slot.type);
  const std::size_t bytes = keys ? memory.key_bytes(slot) : memory.value_bytes(slot);
  const std::size_t shape[] = {static_cast<std::size_t>(memory.blocks()), bytes * 8 / dtype.bits};
  return {keys ? slot.keys : slot.values, 2, shape, owner, nullptr, dtype};
}

void move_positions(KvMemory& kv, const Array<std::int32_t, 1>& blocks, const Array<std::int32_t, 1>& sources,
                    const Array<std::int32_t, 1>& targets) {
  require(sources.shape(0) == targets.shape(0), "as many sources as targets are needed");
  const nb::gil_scoped_release unlocked;
  kv.move_positions(blocks.data(), static_cast<std::int64_t>(blocks.shape(0)), sources.data(), targets.data(),
                    static_cast<std::int64_t>(sources.shape(0)));
}

// Keeps the buffers of the weights alive.
struct PyExecutor {
  std::vector<Array<std::uint8_t, 1>> weights;
  std::unique_ptr<Executor> executor;
};

void make_executor(PyExecutor* self, const std::vector<ValueArgument>& values, const std::vector<StepArgument>& steps,
                   std::size_t arena_bytes, std::vector<Array<std::uint8_t, 1>> weights,
                   const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>& kv_slots,
                   const std::string& kv_dtype, std::int64_t block_size, std::int64_t blocks, int threads,
                   const std::string& isa, bool poison) {
  std::vector<ValueSpec> value_specs;
  for (const ValueArgument& value : values) value_specs.push_back(to_value(value));
  std::vector<StepSpec> step_specs;
  for (const auto& [op, module, inputs, outputs, attributes] : steps) {
    step_specs.push_back({op, module, inputs, outputs, to_attributes(attributes)});
  }
  std::vector<WeightBuffer> buffers;
  for (const auto& weight : weights) {
    buffers.push_back({reinterpret_cast<const std::byte*>(weight.data()), weight.size()});
  }
  std::vector<KvShape> shapes;
  for (const auto& [heads, key_dim, value_dim] : kv_slots) shapes.push_back({heads, key_dim, value_dim});
  KvMemory kv(shapes, kv_type_of(kv_dtype), block_size, blocks);
  new (self) PyExecutor{std::move(weights),
                        std::make_unique<Executor>(std::move(value_specs), std::move(step_specs), arena_bytes,
                                                   std::move(buffers), std::move(kv), threads, isa, poison)};
}

void run_executor(PyExecutor& self, const Array<std::int32_t, 1>& input_ids, const Array<std::int32_t, 1>& logit_rows,
                  const BatchArguments& arguments, std::int64_t upto,
                  const std::optional<Array<std::int32_t, 1>>& adapters, std::int64_t choose_from) {
  require(input_ids.shape(0) == arguments.position_ids.shape(0), "input_ids and position_ids differ in length");
  const Batch batch = arguments.view(logit_rows.shape(0));
  require(!adapters || static_cast<std::int64_t>(adapters->shape(0)) == batch.sequences,
          "adapters must have an entry for each sequence");
  const std::int32_t* adapter_of = adapters ? adapters->data() : nullptr;
  const nb::gil_scoped_release unlocked;
  self.executor->run(batch, input_ids.data(), logit_rows.data(), upto, adapter_of, choose_from);
}

void run_op(const std::string& op, const std::vector<ViewArgument>& inputs, const std::vector<ViewArgument>& outputs,
            const nb::dict& attributes, const std::string& isa, int threads, const BatchArguments* arguments,
            KvMemory* kv) {
  try {
    const auto kernel = make_kernel(op, isa, Attributes(to_attributes(attributes)));
    const std::vector<Tensor> in = to_tensors(inputs), out = to_tensors(outputs);
    const Batch batch = arguments ? arguments->view(0) : Batch{};
    const nb::gil_scoped_release unlocked;
    WorkerPool pool(threads);
    ScratchPages scratch(true);  // tests run here: what is read without having been written shows
    KvCache none;
    const Awake awake(pool);
    kernel->run({in, out, pool, scratch, batch, kv ? kv->cache() : none});
  } catch (const std::invalid_argument& error) {
    fail("llmc::" + op + ": " + error.what());
  }
}

void bind_executor(nb::module_& m) {
  nb::class_<PyExecutor>(m, "Executor")
      .def("__init__", &make_executor, nb::arg("values"), nb::arg("steps"), nb::arg("arena_bytes"), nb::arg("weights"),
           nb::arg("kv_slots"), nb::arg("kv_dtype"), nb::arg("block_size"), nb::arg("blocks"), nb::arg("threads"),
           nb::arg("isa"), nb::arg("poison"))
      .def("run", &run_executor, nb::arg("input_ids"), nb::arg("logit_rows"), nb::arg("batch"), nb::arg("upto"),
           nb::arg("adapters").none() = nb::none(), nb::arg("choose_from") = -1)
      .def("chosen", [](const PyExecutor& self) { return self.executor->chosen(); })
      .def(
          "resume", [](PyExecutor& self, std::int64_t begin, std::int64_t upto) { self.executor->resume(begin, upto); },
          nb::arg("begin"), nb::arg("upto"), nb::call_guard<nb::gil_scoped_release>())
      .def("view", [](nb::handle_t<PyExecutor> self,
                      std::int64_t value) { return to_array(nb::cast<PyExecutor&>(self).executor->view(value), self); })
      .def("copy_block", [](PyExecutor& self, std::int64_t source,
                            std::int64_t target) { self.executor->kv().copy_block(source, target); })
      .def(
          "move_positions",
          [](PyExecutor& self, const Array<std::int32_t, 1>& blocks, const Array<std::int32_t, 1>& sources,
             const Array<std::int32_t, 1>& targets) { move_positions(self.executor->kv(), blocks, sources, targets); },
          nb::arg("blocks"), nb::arg("sources"), nb::arg("targets"))
      .def("poison_block", [](PyExecutor& self, std::int64_t block) { self.executor->kv().poison_block(block); })
      .def("keys",
           [](nb::handle_t<PyExecutor> self, std::int64_t slot) {
             return slot_array(nb::cast<PyExecutor&>(self).executor->kv(), slot, true, self);
           })
      .def("values",
           [](nb::handle_t<PyExecutor> self, std::int64_t slot) {
             return slot_array(nb::cast<PyExecutor&>(self).executor->kv(), slot, false, self);
           })
      .def("trace", [](PyExecutor& self, bool on) { self.executor->trace(on); })
      .def("take_times", [](PyExecutor& self) {
        std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> times;
        for (const StepTime& time : self.executor->take_times())
          times.emplace_back(time.step, time.begin_ns, time.end_ns);
        return times;
      });
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const std::invalid_argument& error) {
      const nb::object type = nb::module_::import_("llmc.errors").attr("KernelError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });
  m.def("isas", &supported_isas);
  m.def("ops", &known_ops);
  m.def(
      "ceilings",
      [](int threads, std::size_t bytes) {
        WorkerPool pool(threads);
        return measure_ceilings(pool, bytes);
      },
      nb::arg("threads"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "draw_token",
      [](const Array<float, 1>& scores, float highest, float temperature, float least, double draw) {
        return draw_token(scores.data(), static_cast<std::int64_t>(scores.size()), highest, temperature, least, draw);
      },
      nb::arg("scores"), nb::arg("highest"), nb::arg("temperature"), nb::arg("least"), nb::arg("draw"));
  nb::class_<BatchArguments>(m, "Batch")
      .def(nb::init<Array<std::int32_t, 1>, Array<std::int32_t, 1>, Array<std::int32_t, 1>, Array<std::int32_t, 2>,
                    std::optional<Array<std::uint64_t, 2>>, std::optional<Array<std::int32_t, 1>>>(),
           nb::arg("position_ids"), nb::arg("cu_seqlens"), nb::arg("num_computed"), nb::arg("block_tables"),
           nb::arg("tree_mask").none() = nb::none(), nb::arg("state_slots").none() = nb::none());
  nb::class_<KvMemory>(m, "Kv")
      .def(
          "__init__",
          [](KvMemory* self, const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>& slots,
             const std::string& dtype, std::int64_t block_size, std::int64_t blocks) {
            std::vector<KvShape> shapes;
            for (const auto& [heads, key_dim, value_dim] : slots) shapes.push_back({heads, key_dim, value_dim});
            new (self) KvMemory(shapes, kv_type_of(dtype), block_size, blocks);
          },
          nb::arg("slots"), nb::arg("dtype"), nb::arg("block_size"), nb::arg("blocks"))
      .def("keys", [](nb::handle_t<KvMemory> self,
                      std::int64_t slot) { return slot_array(nb::cast<KvMemory&>(self), slot, true, self); })
      .def("values", [](nb::handle_t<KvMemory> self,
                        std::int64_t slot) { return slot_array(nb::cast<KvMemory&>(self), slot, false, self); })
      .def("copy_block", &KvMemory::copy_block, nb::arg("source"), nb::arg("target"))
      .def("move_positions", &move_positions, nb::arg("blocks"), nb::arg("sources"), nb::arg("targets"))
      .def("poison_block", &KvMemory::poison_block, nb::arg("block"));
  m.def("run_op", &run_op, nb::arg("op"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("attributes"), nb::arg("isa"),
        nb::arg("threads"), nb::arg("batch").none(), nb::arg("kv").none());
  bind_executor(m);
}
