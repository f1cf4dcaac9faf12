// Scores of a few rows and a tile that become weights without leaving the registers: softening scores that were stored
// took a seventh of the time of prefill, this takes half as much.
#pragma once
#ifdef __AVX512BF16__
#include <array>
#include <utility>

#include "pair_product.h"
#include "pair_weights.h"

namespace llmc::LLMC_ISA {

// Rows whose scores of so many blocks the registers hold: more where the sums of three would wait for one another.
constexpr std::int64_t soft_rows_for(int blocks) { return blocks <= 4 ? kSoftRows : 3; }

// Weights [R][kTile] of rows that see positions of B blocks: what score_pairs and soften_to_bf16 give, bit by bit.
template <class Keys, int R, int B>
void attend_softly(const bf16* q, std::int64_t depth, const Keys& keys, const SoftRows& rows, bf16* weights, float* top,
                   float* total) {
  if constexpr (R <= soft_rows_for(B)) {
    PairSums<bf16> sum[R][B];
    dot_keys(q, depth, keys, 0, sum);
    f32x16 x[R][B];
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      LLMC_UNROLL
      for (int b = 0; b < B; ++b) x[r][b] = sum[r][b].v;
    }
    soften_registers(x, rows, weights, top, total);
  }
}

template <class Keys>
using AttendSoftly = decltype(&attend_softly<Keys, 1, 1>);

template <class Keys, int R, int... B>
constexpr std::array<AttendSoftly<Keys>, kTileBlocks> soft_blocks(std::integer_sequence<int, B...>) {
  return {attend_softly<Keys, R, B + 1>...};
}
template <class Keys, int... R>
constexpr std::array<std::array<AttendSoftly<Keys>, kTileBlocks>, kSoftRows> soft_rows(
    std::integer_sequence<int, R...>) {
  return {soft_blocks<Keys, R + 1>(std::make_integer_sequence<int, kTileBlocks>())...};
}

// The same by the number of rows and of blocks, both less 1.
template <class Keys>
constexpr auto kAttendSoftly = soft_rows<Keys>(std::make_integer_sequence<int, kSoftRows>());

}  // namespace llmc::LLMC_ISA
#endif
