// y = a b of activations: tiles of 64 rows and 32 columns, every sum over k ascending from zero.
#include "../elementwise/strided.h"

namespace llmc::LLMC_ISA {
namespace {

constexpr std::int64_t kRows = 64, kColumns = 32;
constexpr int kBlock = 4;

// R rows of a tile; columns 0 .. n - 1, n <= 32. b holds rows of 32 floats at a distance of b_stride.
template <int R>
void rows_of_tile(const float* a, std::int64_t a_row, std::int64_t a_k, const float* b, std::int64_t b_stride,
                  std::int64_t k, float (*y)[kColumns], int n) {
  f32x16 sum[R][2];
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = zero();
  const int first = std::min(n, 16), second = n - first;
  for (std::int64_t i = 0; i < k; ++i) {
    const float* row = b + i * b_stride;
    const f32x16 b0 = first == 16 ? load(row) : load(row, first);
    const f32x16 b1 = second == 16 ? load(row + 16) : load(row + 16, second);
    for (int r = 0; r < R; ++r) {
      const f32x16 x = broadcast(a[r * a_row + i * a_k]);
      sum[r][0] = fmadd(x, b0, sum[r][0]);
      sum[r][1] = fmadd(x, b1, sum[r][1]);
    }
  }
  for (int r = 0; r < R; ++r) {
    store(y[r], sum[r][0]);
    store(y[r] + 16, sum[r][1]);
  }
}

class Matmul : public Kernel {
 public:
  explicit Matmul(const Attributes&) {}

  void run(const Context& context) override {
    const Tensor &a = context.in[0], &b = context.in[1], &y = context.out[0];
    const bool f32 = a.dtype == DType::f32 && b.dtype == DType::f32 && y.dtype == DType::f32;
    require(f32, "a, b and y must be float32");
    const int leading = y.ndim - 2;
    require(leading >= 0 && a.ndim == y.ndim && b.ndim == y.ndim, "a, b and y need one rank of at least 2");
    require_same_shape(a, y, leading, "a and y differ in a leading axis");
    require_same_shape(b, y, leading, "b and y differ in a leading axis");
    const std::int64_t m = y.shape[leading], n = y.shape[leading + 1], k = a.shape[leading + 1];
    require(a.shape[leading] == m && b.shape[leading] == k && b.shape[leading + 1] == n, "the shapes do not fit");
    if (y.numel() == 0) return;

    const bool packs = b.stride[leading + 1] != 1;
    float* panels = packs ? context.scratch.array<float>(context.pool.size() * k * kColumns) : nullptr;
    const std::int64_t row_tiles = (m + kRows - 1) / kRows, tiles = row_tiles * ((n + kColumns - 1) / kColumns);
    const Tensor* views[] = {&a, &b, &y};
    const Walk<3> walk(views, leading);
    const std::int64_t units = walk.count() * tiles;
    const auto range = [&](std::int64_t begin, std::int64_t end, int thread) {
      Walk<3> mine = walk;
      mine.seek(begin / tiles);
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const std::int64_t tile = unit % tiles;
        const std::int64_t row = tile % row_tiles * kRows, column = tile / row_tiles * kColumns;
        multiply(context, mine, row, column, packs ? panels + thread * k * kColumns : nullptr);
        if (tile == tiles - 1) mine.next();
      }
    };
    if (y.numel() * k < 4 * kSmall) {
      range(0, units, 0);
    } else {
      context.pool.split(units, 1, range);
    }
  }

 private:
  static void multiply(const Context& context, const Walk<3>& at_matrix, std::int64_t row, std::int64_t column,
                       float* panel) {
    const Tensor &a = context.in[0], &b = context.in[1], &y = context.out[0];
    const int rows = y.ndim - 2, columns = rows + 1;
    const std::int64_t k = a.shape[columns], last = std::min(y.shape[rows], row + kRows);
    const int n = static_cast<int>(std::min(kColumns, y.shape[columns] - column));
    const float* b_tile = at<const float>(b, at_matrix.offset[1] + column * b.stride[columns]);
    std::int64_t b_stride = b.stride[rows];
    if (panel != nullptr) {
      for (std::int64_t i = 0; i < k; ++i) {
        for (int c = 0; c < n; ++c) panel[i * kColumns + c] = b_tile[i * b_stride + c * b.stride[columns]];
      }
      b_tile = panel;
      b_stride = kColumns;
    }
    alignas(64) float result[kBlock][kColumns];
    for (; row < last; row += kBlock) {
      const int count = static_cast<int>(std::min<std::int64_t>(kBlock, last - row));
      const float* a_rows = at<const float>(a, at_matrix.offset[0] + row * a.stride[rows]);
      const auto block = count == 4   ? rows_of_tile<4>
                         : count == 3 ? rows_of_tile<3>
                         : count == 2 ? rows_of_tile<2>
                                      : rows_of_tile<1>;
      block(a_rows, a.stride[rows], a.stride[columns], b_tile, b_stride, k, result, n);
      for (int r = 0; r < count; ++r) {
        float* out = at<float>(y, at_matrix.offset[2] + (row + r) * y.stride[rows] + column * y.stride[columns]);
        for (int c = 0; c < n; ++c) out[c * y.stride[columns]] = result[r][c];
      }
    }
  }
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(matmul, Matmul)
