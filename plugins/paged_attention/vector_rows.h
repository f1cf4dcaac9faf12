// Tiles computed with vector instructions, for every dtype of the cache.
#pragma once
#include "job_rows.h"
#include "tile.h"

namespace llmc::LLMC_ISA {

template <class T>
class VectorRows : public JobRows<T> {
  using Base = JobRows<T>;
  using Base::cache_, Base::rows_, Base::step_, Base::parts_, Base::own_, Base::tokens_;

 public:
  // Rows above which a tile is converted to float32 once instead of at each use; int4 always is.
  static constexpr std::int64_t kDirectRows = std::is_same_v<T, i4> ? 0 : 2 * kRowBlock;
  // Rows of a job: enough to pay for the reading of a tile, few enough to stay in the nearest caches.
  static constexpr std::int64_t kMostRows = 96;

  VectorRows(const Step& step, const JobSizes& sizes, std::byte* memory)
      : Base(step, sizes, memory),
        q_(this->template take<float>(sizes.rows * step.key_dim)),
        scores_(this->template take<float>(sizes.rows * kTile)),
        blocks_(this->template take<RowBlock>(sizes.rows / kRowBlock + 1)),
        keys32_(kConverts ? this->template take<float>(kKeyBlocks * kLanes * step.key_dim) : nullptr),
        values32_(kConverts ? this->template take<float>(kTile * step.width) : nullptr) {}

  void run(const Job& job, const JobQueue& queue) {
    this->start(job);
    this->for_each_query(job, [&](std::int64_t row, const float* query, std::int64_t stride) {
      copy_row(query, stride, step_.key_dim, q_ + row * step_.key_dim);
    });
    if (this->walk(job, queue, [&](std::int64_t tile, const TilePart& any) { attend(tile, any); })) this->finish(job);
  }

 private:
  static constexpr bool kConverts = !std::is_same_v<T, float>;

  void attend(std::int64_t tile, const TilePart& any) {
    const Seen seen = this->seen_in_tile(0);
    std::fill_n(seen.values, rows_ * step_.width, 0.0f);
    const int first = any.begin / kLanes, last = any.blocks_end(), shared = std::min(last, own_);
    for (int b = 0; b < kTileBlocks; ++b) {
      this->find_page(tile * kTileBlocks + std::clamp(b, first, last - 1), keys_[b], pages_[b]);
      this->find_next_page(tile, b, next_[b], unused_);
    }
    if constexpr (kScaled<T>) find_scales(first, shared);
    find_blocks(0, rows_, {0, own_ * kLanes});
    score_tile(first, shared);
    for_each_branch(true, [&](int end) { score_tile(own_, end); });
    soften_rows(seen);
    if (own_ < last) find_blocks(0, rows_, {0, own_ * kLanes});
    weigh_tile(first, shared, seen);
    for_each_branch(false, [&](int end) { weigh_tile(own_, end, seen); });
    this->settle(0, rows_);
  }

  // Calls f(end) for the tokens that see pages of their own: blocks own_ .. end - 1, whose keys, or values, are laid
  // out; find_blocks has found the token's rows.
  template <class F>
  void for_each_branch(bool keys, F&& f) {
    if (own_ == kTileBlocks) return;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      if (parts_[t].begin >= parts_[t].end || parts_[t].blocks_end() <= own_) continue;
      this->lay_out_branch(t, keys, !keys);
      find_blocks(t * step_.group, (t + 1) * step_.group, {own_ * kLanes, kTile});
      f(parts_[t].blocks_end());
    }
  }

  // Whether the blocks are few enough to be read as they are stored.
  bool is_direct() const {
    return kDirectRows > 0 &&
           (!kConverts ||
            blocks_[block_count_ - 1].row + blocks_[block_count_ - 1].rows - blocks_[0].row <= kDirectRows);
  }

  void score_tile(int first, int last) {
    if (is_direct()) {
      const int step = block_count_ == 1 ? kTileBlocks : kKeyBlocks;
      if constexpr (kDirectRows > 0) {
        for (int b = first; b < last; b += step) score(keys_, pages_, b, std::min(b + step, last));
      }
      return;
    }
    const float* keys32[kTileBlocks];
    for (int b = 0; b < kTileBlocks; ++b) keys32[b] = keys32_ + b % kKeyBlocks * kLanes * step_.key_dim;
    for (int b = first / kKeyBlocks * kKeyBlocks; b < last; b += kKeyBlocks) {
      const int begin = std::max(b, first), end = std::min(b + kKeyBlocks, last);
      for (int i = begin; i < end; ++i) convert_keys(keys_[i], pages_[i], keys32_ + (i - b) * kLanes * step_.key_dim);
      score(keys32, keys32, begin, end);
    }
  }

  void weigh_tile(int first, int last, const Seen& seen) const {
    if (is_direct()) {
      if constexpr (kDirectRows > 0) weigh(pages_, next_, step_.value_dim, seen);
      return;
    }
    const float* values32[kTileBlocks];
    for (int b = 0; b < kTileBlocks; ++b) values32[b] = values32_ + b * kLanes * step_.width;
    for (int b = first; b < last; ++b) convert_values(pages_[b], next_[b], values32_ + b * kLanes * step_.width);
    weigh(values32, values32, step_.width, seen);
  }

  void find_blocks(std::int64_t first, std::int64_t last, const TilePart& clip) {
    clip_ = clip;
    block_count_ = 0;
    this->for_each_block(first, last, clip, [&](const RowBlock& block) { blocks_[block_count_++] = block; });
  }

  void find_scales(int first, int last) {
    for (int b = first; b < last; ++b) {
      store(key_scales_ + b * kLanes, load_scales(keys_[b], cache_.key_page));
      store(value_scales_ + b * kLanes, load_scales(pages_[b], cache_.value_page));
    }
  }

  void convert_keys(const T* page, const T* ahead, float* key) const {
    if constexpr (std::is_same_v<T, i4>) {
      fetch_page(ahead, cache_.key_page);
      for_each_key(page, cache_.key_page, step_.key_dim, [&](std::int64_t d, const f32x16& even, const f32x16& odd) {
        store(key + d * kLanes, even);
        if (d + 1 < step_.key_dim) store(key + (d + 1) * kLanes, odd);
      });
      return;
    }
    for (std::int64_t d = 0; d < step_.key_dim; ++d) {
      fetch(ahead + d * kLanes);
      if constexpr (std::is_same_v<T, bf16>) {
        f32x16 even, odd;
        load_split(page + d * kLanes, even, odd);
        store(key + d * kLanes, even);
        if (++d < step_.key_dim) store(key + d * kLanes, odd);
      } else if constexpr (!std::is_same_v<T, i4>) {
        store(key + d * kLanes, load(page + d * kLanes));
      }
    }
  }

  void convert_values(const T* page, const T* ahead, float* value) const {
    if constexpr (std::is_same_v<T, i4>) {
      fetch_page(ahead, cache_.value_page);
      for_each_value(page, cache_.value_page, step_.value_dim,
                     [&](int j, std::int64_t d, const f32x16(&low)[2], const f32x16(&high)[2]) {
                       for (int i = 0; i < 2; ++i) {
                         float* out = value + (j + i) * step_.width + d;
                         store(out, low[i]);
                         if (d + kLanes < step_.width) store(out + kLanes, high[i]);
                       }
                     });
      return;
    }
    for (int j = 0; j < kLanes; ++j, page += step_.value_dim, ahead += step_.value_dim, value += step_.width) {
      std::int64_t d = 0;
      if constexpr (!std::is_same_v<T, i4>) {
        for (; d + kLanes <= step_.value_dim; d += kLanes) {
          fetch(ahead + d);
          store(value + d, load(page + d));
        }
        if (d < step_.value_dim) store(value + d, load(page + d, static_cast<int>(step_.value_dim - d)));
      }
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

  void soften_rows(const Seen& seen) {
    this->for_each_alike(
        0, rows_, [&](std::int64_t row, int count, const TilePart& part, const Logit& logit, float distance) {
          if (part.begin >= part.end) return;
          if constexpr (kScaled<T>) {
            if (part.blocks_end() > own_) {
              this->lay_out_branch(row / step_.group, true, true);
              find_scales(own_, part.blocks_end());
            }
          }
          constexpr decltype(&soften<1>) run[] = {nullptr, soften<1>, soften<2>, soften<3>, soften<4>};
          if constexpr (kScaled<T>) scale_rows(scores_ + row * kTile, count, part, key_scales_);
          run[count](scores_ + row * kTile, part.begin, part.end, logit, distance, seen.largest + row, seen.sum + row);
          if constexpr (kScaled<T>) scale_rows(scores_ + row * kTile, count, part, value_scales_);
        });
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
    const TilePart own = this->clipped(row / step_.group, clip_);
    const int begin = std::max(part.begin, own.begin), end = std::min(part.end, own.end);
    if (begin >= end) return;
    RowKernels<U>::weigh[1](scores_ + row * kTile, pages, pages, dims, begin, end, values + row * step_.width,
                            step_.width);
  }

  float *q_, *scores_;
  RowBlock* blocks_;
  std::int64_t block_count_ = 0;
  TilePart clip_;
  const T *keys_[kTileBlocks], *pages_[kTileBlocks], *next_[kTileBlocks], *unused_;  // of the current tile
  float *keys32_, *values32_;
  alignas(64) float key_scales_[kTile], value_scales_[kTile];
};

}  // namespace llmc::LLMC_ISA
