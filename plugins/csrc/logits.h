// What sampling does to a row of logits: tens of thousands of numbers for each token of each sequence.
#pragma once
#include <cstdint>

namespace llmc {

// The first index at which the sum of exp((scores[i] - highest) / temperature) exceeds `draw` (0 to 1) times the whole
// sum, where terms below `least` count as 0. No score is NaN or above the highest, which is finite. Terms are float,
// sums of blocks are float in a fixed order, sums of those double: the same index on every machine.
std::int64_t draw_token(const float* scores, std::int64_t count, float highest, float temperature, float least,
                        double draw);

// The largest of so many numbers, and where it first stands. NaN is the largest.
struct Largest {
  std::int32_t key, index;  // keys are ordered as the numbers are
};
Largest largest(const float* scores, std::int64_t count);

}  // namespace llmc
