// Products of AMX tiles, of bf16 or of bytes.
#pragma once
#ifdef __AMX_BF16__
#include <immintrin.h>

#include "panels_amx.h"

namespace llmc::LLMC_ISA {

constexpr int kTileRows = 16;

// Rows of A are bf16, or bytes that are multiplied with signed ones.
#define LLMC_MULTIPLY(c, a, b)                                         \
  if constexpr (std::is_same_v<A, bf16>) _tile_dpbf16ps(c, a, b);      \
  if constexpr (std::is_same_v<A, std::int8_t>) _tile_dpbssd(c, a, b); \
  if constexpr (std::is_same_v<A, std::uint8_t>) _tile_dpbusd(c, a, b);

// c [16 or 32 rows][16 or 32 columns] = a [rows][64-byte steps] times b, whose tiles [16][64 bytes] are b_step elements
// apart; the columns from 16 on are those of b1. Behind the steps may come one more, in rest0 and rest1. kMore: added
// to what c already is.
template <bool kTwoRows, bool kTwoColumns, bool kMore, class A, class B>
void multiply_tiles(const A* a, std::int64_t a_stride, std::int64_t steps, const B* b0, const B* b1,
                    std::int64_t b_step, const B* rest0, const B* rest1, float* c0, float* c1, std::int64_t c_stride) {
  constexpr std::int64_t kDepth = 64 / sizeof(A), kSize = sizeof(A);
  memory_barrier();
  if constexpr (kMore) {
    _tile_loadd(0, c0, c_stride * 4);
    if constexpr (kTwoColumns) _tile_loadd(1, c1, c_stride * 4);
    if constexpr (kTwoRows) _tile_loadd(2, c0 + kTileRows * c_stride, c_stride * 4);
    if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, c1 + kTileRows * c_stride, c_stride * 4);
  } else {
    _tile_zero(0);
    if constexpr (kTwoColumns) _tile_zero(1);
    if constexpr (kTwoRows) _tile_zero(2);
    if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
  }
  const auto step = [&](const A* x, const B* y0, const B* y1) {
    (void)y1;
    _tile_loadd(4, x, a_stride * kSize);
    _tile_loadd(6, y0, 64);
    LLMC_MULTIPLY(0, 4, 6)
    if constexpr (kTwoColumns) {
      _tile_loadd(7, y1, 64);
      LLMC_MULTIPLY(1, 4, 7)
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, x + kTileRows * a_stride, a_stride * kSize);
      LLMC_MULTIPLY(2, 5, 6)
    }
    if constexpr (kTwoRows && kTwoColumns) {
      LLMC_MULTIPLY(3, 5, 7)
    }
  };
  for (std::int64_t s = 0; s < steps; ++s) step(a + s * kDepth, b0 + s * b_step, b1 + s * b_step);
  if (rest0 != nullptr) step(a + steps * kDepth, rest0, rest1);
  store_tile<0>(c0, c_stride * 4);
  if constexpr (kTwoColumns) store_tile<1>(c1, c_stride * 4);
  if constexpr (kTwoRows) store_tile<2>(c0 + kTileRows * c_stride, c_stride * 4);
  if constexpr (kTwoRows && kTwoColumns) store_tile<3>(c1 + kTileRows * c_stride, c_stride * 4);
}

#undef LLMC_MULTIPLY

}  // namespace llmc::LLMC_ISA
#endif
