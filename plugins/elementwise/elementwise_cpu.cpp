// A function of one to three strided views of one shape. Runs of up to 512 elements are made contiguous where they are
// not, so that each function is one loop over arrays; a value is the same wherever in a run it stands.
#include <cmath>
#include <limits>
#include <type_traits>

#include "convert.h"
#include "strided.h"

namespace llmc::LLMC_ISA {
namespace {

constexpr std::int64_t kRun = 512;
constexpr int kInputs = 3;

// in and out are contiguous.
using Body = void (*)(const void* const* in, void* out, std::int64_t n);

// The loops, made from the function of one element (a lambda without captures).
template <class T, class R, class F>
constexpr Body map1(F) {
  return [](const void* const* in, void* out, std::int64_t n) {
    const T* a = static_cast<const T*>(in[0]);
    R* y = static_cast<R*>(out);
    for (std::int64_t i = 0; i < n; ++i) y[i] = F{}(a[i]);
  };
}

template <class T, class R, class F>
constexpr Body map2(F) {
  return [](const void* const* in, void* out, std::int64_t n) {
    const T *a = static_cast<const T*>(in[0]), *b = static_cast<const T*>(in[1]);
    R* y = static_cast<R*>(out);
    for (std::int64_t i = 0; i < n; ++i) y[i] = F{}(a[i], b[i]);
  };
}

template <class F>
constexpr Body map_vectors(F) {
  return [](const void* const* in, void* out, std::int64_t n) {
    const float* a = static_cast<const float*>(in[0]);
    float* y = static_cast<float*>(out);
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, F{}(load(a + i)));
    if (i < n) store(y + i, F{}(load(a + i, static_cast<int>(n - i))), static_cast<int>(n - i));
  };
}

template <class T>
void pick(const void* const* in, void* out, std::int64_t n) {
  const std::uint8_t* c = static_cast<const std::uint8_t*>(in[0]);
  const T *a = static_cast<const T*>(in[1]), *b = static_cast<const T*>(in[2]);
  T* y = static_cast<T*>(out);
  for (std::int64_t i = 0; i < n; ++i) y[i] = c[i] ? a[i] : b[i];
}

struct Entry {
  const char* name;
  Body body;
};

Body find(std::span<const Entry> table, const std::string& name) {
  for (const Entry& entry : table) {
    if (name == entry.name) return entry.body;
  }
  return nullptr;
}

// f32 -> f32
constexpr Entry kFloat1[] = {
    {"neg", map1<float, float>([](float a) { return -a; })},
    {"abs", map1<float, float>([](float a) { return std::fabs(a); })},
    {"reciprocal", map1<float, float>([](float a) { return 1.0f / a; })},
    {"log", map1<float, float>([](float a) { return std::log(a); })},
    {"log1p", map1<float, float>([](float a) { return std::log1p(a); })},
    {"expm1", map1<float, float>([](float a) { return std::expm1(a); })},
    {"sin", map1<float, float>([](float a) { return std::sin(a); })},
    {"cos", map1<float, float>([](float a) { return std::cos(a); })},
    {"sign", map1<float, float>([](float a) { return static_cast<float>((a > 0) - (a < 0)); })},
    {"softplus", map1<float, float>([](float a) { return a > 20.0f ? a : std::log1p(std::exp(a)); })},
    {"sqrt", map_vectors([](f32x16 a) { return sqrt(a); })},
    {"rsqrt", map_vectors([](f32x16 a) { return broadcast(1.0f) / sqrt(a); })},
    {"floor", map_vectors([](f32x16 a) { return floor(a); })},
    {"ceil", map_vectors([](f32x16 a) { return ceil(a); })},
    {"trunc", map_vectors([](f32x16 a) { return trunc(a); })},
    {"round", map_vectors([](f32x16 a) { return round_even(a); })},
    {"exp", map_vectors([](f32x16 a) { return exp(a); })},
    {"tanh", map_vectors([](f32x16 a) { return tanh(a); })},
    {"erf", map_vectors([](f32x16 a) { return erf(a); })},
    {"sigmoid", map_vectors([](f32x16 a) { return sigmoid(a); })},
    {"relu", map_vectors([](f32x16 a) { return relu(a); })},
    {"relu2", map_vectors([](f32x16 a) { return relu(a) * relu(a); })},
    {"silu", map_vectors([](f32x16 a) { return silu(a); })},
    {"gelu", map_vectors([](f32x16 a) { return gelu(a); })},
    {"gelu_tanh", map_vectors([](f32x16 a) { return gelu_tanh(a); })},
    {"quick_gelu", map_vectors([](f32x16 a) { return quick_gelu(a); })},
};

// f32, f32 -> f32; max and min pass NaN on
constexpr Entry kFloat2[] = {
    {"add", map2<float, float>([](float a, float b) { return a + b; })},
    {"sub", map2<float, float>([](float a, float b) { return a - b; })},
    {"mul", map2<float, float>([](float a, float b) { return a * b; })},
    {"div", map2<float, float>([](float a, float b) { return a / b; })},
    {"max", map2<float, float>([](float a, float b) { return a > b || a != a ? a : b; })},
    {"min", map2<float, float>([](float a, float b) { return a < b || a != a ? a : b; })},
    {"pow", map2<float, float>([](float a, float b) { return std::pow(a, b); })},
    {"fmod", map2<float, float>([](float a, float b) { return std::fmod(a, b); })},
    {"mod", map2<float, float>([](float a, float b) {
       const float r = std::fmod(a, b);
       return r != 0 && (r < 0) != (b < 0) ? r + b : r;
     })},
};

// Integers wrap around; what has no value (a division by zero) is 0.
template <class T>
constexpr auto wrapping(T a) {
  return static_cast<std::make_unsigned_t<T>>(a);
}
template <class T>
constexpr T remainder(T a, T b) {
  return b == 0 || b == -1 ? T{0} : static_cast<T>(a % b);
}
template <class T>
constexpr T power(T base, T exponent) {
  if (exponent < 0) return base == 1 ? T{1} : base == -1 ? (exponent % 2 ? T{-1} : T{1}) : T{0};
  auto result = wrapping(T{1}), square = wrapping(base);
  for (; exponent > 0; exponent >>= 1, square *= square) {
    if (exponent & 1) result *= square;
  }
  return static_cast<T>(result);
}

template <class T>
constexpr Entry kInteger1[] = {
    {"neg", map1<T, T>([](T a) { return static_cast<T>(0 - wrapping(a)); })},
    {"abs", map1<T, T>([](T a) { return a < 0 ? static_cast<T>(0 - wrapping(a)) : a; })},
    {"sign", map1<T, T>([](T a) { return static_cast<T>((a > 0) - (a < 0)); })},
    {"relu", map1<T, T>([](T a) { return a > 0 ? a : T{0}; })},
};

template <class T>
constexpr Entry kInteger2[] = {
    {"add", map2<T, T>([](T a, T b) { return static_cast<T>(wrapping(a) + wrapping(b)); })},
    {"sub", map2<T, T>([](T a, T b) { return static_cast<T>(wrapping(a) - wrapping(b)); })},
    {"mul", map2<T, T>([](T a, T b) { return static_cast<T>(wrapping(a) * wrapping(b)); })},
    {"div", map2<T, T>([](T a, T b) { return b == 0    ? T{0}
                                             : b == -1 ? static_cast<T>(0 - wrapping(a))
                                                       : T(a / b); })},
    {"max", map2<T, T>([](T a, T b) { return a > b ? a : b; })},
    {"min", map2<T, T>([](T a, T b) { return a < b ? a : b; })},
    {"pow", map2<T, T>([](T a, T b) { return power(a, b); })},
    {"fmod", map2<T, T>([](T a, T b) { return remainder(a, b); })},
    {"mod", map2<T, T>([](T a, T b) {
       const T r = remainder(a, b);
       return static_cast<T>(r != 0 && (r < 0) != (b < 0) ? r + b : r);
     })},
};

template <class T>
constexpr Entry kCompare[] = {
    {"equal", map2<T, std::uint8_t>([](T a, T b) { return std::uint8_t(a == b); })},
    {"not_equal", map2<T, std::uint8_t>([](T a, T b) { return std::uint8_t(a != b); })},
    {"less", map2<T, std::uint8_t>([](T a, T b) { return std::uint8_t(a < b); })},
    {"less_equal", map2<T, std::uint8_t>([](T a, T b) { return std::uint8_t(a <= b); })},
    {"greater", map2<T, std::uint8_t>([](T a, T b) { return std::uint8_t(a > b); })},
    {"greater_equal", map2<T, std::uint8_t>([](T a, T b) { return std::uint8_t(a >= b); })},
};

using Byte = std::uint8_t;
constexpr Entry kBool1[] = {{"not", map1<Byte, Byte>([](Byte a) { return Byte(!a); })}};
constexpr Entry kBool2[] = {
    {"and", map2<Byte, Byte>([](Byte a, Byte b) { return Byte(a && b); })},
    {"or", map2<Byte, Byte>([](Byte a, Byte b) { return Byte(a || b); })},
    {"xor", map2<Byte, Byte>([](Byte a, Byte b) { return Byte(!a != !b); })},
};
constexpr Entry kFloatToBool[] = {{"isnan", map1<float, Byte>([](float a) { return Byte(a != a); })}};

// The body for so many inputs of that dtype, or nullptr.
Body find_same_dtype(const std::string& name, int inputs, DType in) {
  const auto choose = [&](std::span<const Entry> one, std::span<const Entry> two) {
    return find(inputs == 1 ? one : two, name);
  };
  switch (in) {
    case DType::f32:
      return choose(kFloat1, kFloat2);
    case DType::i32:
      return choose(kInteger1<std::int32_t>, kInteger2<std::int32_t>);
    case DType::i64:
      return choose(kInteger1<std::int64_t>, kInteger2<std::int64_t>);
    case DType::boolean:
      return choose(kBool1, kBool2);
    default:
      return nullptr;
  }
}

Body find_to_bool(const std::string& name, int inputs, DType in) {
  if (inputs == 1) return in == DType::f32 ? find(kFloatToBool, name) : nullptr;
  switch (in) {
    case DType::f32:
      return find(kCompare<float>, name);
    case DType::i32:
      return find(kCompare<std::int32_t>, name);
    case DType::i64:
      return find(kCompare<std::int64_t>, name);
    case DType::boolean:
      return find(kCompare<Byte>, name);
    default:
      return nullptr;
  }
}

Body find_pick(DType dtype) {
  switch (item_size(dtype)) {
    case 1:
      return pick<std::uint8_t>;
    case 2:
      return pick<std::uint16_t>;
    case 4:
      return pick<std::uint32_t>;
    default:
      return pick<std::uint64_t>;
  }
}

Body find_body(const std::string& name, int inputs, const Context& context) {
  const DType in = context.in[0].dtype, out = context.out[0].dtype;
  if (inputs == 1 && name == "copy") return conversion(in, out);
  if (name == "where") {
    const bool fits = inputs == 3 && in == DType::boolean && context.in[1].dtype == out && context.in[2].dtype == out;
    return fits ? find_pick(out) : nullptr;
  }
  if (inputs == 3 || (inputs == 2 && context.in[1].dtype != in)) return nullptr;
  Body body = in == out ? find_same_dtype(name, inputs, in) : nullptr;
  return body == nullptr && out == DType::boolean ? find_to_bool(name, inputs, in) : body;
}

template <class T>
void gather_run(const void* from, std::int64_t stride, std::int64_t n, void* to) {
  const T* p = static_cast<const T*>(from);
  T* q = static_cast<T*>(to);
  for (std::int64_t i = 0; i < n; ++i) q[i] = p[i * stride];
}

template <class T>
void scatter_run(const void* from, std::int64_t stride, std::int64_t n, void* to) {
  const T* p = static_cast<const T*>(from);
  T* q = static_cast<T*>(to);
  for (std::int64_t i = 0; i < n; ++i) q[i * stride] = p[i];
}

using Move = void (*)(const void*, std::int64_t, std::int64_t, void*);

Move gather_of(std::int64_t size) {
  return size == 1   ? gather_run<std::uint8_t>
         : size == 2 ? gather_run<std::uint16_t>
         : size == 4 ? gather_run<std::uint32_t>
                     : gather_run<std::uint64_t>;
}

Move scatter_of(std::int64_t size) {
  return size == 1   ? scatter_run<std::uint8_t>
         : size == 2 ? scatter_run<std::uint16_t>
         : size == 4 ? scatter_run<std::uint32_t>
                     : scatter_run<std::uint64_t>;
}

// One thread's runs of an op: buffers for the operands that are not contiguous.
class Runner {
 public:
  Runner(const Context& context, int inputs, Body body, const std::int64_t (&stride)[kInputs + 1], std::int64_t longest)
      : context_(context), inputs_(inputs), body_(body), longest_(longest) {
    std::copy_n(stride, kInputs + 1, stride_);
  }

  // Elements first .. first + n - 1 of the run that starts at these offsets (the output's first).
  void run(const std::int64_t (&offset)[kInputs + 1], std::int64_t first, std::int64_t n) {
    const void* in[kInputs] = {};
    for (int i = 0; i < inputs_; ++i) {
      const Tensor& view = context_.in[static_cast<std::size_t>(i)];
      const std::int64_t size = item_size(view.dtype), stride = stride_[i + 1];
      const std::byte* p = static_cast<const std::byte*>(view.data) + (offset[i + 1] + first * stride) * size;
      if (stride == 1) {
        in[i] = p;
        continue;
      }
      in[i] = buffer_[i];
      if (stride == 0 && broadcast_[i] == p) continue;  // still there from the last run
      gather_of(size)(p, stride, stride == 0 ? longest_ : n, buffer_[i]);
      broadcast_[i] = stride == 0 ? p : nullptr;
    }
    const Tensor& y = context_.out[0];
    const std::int64_t size = item_size(y.dtype);
    std::byte* to = static_cast<std::byte*>(y.data) + (offset[0] + first * stride_[0]) * size;
    body_(in, stride_[0] == 1 ? static_cast<void*>(to) : buffer_[kInputs], n);
    if (stride_[0] != 1) scatter_of(size)(buffer_[kInputs], stride_[0], n, to);
  }

 private:
  const Context& context_;
  const int inputs_;
  const Body body_;
  const std::int64_t longest_;
  std::int64_t stride_[kInputs + 1];
  const void* broadcast_[kInputs] = {};
  alignas(64) std::byte buffer_[kInputs + 1][kRun * 8];
};

class Elementwise : public Kernel {
 public:
  explicit Elementwise(const Attributes& attributes) : function_(attributes.text("function")) {}

  void run(const Context& context) override {
    const Tensor& y = context.out[0];
    int inputs = 0;
    const Tensor* views[kInputs + 1] = {&y, &y, &y, &y};
    for (const Tensor& x : context.in) {
      if (!x) continue;
      require(inputs < kInputs && &x == &context.in[static_cast<std::size_t>(inputs)], "inputs are missing");
      require(x.ndim == y.ndim, "every input needs y's shape (stride 0 broadcasts)");
      require_same_shape(x, y, y.ndim, "every input needs y's shape (stride 0 broadcasts)");
      views[++inputs] = &x;
    }
    require(inputs > 0, "no input");
    const Body body = find_body(function_, inputs, context);
    if (body == nullptr) fail("no function '" + function_ + "' of such inputs");
    if (y.numel() == 0) return;

    Walk<kInputs + 1> walk(views, y.ndim);
    std::int64_t stride[kInputs + 1];
    const std::int64_t inner = walk.take_inner(stride);
    const std::int64_t runs = (inner + kRun - 1) / kRun, units = walk.count() * runs;
    const auto range = [&](std::int64_t begin, std::int64_t end, int) {
      Walk<kInputs + 1> mine = walk;
      Runner runner(context, inputs, body, stride, std::min(inner, kRun));
      mine.seek(begin / runs);
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const std::int64_t first = unit % runs * kRun;
        runner.run(mine.offset, first, std::min(kRun, inner - first));
        if (unit % runs == runs - 1) mine.next();
      }
    };
    if (y.numel() < kSmall) {
      range(0, units, 0);
    } else {
      context.pool.split(units, 1, range);
    }
  }

 private:
  const std::string function_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(elementwise, Elementwise)
