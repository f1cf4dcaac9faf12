// What a warp's tensor-core instructions do, by the layouts of the PTX manual (see gpu.cuh).
#include "numbers.h"
#include "runtime.h"

namespace simt {

// A[16][K] B[K][8] C[16][8] out of the lanes' registers, and C back. `Raw` is a stored number, `per` of them in a word.
template <class Raw, class Number, int K, class Convert>
static void multiply_as(Fiber* const* lanes, Convert convert) {
  constexpr int per = 4 / sizeof(Raw);
  Number a[16][K], b[K][8], c[16][8];
  for (int i = 0; i < kWarp; ++i) {
    int g = i / 4, t = i % 4;
    const auto* from_a = static_cast<const Raw*>(lanes[i]->args->a);
    const auto* from_b = static_cast<const Raw*>(lanes[i]->args->b);
    const auto* from_c = static_cast<const Number*>(lanes[i]->args->out);
    for (int j = 0; j < 4 * per; ++j)
      a[g + j / per % 2 * 8][t * per + j % per + j / per / 2 * (K / 2)] = convert(from_a[j]);
    for (int j = 0; j < 2 * per; ++j) b[t * per + j % per + j / per * (K / 2)][g] = convert(from_b[j]);
    for (int j = 0; j < 4; ++j) c[g + j / 2 * 8][2 * t + j % 2] = from_c[j];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int i = 0; i < kWarp; ++i) {
    auto* to = static_cast<Number*>(lanes[i]->args->out);
    for (int j = 0; j < 4; ++j) to[j] = c[i / 4 + j / 2 * 8][2 * (i % 4) + j % 2];
  }
}

void multiply(Fiber* const* lanes, Op op) {
  ++worker->counters[kMma];
  switch (op) {
    case Op::mma_bf16:
      return multiply_as<uint16_t, float, 16>(lanes, bf16_to_float);
    case Op::mma_f16:
      return multiply_as<uint16_t, float, 16>(lanes, f16_to_float);
    case Op::mma_e4m3:
      return multiply_as<uint8_t, float, 32>(lanes, e4m3_to_float);
    default:
      return multiply_as<int8_t, int32_t, 32>(lanes, [](int8_t x) { return static_cast<int32_t>(x); });
  }
}

// Row r of matrix i, whose address lane 8 i + r has.
static void read_row(Fiber& lane, uint16_t* row, unsigned& banks) {
  Worker& w = *worker;
  const auto* p = static_cast<const unsigned char*>(lane.args->a);
  w.fiber = &lane;  // reports name the lane that gave the address
  std::ptrdiff_t offset = p - w.shared;
  if (offset < 0 || offset + 16 > static_cast<std::ptrdiff_t>(w.launch->shared)) {
    report("bounds", "ldmatrix at shared[%td], outside of the %zu bytes of this launch, %s:%u", offset,
           w.launch->shared, lane.place.file_name(), lane.place.line());
    kill_block();
  }
  if (offset % 16) {
    report("alignment", "ldmatrix of a row at shared[%td], no multiple of 16, %s:%u", offset, lane.place.file_name(),
           lane.place.line());
    kill_block();
  }
  access(p, 16, false, false, nullptr, 0);
  unsigned bank = 1u << (offset / 16 & 7);
  if (banks & bank) ++w.counters[kConflicts];
  banks |= bank;
  memcpy(row, p, 16);
}

void load_matrices(Fiber* const* lanes, bool transposed) {
  Worker& w = *worker;
  uint16_t matrices[4][8][8];
  Fiber* self = w.fiber;
  for (int i = 0; i < 4; ++i) {
    unsigned banks = 0;
    for (int r = 0; r < 8; ++r) read_row(*lanes[8 * i + r], matrices[i][r], banks);
  }
  w.fiber = self;
  w.counters[kLdmatrix] += 4;
  for (int i = 0; i < kWarp; ++i) {
    int g = i / 4, t = i % 4;
    auto* to = static_cast<uint16_t*>(lanes[i]->args->out);
    for (int j = 0; j < 8; ++j) {
      int column = 2 * t + j % 2;
      to[j] = transposed ? matrices[j / 2][column][g] : matrices[j / 2][g][column];
    }
  }
}

}  // namespace simt
