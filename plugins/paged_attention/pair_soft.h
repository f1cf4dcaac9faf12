// Scores of a few rows and a tile that become weights without leaving the registers: softening scores that were stored
// took a seventh of the time of prefill, this takes half as much.
#pragma once
#ifdef __AVX512BF16__
#include <array>
#include <utility>

#include "pair_product.h"
#include "pair_weights.h"

namespace llmc::LLMC_ISA {

constexpr int kSoftRows = 3;  // whose scores of a tile the registers hold

// Weights [R][kTile] of rows that see the positions 0 .. end - 1, which B blocks hold: what score_pairs and
// soften_to_bf16 give, bit by bit.
template <class Keys, int R, int B>
void attend_softly(const bf16* q, std::int64_t depth, const Keys& keys, bf16* weights, int end, float scale,
                   const float* key_scales, const float* factors, float* top, float* total) {
  PairSums<bf16> sum[R][B];
  dot_keys(q, depth, keys, 0, sum);
  f32x16 x[R][B];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMC_UNROLL
    for (int b = 0; b < B; ++b) x[r][b] = sum[r][b].v;
  }
  soften_registers(x, weights, end, scale, key_scales, factors, top, total);
}

template <class Keys>
using AttendSoftly = decltype(&attend_softly<Keys, 1, 1>);

template <class Keys, int... B>
constexpr std::array<std::array<AttendSoftly<Keys>, kSoftRows>, sizeof...(B)> attend_softly_all(
    std::integer_sequence<int, B...>) {
  return {{{attend_softly<Keys, 1, B + 1>, attend_softly<Keys, 2, B + 1>, attend_softly<Keys, 3, B + 1>}...}};
}

// The same by the number of blocks and of rows, both less 1.
template <class Keys>
constexpr auto kAttendSoftly = attend_softly_all<Keys>(std::make_integer_sequence<int, kTileBlocks>());

}  // namespace llmc::LLMC_ISA
#endif
