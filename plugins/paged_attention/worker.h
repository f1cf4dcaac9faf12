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
  float* values;  // [tiles][rows][width]
  Seen* seen;     // [tiles][rows]
};

// Tokens first_token .. + tokens of a sequence, all heads of one kv head, tiles first_tile .. last_tile - 1.
struct Job {
  std::int32_t sequence, kv_head, first_token, tokens, first_tile, last_tile;
  bool branch;   // one token of a tree that is no chain
  Split* split;  // of jobs that share their rows with others
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
        tile_values_(take<float>(sizes.rows * step.width)),
        values_(take<float>(sizes.rows * step.width)),
        tile_seen_(take<Seen>(sizes.rows)),
        seen_(take<Seen>(sizes.rows)),
        ranges_(take<Range>(sizes.tokens)),
        keys32_(kConverts ? take<float>(kTile * step.key_dim) : nullptr),
        values32_(kConverts ? take<float>(kTile * step.width) : nullptr),
        branch_keys_(sizes.branch_rows ? take<T>(branch_pages(sizes.branch_rows) * cache_.key_page) : nullptr),
        branch_values_(sizes.branch_rows ? take<T>(branch_pages(sizes.branch_rows) * kLanes * step.value_dim)
                                         : nullptr) {}

  void run(const Job& job) {
    start(job);
    for (std::int64_t tile = job.first_tile; tile < job.last_tile; ++tile) {
      if (job.split != nullptr) {
        const std::int64_t part = (tile - job.split->first_tile) * rows_;
        attend(tile, job.split->values + part * step_.width, job.split->seen + part);
        continue;
      }
      attend(tile, tile_values_, tile_seen_);
      add(tile_values_, tile_seen_);
    }
    if (job.split != nullptr) {
      if (job.split->jobs_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      for (std::int64_t t = 0; t < job.split->tiles; ++t) {
        add(job.split->values + t * rows_ * step_.width, job.split->seen + t * rows_);
      }
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
    std::fill_n(values_, rows_ * step_.width, 0.0f);
    std::fill_n(seen_, rows_, Seen{});
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

  // The rows' visible part of a tile.
  int begin_of(std::int64_t row) const { return clamp_to_tile(ranges_[row / step_.group].begin); }
  int end_of(std::int64_t row) const { return clamp_to_tile(ranges_[row / step_.group].end); }
  int clamp_to_tile(std::int64_t position) const {
    return static_cast<int>(std::clamp<std::int64_t>(position - tile_start_, 0, kTile));
  }

  // One tile for all rows: their values [rows][width] relative to what they have seen.
  void attend(std::int64_t tile, float* values, Seen* seen) {
    tile_start_ = tile * kTile;
    const std::int64_t tokens = rows_ / step_.group;
    int begin = kTile, end = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      begin = std::min(begin, clamp_to_tile(ranges_[t].begin));
      end = std::max(end, clamp_to_tile(ranges_[t].end));
    }
    std::fill_n(values, rows_ * step_.width, 0.0f);
    if (begin >= end) {
      std::fill_n(seen, rows_, Seen{});
      return;
    }
    const T* keys[kTileBlocks];
    const T* pages[kTileBlocks];
    const int first = begin / kLanes, last = (end + kLanes - 1) / kLanes;
    for (int b = 0; b < kTileBlocks; ++b)
      find_page(tile * kTileBlocks + std::clamp(b, first, last - 1), keys[b], pages[b]);
    if (kConverts && rows_ > kDirectRows) {
      const float *keys32[kTileBlocks], *values32[kTileBlocks];
      convert(keys, pages, first, last, keys32, values32);
      attend_rows(keys32, values32, step_.width, values, seen);
    } else {
      attend_rows(keys, pages, step_.value_dim, values, seen);
    }
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

  void convert(const T* const* keys, const T* const* pages, int first, int last, const float** keys32,
               const float** values32) {
    for (int b = 0; b < kTileBlocks; ++b) {
      const int source = std::clamp(b, first, last - 1);
      float* key = keys32_ + source * step_.key_dim * kLanes;
      float* value = values32_ + source * kLanes * step_.width;
      keys32[b] = key;
      values32[b] = value;
      if (source != b) continue;
      for (std::int64_t d = 0; d < step_.key_dim; ++d) {
        if constexpr (std::is_same_v<T, bf16>) {
          f32x16 even, odd;
          split_pairs(keys[b] + d * kLanes, even, odd);
          store(key + d * kLanes, even);
          if (++d < step_.key_dim) store(key + d * kLanes, odd);
        } else {
          store(key + d * kLanes, load(keys[b] + d * kLanes));
        }
      }
      for (int j = 0; j < kLanes; ++j) {
        for (std::int64_t d = 0; d < step_.value_dim; d += kLanes) {
          const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, step_.value_dim - d));
          store(value + j * step_.width + d, load(pages[b] + j * step_.value_dim + d, lanes));
        }
      }
    }
  }

  template <class U>
  void attend_rows(const U* const* keys, const U* const* pages, std::int64_t dims, float* values, Seen* seen) {
    const std::int64_t blocks = (rows_ + kRowBlock - 1) / kRowBlock;
    for (std::int64_t i = 0; i < blocks; ++i) {  // as even as possible: 8 rows are 4 and 4
      const std::int64_t row = rows_ * i / blocks;
      attend_block(keys, pages, dims, row, static_cast<int>(rows_ * (i + 1) / blocks - row), values, seen);
    }
  }

  template <class U>
  void attend_block(const U* const* keys, const U* const* pages, std::int64_t dims, std::int64_t row, int rows,
                    float* values, Seen* seen) {
    using Kernels = RowKernels<U>;
    const std::int64_t width = step_.width;
    float* scores = scores_ + row * kTile;
    int first = kTile, last = 0, shared_begin = 0, shared_end = kTile;
    for (int r = 0; r < rows; ++r) {
      const int begin = begin_of(row + r), end = end_of(row + r);
      if (begin < end) {
        first = std::min(first, begin);
        last = std::max(last, end);
      }
      shared_begin = std::max(shared_begin, begin);
      shared_end = std::min(shared_end, end);
    }
    if (first < last) {
      Kernels::score[rows](q_ + row * step_.key_dim, step_.key_dim, keys, first / kLanes, (last + kLanes - 1) / kLanes,
                           scores);
    }
    if (shared_begin >= shared_end) shared_begin = shared_end = kTile;
    for (int r = 0; r < rows; ++r) {
      const int begin = begin_of(row + r), end = end_of(row + r);
      Seen& result = seen[row + r] = Seen{};
      if (begin >= end) continue;
      const std::int64_t token = (row + r) / step_.group;
      const float distance = static_cast<float>(tile_start_ - (ranges_[token].end - 1));
      result = soften(scores + r * kTile, begin, end, logit_of((row + r) % step_.group), distance);
      // positions that not all of the block's rows see
      weigh_alone(Kernels::weigh[1], row + r, pages, dims, begin, std::min(end, shared_begin), values);
    }
    if (shared_begin < shared_end) {
      Kernels::weigh[rows](scores, pages, dims, shared_begin, shared_end, values + row * width, width);
      for (int r = 0; r < rows; ++r)
        weigh_alone(Kernels::weigh[1], row + r, pages, dims, shared_end, end_of(row + r), values);
    }
  }

  template <class F, class U>
  void weigh_alone(F kernel, std::int64_t row, const U* const* pages, std::int64_t dims, int begin, int end,
                   float* values) {
    if (begin >= end) return;
    kernel(scores_ + row * kTile, pages, dims, begin, end, values + row * step_.width, step_.width);
  }

  Logit logit_of(std::int64_t head_in_group) const {
    Logit logit = step_.logit;
    if (const Tensor& slopes = step_.context.in[4]; slopes) {
      logit.slope = slopes.as<const float>()[(kv_head_ * step_.group + head_in_group) * slopes.stride[0]];
    }
    return logit;
  }

  void add(const float* values, const Seen* seen) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      add_seen(seen_[row], values_ + row * step_.width, seen[row], values + row * step_.width, step_.width);
    }
  }

  // Divides by the sums, sinks included.
  void finish(const Job& job) {
    const Tensor &sinks = step_.context.in[3], &y = step_.context.out[0];
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t head = kv_head_ * step_.group + row % step_.group;
      Seen seen = seen_[row];
      float factor = 1;
      if (sinks) {
        const float sink = sinks.as<const float>()[head * sinks.stride[0]];
        const float largest = seen.largest > sink ? seen.largest : sink;
        alignas(64) float weight[16] = {seen.largest - largest, sink - largest};
        store(weight, exp(load(weight)));
        seen.sum = seen.sum * weight[0] + weight[1];
        factor = weight[0];
      }
      factor /= seen.sum;
      const std::int64_t token = sequence_.first_row + job.first_token + row / step_.group;
      float* out = y.as<float>() + token * y.stride[0] + head * y.stride[1];
      for (std::int64_t d = 0; d < step_.value_dim; d += kLanes) {
        const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, step_.value_dim - d));
        store(out + d, load(values_ + row * step_.width + d) * factor, lanes);
      }
    }
  }

  const Step& step_;
  const CacheView<T> cache_;
  std::byte* next_;
  float *q_, *scores_, *tile_values_, *values_;
  Seen *tile_seen_, *seen_;
  Range* ranges_;
  float *keys32_, *values32_;
  T *branch_keys_, *branch_values_;
  Sequence sequence_{};
  std::int64_t kv_head_ = 0, rows_ = 0, tile_start_ = 0, branch_page_ = 0;
};

}  // namespace llmc::LLMC_ISA
