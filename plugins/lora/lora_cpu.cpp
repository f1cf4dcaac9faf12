// y = base + x @ a[i].T @ b[i], with the adapter i of each row.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace llmc::LLMC_ISA {
namespace {

constexpr std::int64_t kLanes = 16;       // partial sums over K
constexpr int kRows = 4;                  // multiplied at a time by a row of a or b
constexpr std::int64_t kTile = 32;        // rows of one adapter that a thread takes at a time
constexpr std::int64_t kColumns = 64;     // of y, that a thread takes at a time
constexpr std::int64_t kShare = 1 << 16;  // products that are worth waking a thread for

// Lane by lane, then the lanes in order: the same for every row, however many are multiplied at a time.
template <int count>
void dots(const float* factors, const float* const* x, std::int64_t columns, float* const* sums) {
  f32x16 lanes[count];
  for (f32x16& l : lanes) l = zero();
  for (std::int64_t k = 0; k < columns; k += kLanes) {
    const int here = static_cast<int>(std::min(kLanes, columns - k));
    const f32x16 f = here == kLanes ? load(factors + k) : load(factors + k, here);
    for (int r = 0; r < count; ++r) lanes[r] = lanes[r] + f * (here == kLanes ? load(x[r] + k) : load(x[r] + k, here));
  }
  for (int r = 0; r < count; ++r) {
    float lane[kLanes];
    store(lane, lanes[r]);
    *sums[r] = 0;
    for (const float value : lane) *sums[r] += value;
  }
}

// target = source + sum over j of h[j] * factors[j], the sum in ascending order, for up to kColumns columns.
template <int count>
void add(const float* factors, std::int64_t stride, const float* const* h, std::int64_t rank,
         const float* const* source, float* const* target, std::int64_t width) {
  for (std::int64_t c = 0; c < width; c += 2 * kLanes) {
    const int n0 = static_cast<int>(std::min(kLanes, width - c));
    const int n1 = static_cast<int>(std::clamp<std::int64_t>(width - c - kLanes, 0, kLanes));
    f32x16 sums[count][2];
    for (auto& sum : sums) sum[0] = sum[1] = zero();
    for (std::int64_t j = 0; j < rank; ++j) {
      const float* line = factors + j * stride + c;
      const f32x16 f0 = n1 == kLanes ? load(line) : load(line, n0);
      const f32x16 f1 = n1 == kLanes ? load(line + kLanes) : n1 > 0 ? load(line + kLanes, n1) : zero();
      for (int r = 0; r < count; ++r) {
        const f32x16 scale = broadcast(h[r][j]);
        sums[r][0] = sums[r][0] + scale * f0;
        sums[r][1] = sums[r][1] + scale * f1;
      }
    }
    for (int r = 0; r < count; ++r) {
      store(target[r] + c, load(source[r] + c, n0) + sums[r][0], n0);
      if (n1 > 0) store(target[r] + c + kLanes, load(source[r] + c + kLanes, n1) + sums[r][1], n1);
    }
  }
}

// f(first) for kRows at a time, then one by one; the second argument tells which.
template <class F>
void in_groups(std::int64_t begin, std::int64_t end, F&& f) {
  std::int64_t t = begin;
  for (; t + kRows <= end; t += kRows) f(t, std::integral_constant<int, kRows>());
  for (; t < end; ++t) f(t, std::integral_constant<int, 1>());
}

// Consecutive entries of an order of rows, all of one adapter.
struct Tile {
  std::int64_t begin = 0, end = 0;
};

class Lora : public Kernel {
 public:
  explicit Lora(const Attributes&) {}

  void run(const Context& context) override {
    require(context.in.size() == 6 && context.out.size() == 1, "takes x, base, a, b, ranks and adapters, and gives y");
    const Tensor &x = context.in[0], &base = context.in[1], &a = context.in[2], &b = context.in[3];
    const Tensor &ranks = context.in[4], &adapters = context.in[5], &y = context.out[0];
    for (const Tensor* t : {&x, &base, &y}) {
      require(*t && t->dtype == DType::f32 && t->ndim == 2, "x, base and y must be float32 with two dimensions");
      require(t->stride[1] == 1 || t->shape[1] == 1, "the columns of x, base and y must be contiguous");
    }
    const std::int64_t rows = x.shape[0], columns = x.shape[1], outputs = y.shape[1];
    require(base.shape[0] == rows && y.shape[0] == rows && base.shape[1] == outputs, "base and y must be [M, N]");
    for (const Tensor* t : {&a, &b}) {
      require(*t && t->dtype == DType::f32 && t->ndim == 3, "a and b must be float32 with three dimensions");
      const std::int64_t width = t == &a ? columns : outputs;
      require(t->shape[0] == a.shape[0] && t->shape[1] == a.shape[1] && t->shape[2] == width,
              "a must be [adapters, rank, K] and b [adapters, rank, N]");
      require(t->stride[2] == 1 && t->stride[1] == width && t->stride[0] == width * t->shape[1],
              "a and b must be contiguous");
    }
    const std::int64_t count = a.shape[0], most = a.shape[1];
    require(columns >= 1 && most >= 1, "K and the rank must be at least 1");
    require(ranks && ranks.dtype == DType::i32 && ranks.ndim == 1 && ranks.shape[0] == count && ranks.stride[0] == 1,
            "ranks must be int32 [adapters]");
    require(adapters && adapters.dtype == DType::i32 && adapters.ndim == 1 && adapters.shape[0] == rows &&
                (adapters.stride[0] == 1 || rows == 1),
            "adapters must be int32 [M]");
    const auto* rank_of = ranks.as<const std::int32_t>();
    const auto* adapter_of = adapters.as<const std::int32_t>();
    for (std::int64_t i = 0; i < count; ++i) {
      require(rank_of[i] >= 0 && rank_of[i] <= most, "a rank is more than a and b have");
    }
    bool any = false;
    for (std::int64_t row = 0; row < rows; ++row) {
      require(adapter_of[row] >= -1 && adapter_of[row] < count, "there is no such adapter");
      any |= adapter_of[row] >= 0;
    }
    if (!any && y.data == base.data) return;
    // Rows of one adapter lie together, so that its a and b are read once for up to kTile of them.
    auto* order = context.scratch.array<std::int64_t>(rows);
    auto* tiles = context.scratch.array<Tile>(rows);
    auto* ends = context.scratch.array<std::int64_t>(count + 1);
    const std::int64_t tile_count = arrange(adapter_of, rows, count, ends, order, tiles);
    const auto adapter = [&](const Tile& tile) { return std::int64_t{adapter_of[order[tile.begin]]}; };
    // How many products a row needs; none: it stays as it is.
    const auto rank = [&](const Tile& tile) { return adapter(tile) < 0 ? 0 : rank_of[adapter(tile)]; };

    auto* inner = context.scratch.array<float>(rows * most);
    context.pool.split(tile_count * most, std::max<std::int64_t>(1, kShare / (columns * kRows)),
                       [&](std::int64_t begin, std::int64_t end, int) {
                         for (std::int64_t i = begin; i < end; ++i) {
                           const Tile& tile = tiles[i / most];
                           const std::int64_t j = i % most;
                           if (j >= rank(tile)) continue;
                           const float* factors = a.as<const float>() + (adapter(tile) * most + j) * columns;
                           in_groups(tile.begin, tile.end, [&](std::int64_t t, auto rows_here) {
                             const float* from[rows_here];
                             float* to[rows_here];
                             for (int r = 0; r < rows_here; ++r) {
                               from[r] = x.as<const float>() + order[t + r] * x.stride[0];
                               to[r] = inner + order[t + r] * most + j;
                             }
                             dots<rows_here>(factors, from, columns, to);
                           });
                         }
                       });
    const std::int64_t blocks = (outputs + kColumns - 1) / kColumns;
    context.pool.split(tile_count * blocks, std::max<std::int64_t>(1, kShare / (kColumns * most * kRows)),
                       [&](std::int64_t begin, std::int64_t end, int) {
                         for (std::int64_t i = begin; i < end; ++i) {
                           const Tile& tile = tiles[i / blocks];
                           const std::int64_t first = i % blocks * kColumns,
                                              width = std::min(kColumns, outputs - first);
                           const float* factors = b.as<const float>() + adapter(tile) * most * outputs + first;
                           in_groups(tile.begin, tile.end, [&](std::int64_t t, auto rows_here) {
                             const float *h[rows_here], *source[rows_here];
                             float* target[rows_here];
                             for (int r = 0; r < rows_here; ++r) {
                               h[r] = inner + order[t + r] * most;
                               source[r] = base.as<const float>() + order[t + r] * base.stride[0] + first;
                               target[r] = y.as<float>() + order[t + r] * y.stride[0] + first;
                               if (rank(tile) == 0 && target[r] != source[r])
                                 std::memcpy(target[r], source[r], static_cast<std::size_t>(width) * sizeof(float));
                             }
                             if (rank(tile) > 0) add<rows_here>(factors, outputs, h, rank(tile), source, target, width);
                           });
                         }
                       });
  }

 private:
  // Sorts the rows by adapter, those without one first, and cuts them into tiles; returns how many. ends [count + 1].
  static std::int64_t arrange(const std::int32_t* adapters, std::int64_t rows, std::int64_t count, std::int64_t* ends,
                              std::int64_t* order, Tile* tiles) {
    std::fill_n(ends, count + 1, std::int64_t{0});
    for (std::int64_t row = 0; row < rows; ++row) ++ends[adapters[row] + 1];
    std::int64_t sum = 0, made = 0;
    for (std::int64_t i = 0; i <= count; ++i) {
      const std::int64_t here = ends[i];
      ends[i] = sum;  // where it begins, until its rows are placed
      for (std::int64_t t = sum; t < sum + here; t += kTile) tiles[made++] = {t, std::min(sum + here, t + kTile)};
      sum += here;
    }
    for (std::int64_t row = 0; row < rows; ++row) order[ends[adapters[row] + 1]++] = row;
    return made;
  }
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(lora, Lora)
