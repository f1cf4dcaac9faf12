// What an attention step consists of: jobs, each some rows of one sequence that read the same kv head.
#pragma once
#include <atomic>

#include "cache_view.h"

namespace llmc::LLMC_ISA {

// Masks and logits of a step, the same for every job.
struct Step {
  const Context& context;
  const KvSlot& slot;
  Logit logit;
  std::int64_t window, chunk;
  std::int64_t heads, group, key_dim, value_dim,
      width;  // group: heads that share a kv head; width: value_dim in whole vectors
};

// The tiles of a set of rows, computed by several jobs. The last one to finish adds up the parts.
struct Split {
  std::atomic<std::int32_t> jobs_left;
  std::int64_t first_tile, tiles;
  Seen* seen;  // [tiles]
};

// Tokens first_token .. + tokens of a sequence, all heads of one kv head, tiles first_tile .. last_tile - 1.
struct Job {
  std::int32_t sequence, kv_head, first_token, tokens, first_tile, last_tile;
  bool branch;   // tokens of a tree that is no chain
  Split* split;  // of jobs that share their rows with others
};

// Hands jobs out to the threads.
struct JobQueue {
  const Job* jobs;
  std::int64_t size;
  std::atomic<std::int64_t> next{0};

  const Job* take() {
    const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
    return i < size ? jobs + i : nullptr;
  }
  // What take() would give now.
  const Job* following() const {
    const std::int64_t i = next.load(std::memory_order_relaxed);
    return i < size ? jobs + i : nullptr;
  }
};

// Positions begin .. end - 1 of a tile.
struct TilePart {
  int begin = kTile, end = 0;

  int blocks_end() const { return (end + kLanes - 1) / kLanes; }
  void join(const TilePart& other) {
    if (other.begin >= other.end) return;
    begin = std::min(begin, other.begin);
    end = std::max(end, other.end);
  }
};

// Rows that share a load, and how many accumulators the registers hold.
#if defined(__AVX512F__)
constexpr int kRowBlock = 6, kAccumulators = 24;
#elif defined(__AVX2__) || defined(LLMC_NEON)
constexpr int kRowBlock = 6, kAccumulators = 6;
#else
constexpr int kRowBlock = 3, kAccumulators = 3;
#endif

// Vectors that R rows take at a time: 8, 4, 2 or 1.
constexpr int vectors_for(int rows) {
  int n = 8;
  while (n > 1 && n * rows > kAccumulators) n /= 2;
  return n;
}

// Rows that are computed together, and the positions that any, or all of them see.
struct RowBlock {
  std::int64_t row = 0;
  int rows = 0;
  TilePart any, all{0, kTile};
};

// Multiplies what rows [rows][kTile] have for each position of a tile by a number of the position.
LLMC_INLINE void scale_rows(float* x, std::int64_t rows, const TilePart& part, const float* scales) {
  for (int j = part.begin / kLanes * kLanes; j < part.end; j += kLanes) {
    const f32x16 factor = load(scales + j);
    for (std::int64_t r = 0; r < rows; ++r) store(x + r * kTile + j, load(x + r * kTile + j) * factor);
  }
}

// What new row r of a sequence sees: positions begin .. end - 1, itself being end - 1.
struct Range {
  std::int64_t begin, end;
};

LLMC_INLINE const std::uint64_t* tree_bits(const Batch& batch, const Sequence& sequence, std::int64_t r) {
  return batch.tree_mask + (sequence.first_row + r) * batch.tree_words;
}

LLMC_INLINE Range visible(const Step& step, const Sequence& sequence, std::int64_t r) {
  const Batch& batch = step.context.batch;
  std::int64_t position = sequence.past + r;
  if (batch.tree_mask != nullptr) {
    position = sequence.past - 1;
    const std::uint64_t* bits = tree_bits(batch, sequence, r);
    for (std::int64_t w = 0; w < batch.tree_words; ++w) position += __builtin_popcountll(bits[w]);
  }
  std::int64_t begin = 0;
  if (step.window > 0) begin = std::max(begin, position - step.window + 1);
  if (step.chunk > 0) begin = std::max(begin, position / step.chunk * step.chunk);
  return {begin, position + 1};
}

// Whether a sequence has no tree, or one that is a plain chain: its rows then stand where they will stay. Refuses a
// tree in which a row does not see itself, or sees a later one.
inline bool is_chain(const Batch& batch, const Sequence& sequence) {
  if (batch.tree_mask == nullptr) return true;
  bool chain = true;
  for (std::int64_t r = 0; r < sequence.rows; ++r) {
    const std::uint64_t* bits = tree_bits(batch, sequence, r);
    for (std::int64_t w = 0; w < batch.tree_words; ++w) {
      const std::int64_t ones = std::clamp<std::int64_t>(r + 1 - w * 64, 0, 64);
      const std::uint64_t all = ones == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << ones) - 1;
      require((bits[w] & ~all) == 0, "a row of tree_mask has a later row as its ancestor");
      chain &= bits[w] == all;
    }
    require(r < batch.tree_words * 64 && (bits[r / 64] >> (r % 64) & 1) != 0, "a row of tree_mask does not see itself");
  }
  return chain;
}

}  // namespace llmc::LLMC_ISA
