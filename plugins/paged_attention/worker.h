// One thread's share of an attention step: jobs, each some rows of one sequence that read the same kv head.
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
  bool branch;   // one token of a tree that is no chain
  Split* split;  // of jobs that share their rows with others
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

// Rows that are computed together, and the positions that any, or all of them see.
struct RowBlock {
  std::int64_t row = 0;
  int rows = 0;
  TilePart any, all{0, kTile};
};

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

// Whether the tree of a sequence is a plain chain: the rows then stand where they will stay.
inline bool is_chain(const Batch& batch, const Sequence& sequence) {
  if (batch.tree_mask == nullptr) return true;
  for (std::int64_t r = 0; r < sequence.rows; ++r) {
    const std::uint64_t* bits = tree_bits(batch, sequence, r);
    for (std::int64_t w = 0; w < batch.tree_words; ++w) {
      const std::int64_t ones = std::clamp<std::int64_t>(r + 1 - w * 64, 0, 64);
      if (bits[w] != (ones == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << ones) - 1)) return false;
    }
  }
  return true;
}

// Elements of T behind a tree's branch: pages for so many rows and the page in which they start.
inline std::int64_t branch_pages(std::int64_t rows) { return rows / kLanes + 2; }

template <class T>
class Worker {
 public:
  // Rows above which a tile is converted to float32 once instead of at each use.
  static constexpr std::int64_t kDirectRows = 2 * kRowBlock;

  struct Sizes {
    std::int64_t rows, tokens, branch_rows;  // the largest of any job; branch_rows 0: no trees
  };

  static std::size_t memory(const Step& step, const Sizes& sizes) {
    Worker probe(step, sizes, nullptr);
    return static_cast<std::size_t>(probe.next_ - static_cast<std::byte*>(nullptr));
  }

  Worker(const Step& step, const Sizes& sizes, std::byte* memory)
      : step_(step),
        cache_(step.context.kv, step.slot),
        next_(memory),
        q_(take<float>(sizes.rows * step.key_dim)),
        scores_(take<float>(sizes.rows * kTile)),
        tile_(take_seen(sizes.rows)),
        seen_(take_seen(sizes.rows)),
        ranges_(take<Range>(sizes.tokens)),
        parts_(take<TilePart>(sizes.tokens)),
        blocks_(take<RowBlock>(sizes.rows / kRowBlock + 1)),
        keys32_(kConverts ? take<float>(kKeyBlocks * kLanes * step.key_dim) : nullptr),
        values32_(kConverts ? take<float>(kTile * step.width) : nullptr),
        branch_keys_(sizes.branch_rows ? take<T>(branch_pages(sizes.branch_rows) * cache_.key_page) : nullptr),
        branch_values_(sizes.branch_rows ? take<T>(branch_pages(sizes.branch_rows) * kLanes * step.value_dim)
                                         : nullptr) {}

  void run(const Job& job) {
    start(job);
    for (std::int64_t tile = job.first_tile; tile < job.last_tile; ++tile) {
      if (job.split != nullptr) {
        attend(tile, job.split->seen[tile - job.split->first_tile]);
      } else {
        attend(tile, tile_);
        add_tile(seen_, tile_, rows_, step_.width);
      }
    }
    if (job.split != nullptr) {
      if (job.split->jobs_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      for (std::int64_t t = 0; t < job.split->tiles; ++t) add_tile(seen_, job.split->seen[t], rows_, step_.width);
    }
    finish(job);
  }

 private:
  static constexpr bool kConverts = !std::is_same_v<T, float>;

  template <class U>
  U* take(std::int64_t count) {
    U* memory = reinterpret_cast<U*>(next_);
    next_ += (static_cast<std::size_t>(count) * sizeof(U) + 63) / 64 * 64;
    return memory;
  }

  Seen take_seen(std::int64_t rows) {
    const std::int64_t padded = (rows + kLanes - 1) / kLanes * kLanes;
    float *largest = take<float>(padded), *sum = take<float>(padded);
    return {largest, sum, take<float>(rows * step_.width)};
  }

  void clear(const Seen& seen) const {
    const std::int64_t padded = (rows_ + kLanes - 1) / kLanes * kLanes;
    std::fill_n(seen.largest, padded, kNothing);
    std::fill_n(seen.sum, padded, 0.0f);
    std::fill_n(seen.values, rows_ * step_.width, 0.0f);
  }

  void start(const Job& job) {
    sequence_ = sequence_of(step_.context.batch, job.sequence);
    kv_head_ = job.kv_head;
    rows_ = job.tokens * step_.group;
    const Tensor& q = step_.context.in[0];
    float* to = q_;
    for (std::int64_t t = 0; t < job.tokens; ++t) {
      ranges_[t] = visible(step_, sequence_, job.first_token + t);
      for (std::int64_t g = 0; g < step_.group; ++g, to += step_.key_dim) {
        const std::int64_t row = sequence_.first_row + job.first_token + t, head = kv_head_ * step_.group + g;
        const float* from = q.as<const float>() + row * q.stride[0] + head * q.stride[1];
        for (std::int64_t d = 0; d < step_.key_dim; ++d) to[d] = from[d * q.stride[2]];
      }
    }
    clear(seen_);
    last_page_ = (ranges_[job.tokens - 1].end - 1) / kLanes;
    branch_page_ = std::numeric_limits<std::int64_t>::max();
    if (job.branch) lay_out_branch(job.first_token);
  }

  // Copies the row's ancestors to the positions that they will have if the branch is accepted, so that the row sees the
  // same tiles as without a tree.
  void lay_out_branch(std::int64_t r) {
    const std::int64_t past = sequence_.past;
    branch_page_ = past / kLanes;
    for (std::int64_t p = std::max(branch_page_ * kLanes, ranges_[0].begin); p < past; ++p) copy_to_branch(p, p);
    const std::uint64_t* bits = tree_bits(step_.context.batch, sequence_, r);
    std::int64_t position = past;
    for (std::int64_t w = 0; w < step_.context.batch.tree_words; ++w) {
      for (std::uint64_t word = bits[w]; word != 0; word &= word - 1) {
        copy_to_branch(past + w * 64 + __builtin_ctzll(word), position++);
      }
    }
  }

  void copy_to_branch(std::int64_t from, std::int64_t to) {
    const std::int64_t page = to / kLanes - branch_page_;
    copy_key(cache_.key_page_of(sequence_, kv_head_, from / kLanes), static_cast<int>(from % kLanes), step_.key_dim,
             branch_keys_ + page * cache_.key_page, static_cast<int>(to % kLanes));
    const T* value = cache_.value_page_of(sequence_, kv_head_, from / kLanes) + from % kLanes * step_.value_dim;
    std::copy_n(value, step_.value_dim, branch_values_ + (page * kLanes + to % kLanes) * step_.value_dim);
  }

  int clamp_to_tile(std::int64_t position) const {
    return static_cast<int>(std::clamp<std::int64_t>(position - tile_start_, 0, kTile));
  }

  // What all rows see of one tile.
  void attend(std::int64_t tile, const Seen& seen) {
    tile_start_ = tile * kTile;
    clear(seen);
    const TilePart any = find_parts();
    if (any.begin >= any.end) return;
    const T *keys[kTileBlocks], *pages[kTileBlocks], *next[kTileBlocks], *unused;
    const int first = any.begin / kLanes, last = any.blocks_end();
    for (int b = 0; b < kTileBlocks; ++b) {
      find_page(tile * kTileBlocks + std::clamp(b, first, last - 1), keys[b], pages[b]);
      find_page(std::min((tile + 1) * kTileBlocks + b, last_page_), next[b], unused);
    }
    if (kConverts && rows_ > kDirectRows) {
      const float *keys32[kTileBlocks], *values32[kTileBlocks];
      for (int b = 0; b < kTileBlocks; ++b) {
        keys32[b] = keys32_ + b % kKeyBlocks * kLanes * step_.key_dim;
        values32[b] = values32_ + b * kLanes * step_.width;
      }
      for (int b = first / kKeyBlocks * kKeyBlocks; b < last; b += kKeyBlocks) {
        for (int i = std::max(b, first); i < std::min(b + kKeyBlocks, last); ++i)
          convert_keys(keys[i], pages[i], keys32_ + (i - b) * kLanes * step_.key_dim);
        score(keys32, keys32, b, std::min(b + kKeyBlocks, last));
      }
      soften_rows(seen);
      for (int b = first; b < last; ++b) convert_values(pages[b], next[b], values32_ + b * kLanes * step_.width);
      weigh(values32, values32, step_.width, seen);
    } else {
      const int step = block_count_ == 1 ? kTileBlocks : kKeyBlocks;
      for (int b = first; b < last; b += step) score(keys, pages, b, std::min(b + step, last));
      soften_rows(seen);
      weigh(pages, next, step_.value_dim, seen);
    }
  }

  // The positions of the tile that each token sees, what each block of rows sees, and what any row does.
  TilePart find_parts() {
    TilePart any;
    const std::int64_t tokens = rows_ / step_.group, blocks = (rows_ + kRowBlock - 1) / kRowBlock;
    for (std::int64_t t = 0; t < tokens; ++t) {
      parts_[t] = {clamp_to_tile(ranges_[t].begin), clamp_to_tile(ranges_[t].end)};
      any.join(parts_[t]);
    }
    for (std::int64_t i = 0; i < blocks; ++i) {  // as even as possible: 8 rows are 4 and 4
      RowBlock& block = blocks_[i] = RowBlock();
      block.row = rows_ * i / blocks;
      const std::int64_t end = rows_ * (i + 1) / blocks;
      block.rows = static_cast<int>(end - block.row);
      for (std::int64_t t = block.row / step_.group; t <= (end - 1) / step_.group; ++t) {
        block.any.join(parts_[t]);
        block.all.begin = std::max(block.all.begin, parts_[t].begin);
        block.all.end = std::min(block.all.end, parts_[t].end);
      }
      if (block.all.begin >= block.all.end) block.all = {kTile, kTile};
    }
    block_count_ = blocks;
    return any;
  }

  void find_page(std::int64_t page, const T*& keys, const T*& values) const {
    if (page >= branch_page_) {
      keys = branch_keys_ + (page - branch_page_) * cache_.key_page;
      values = branch_values_ + (page - branch_page_) * kLanes * step_.value_dim;
    } else {
      keys = cache_.key_page_of(sequence_, kv_head_, page);
      values = cache_.value_page_of(sequence_, kv_head_, page);
    }
  }

  void convert_keys(const T* page, const T* ahead, float* key) const {
    for (std::int64_t d = 0; d < step_.key_dim; ++d) {
      fetch(ahead + d * kLanes);
      if constexpr (std::is_same_v<T, bf16>) {
        f32x16 even, odd;
        split_pairs(page + d * kLanes, even, odd);
        store(key + d * kLanes, even);
        if (++d < step_.key_dim) store(key + d * kLanes, odd);
      } else {
        store(key + d * kLanes, load(page + d * kLanes));
      }
    }
  }

  void convert_values(const T* page, const T* ahead, float* value) const {
    for (int j = 0; j < kLanes; ++j, page += step_.value_dim, ahead += step_.value_dim, value += step_.width) {
      std::int64_t d = 0;
      for (; d + kLanes <= step_.value_dim; d += kLanes) {
        fetch(ahead + d);
        store(value + d, load(page + d));
      }
      if (d < step_.value_dim) store(value + d, load(page + d, static_cast<int>(step_.value_dim - d)));
    }
  }

  // One pass over the rows for each few blocks of keys, so that these stay in the nearest cache.
  template <class U>
  void score(const U* const* keys, const U* const* ahead, int first, int last) const {
    for (std::int64_t i = 0; i < block_count_; ++i) {
      const RowBlock& block = blocks_[i];
      const int begin = std::max(first, block.any.begin / kLanes), end = std::min(last, block.any.blocks_end());
      if (begin >= end) continue;
      RowKernels<U>::score[block.rows](q_ + block.row * step_.key_dim, step_.key_dim, keys, ahead, begin, end,
                                       scores_ + block.row * kTile);
    }
  }

  void soften_rows(const Seen& seen) const {
    const std::int64_t tokens = rows_ / step_.group;
    for (std::int64_t t = 0, row = 0; t < tokens; ++t) {
      const TilePart part = parts_[t];
      const float distance = static_cast<float>(tile_start_ - (ranges_[t].end - 1));
      for (std::int64_t g = 0; g < step_.group; ++g, ++row) {
        if (part.begin >= part.end) continue;
        soften(scores_ + row * kTile, part.begin, part.end, logit_of(g), distance, seen.largest[row], seen.sum[row]);
      }
    }
  }

  template <class U>
  void weigh(const U* const* pages, const U* const* ahead, std::int64_t dims, const Seen& seen) const {
    const std::int64_t width = step_.width;
    for (std::int64_t i = 0; i < block_count_; ++i) {
      const RowBlock& block = blocks_[i];
      // Positions that only some of the block's rows see are added row by row.
      for (int r = 0; r < block.rows; ++r) weigh_alone(block.row + r, pages, dims, {0, block.all.begin}, seen.values);
      if (block.all.begin >= block.all.end) continue;
      RowKernels<U>::weigh[block.rows](scores_ + block.row * kTile, pages, ahead, dims, block.all.begin, block.all.end,
                                       seen.values + block.row * width, width);
      for (int r = 0; r < block.rows; ++r) weigh_alone(block.row + r, pages, dims, {block.all.end, kTile}, seen.values);
    }
  }

  template <class U>
  void weigh_alone(std::int64_t row, const U* const* pages, std::int64_t dims, const TilePart& part,
                   float* values) const {
    if (part.begin >= part.end) return;
    const TilePart& own = parts_[row / step_.group];
    const int begin = std::max(part.begin, own.begin), end = std::min(part.end, own.end);
    if (begin >= end) return;
    RowKernels<U>::weigh[1](scores_ + row * kTile, pages, pages, dims, begin, end, values + row * step_.width,
                            step_.width);
  }

  Logit logit_of(std::int64_t head_in_group) const {
    Logit logit = step_.logit;
    if (const Tensor& slopes = step_.context.in[4]; slopes) {
      logit.slope = slopes.as<const float>()[(kv_head_ * step_.group + head_in_group) * slopes.stride[0]];
    }
    return logit;
  }

  // Divides by the sums, sinks included.
  void finish(const Job& job) {
    const Tensor &sinks = step_.context.in[3], &y = step_.context.out[0];
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t head = kv_head_ * step_.group + row % step_.group;
      float sum = seen_.sum[row], factor = 1;
      if (sinks) {
        const float sink = sinks.as<const float>()[head * sinks.stride[0]] * kLog2e;
        const float largest = seen_.largest[row] > sink ? seen_.largest[row] : sink;
        alignas(64) float weight[16] = {seen_.largest[row] - largest, sink - largest};
        store(weight, power_of_two(load(weight)));
        sum = sum * weight[0] + weight[1];
        factor = weight[0];
      }
      factor /= sum;
      const std::int64_t token = sequence_.first_row + job.first_token + row / step_.group;
      float* out = y.as<float>() + token * y.stride[0] + head * y.stride[1];
      for (std::int64_t d = 0; d < step_.value_dim; d += kLanes) {
        const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, step_.value_dim - d));
        store(out + d, load(seen_.values + row * step_.width + d) * factor, lanes);
      }
    }
  }

  const Step& step_;
  const CacheView<T> cache_;
  std::byte* next_;
  float *q_, *scores_;
  Seen tile_, seen_;
  Range* ranges_;    // of the job's tokens
  TilePart* parts_;  // of the same in the current tile
  RowBlock* blocks_;
  float *keys32_, *values32_;
  T *branch_keys_, *branch_values_;
  Sequence sequence_{};
  std::int64_t kv_head_ = 0, rows_ = 0, block_count_ = 0, tile_start_ = 0, last_page_ = 0, branch_page_ = 0;
};

}  // namespace llmc::LLMC_ISA
