// One thread's share of an attention step, apart from the arithmetic of a tile.
#pragma once
#include "job.h"

namespace llmc::LLMC_ISA {

// Tokens that queries are fetched ahead: they are strewn over more memory than the nearest caches hold.
constexpr std::int64_t kQueriesAhead = 4;
constexpr std::int64_t kResultsAhead = 8;  // rows, for the same reason

// Pages of a tree's branch: those of so many rows, and the one in which they start.
inline std::int64_t branch_pages(std::int64_t rows) { return rows / kLanes + 2; }

// The largest of any job. branch_rows is 0 where there are no trees.
struct JobSizes {
  std::int64_t rows, tokens, branch_rows;
};

// The rows of the current job: what they see, where that is, and what they have seen. Derived classes compute tiles.
template <class T>
class JobRows {
 public:
  // Bytes of memory that were laid out.
  std::size_t bytes() const { return used_; }

 protected:
  // Lays its arrays out in `memory`, or only counts them if that is null.
  JobRows(const Step& step, const JobSizes& sizes, std::byte* memory)
      : step_(step),
        cache_(step.context.kv, step.slot),
        memory_(memory),
        tile_(take_seen(sizes.rows)),
        seen_(take_seen(sizes.rows)),
        ranges_(take<Range>(sizes.tokens)),
        parts_(take<TilePart>(sizes.tokens)),
        turning_(take<float>(2 * std::max(step.width, padded(step.key_dim)))),
        shifts_(take<float>(sizes.rows)),
        branch_keys_(take_branch(sizes.branch_rows, cache_.key_page)),
        branch_values_(take_branch(sizes.branch_rows, cache_.value_page)) {}

  template <class U>
  U* take(std::int64_t count) {
    std::byte* array = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(U) + 63) / 64 * 64;
    return reinterpret_cast<U*>(array);
  }

  static std::int64_t padded(std::int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }

  Seen take_seen(std::int64_t rows) {
    float *largest = take<float>(padded(rows)), *sum = take<float>(padded(rows));
    return {largest, sum, take<float>(padded(rows) * step_.width)};
  }

  std::byte* take_branch(std::int64_t rows, const PageLayout& layout) {
    return rows == 0 ? nullptr : take<std::byte>(branch_pages(rows) * layout.bytes());
  }
  T* branch_keys(std::int64_t page) const {
    return reinterpret_cast<T*>(branch_keys_ + (page - branch_page_) * cache_.key_page.bytes());
  }
  T* branch_values(std::int64_t page) const {
    return reinterpret_cast<T*>(branch_values_ + (page - branch_page_) * cache_.value_page.bytes());
  }

  void start(const Job& job) {
    sequence_ = sequence_of(step_.context.batch, job.sequence);
    kv_head_ = job.kv_head;
    tokens_ = job.tokens;
    rows_ = job.tokens * step_.group;
    all_see_ = {0, std::numeric_limits<std::int64_t>::max()};
    for (std::int64_t t = 0; t < tokens_; ++t) {
      ranges_[t] = visible(step_, sequence_, job.first_token + t);
      all_see_ = {std::max(all_see_.begin, ranges_[t].begin), std::min(all_see_.end, ranges_[t].end)};
    }
    parts_whole_ = false;
    clear(seen_);
    std::fill_n(seen_.values, rows_ * step_.width, 0.0f);
    last_page_ = 0;
    for (std::int64_t t = 0; t < tokens_; ++t) last_page_ = std::max(last_page_, (ranges_[t].end - 1) / kLanes);
    branch_page_ = std::numeric_limits<std::int64_t>::max();
    if (job.branch) start_branches(job.first_token);
  }

  // Calls attend(tile, any) for the job's tiles, where any is what any of the rows sees of it. True if the rows are
  // then complete: not if other jobs of a split still have to add their tiles.
  template <class F>
  bool walk(const Job& job, const JobQueue& queue, F&& attend) {
    split_ = job.split;
    for (std::int64_t tile = job.first_tile; tile < job.last_tile; ++tile) {
      tile_start_ = tile * kTile;
      following_ = tile + 1 == job.last_tile ? queue.following() : nullptr;
      const TilePart any = find_parts();
      own_ = clamp_to_tile(std::min(branch_page_, last_page_ + kTileBlocks) * kLanes) / kLanes;
      whole_ = parts_whole_ && own_ == kTileBlocks;
      clear(seen_in_tile(0));
      if (any.begin < any.end) attend(tile, any);
    }
    if (split_ == nullptr) return true;
    if (split_->jobs_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    for (std::int64_t t = 0; t < split_->tiles; ++t) add_tile(seen_, split_->seen[t], rows_, step_.width);
    return true;
  }

  // Where rows from `row` on leave what they see of the current tile; afterwards these rows are settled.
  Seen seen_in_tile(std::int64_t row) const {
    return behind(split_ != nullptr ? split_->seen[tile_start_ / kTile - split_->first_tile] : tile_, row);
  }
  void settle(std::int64_t row, std::int64_t count) {
    if (split_ == nullptr) add_tile(behind(seen_, row), behind(tile_, row), count, step_.width);
  }
  Seen behind(const Seen& seen, std::int64_t row) const {
    return {seen.largest + row, seen.sum + row, seen.values + row * step_.width};
  }

  // The query of a row of the job, as it meets the keys that are stored.
  template <class F>
  void for_each_query(const Job& job, F&& f) {
    const Tensor& q = step_.context.in[0];
    const Shift shift(step_.context, kKeyShift, kv_head_);
    value_shift_ = Shift(step_.context, kValueShift, kv_head_);
    std::int64_t row = 0;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const std::int64_t token = sequence_.first_row + job.first_token + t;
      for (std::int64_t g = 0; g < step_.group; ++g, ++row) {
        const float* query = q.as<const float>() + token * q.stride[0] + (kv_head_ * step_.group + g) * q.stride[1];
        if (t + kQueriesAhead < tokens_) {
          for (std::int64_t d = 0; d < step_.key_dim; d += kLanes) fetch(query + kQueriesAhead * q.stride[0] + d);
        }
        shifts_[row] = shift_of(query, q.stride[2], shift);
        if (kRotated<T> || shift.scale != nullptr) {
          turn_query(query, q.stride[2], shift);
          f(row, turning_, 1);
        } else {
          f(row, query, q.stride[2]);
        }
      }
    }
  }

  TilePart clipped(std::int64_t t, const TilePart& clip) const {
    return {std::max(clip.begin, parts_[t].begin), std::min(clip.end, parts_[t].end)};
  }

  // Calls f for rows first .. last - 1 in blocks that are as even as possible, of at most kRows; and for what they
  // see of positions `clip`.
  template <int kRows = kRowBlock, class F>
  void for_each_block(std::int64_t first, std::int64_t last, const TilePart& clip, F&& f) const {
    const std::int64_t rows = last - first, count = (rows + kRows - 1) / kRows, group = step_.group;
    RowBlock block;
    block.row = first;
    for (std::int64_t i = 0; i < count; ++i, block.row += block.rows) {
      const std::int64_t end = first + rows * (i + 1) / count;
      block.rows = static_cast<int>(end - block.row);
      block.any = {}, block.all = {0, kTile};
      if (whole_) block.any = block.all;
      for (std::int64_t t = block.row / group; !whole_ && t * group < end; ++t) {
        const TilePart part = clipped(t, clip);
        block.any.join(part);
        block.all.begin = std::max(block.all.begin, part.begin);
        block.all.end = std::min(block.all.end, part.end);
      }
      if (block.all.begin >= block.all.end) block.all = {kTile, kTile};
      f(block);
    }
  }

  // Calls f(row, rows, part, logit, distance) for rows first .. last - 1, up to four at a time of those that see the
  // same.
  template <class F>
  void for_each_alike(std::int64_t first, std::int64_t last, F&& f) const {
    const std::int64_t group = step_.group;
    const auto whole = [&](std::int64_t t) {
      return own_ == kTileBlocks && parts_[t].begin == 0 && parts_[t].end == kTile;
    };
    for (std::int64_t row = first; row < last;) {
      const std::int64_t t = row / group;
      std::int64_t end = (t + 1) * group;
      while (whole(t) && end < std::min(row + 4, last) && whole(end / group)) end += group;
      const std::int64_t alike = std::min(end, last) - row;
      const Logit logit = logit_of(row);
      const int count = logit.plain() ? static_cast<int>(std::min<std::int64_t>(alike, 4)) : 1;
      f(row, count, parts_[t], logit, static_cast<float>(tile_start_ - (ranges_[t].end - 1)));
      row += count;
    }
  }

  // Keys and values of 16 positions.
  void find_page(std::int64_t page, const T*& keys, const T*& values) const {
    if (page >= branch_page_) {
      keys = branch_keys(page);
      values = branch_values(page);
    } else {
      keys = cache_.key_page_of(sequence_, kv_head_, page);
      values = cache_.value_page_of(sequence_, kv_head_, page);
    }
  }

  // Block b of the tile that comes next, maybe of another job.
  void find_next_page(std::int64_t tile, int b, const T*& keys, const T*& values) const {
    if (following_ == nullptr) return find_page(std::min((tile + 1) * kTileBlocks + b, last_page_), keys, values);
    const Sequence sequence = sequence_of(step_.context.batch, following_->sequence);
    const std::int64_t last = (sequence.past + sequence.rows - 1) / kLanes;
    const std::int64_t page = std::min<std::int64_t>(following_->first_tile * kTileBlocks + b, last);
    keys = cache_.key_page_of(sequence, following_->kv_head, page);
    values = cache_.value_page_of(sequence, following_->kv_head, page);
  }

  int clamp_to_tile(std::int64_t position) const {
    return static_cast<int>(std::clamp<std::int64_t>(position - tile_start_, 0, kTile));
  }

  // Divides by the sums, sinks included.
  void finish(const Job& job) {
    const Tensor &sinks = step_.context.in[3], &y = step_.context.out[0];
    const auto result = [&](std::int64_t row) {
      const std::int64_t t = row / step_.group, head = kv_head_ * step_.group + row - t * step_.group;
      return y.as<float>() + (sequence_.first_row + job.first_token + t) * y.stride[0] + head * y.stride[1];
    };
    for (std::int64_t row = 0; row < rows_; ++row) {
      float sum = seen_.sum[row], factor = 1, share = 1;
      if (sinks) {
        const std::int64_t head = kv_head_ * step_.group + row % step_.group;
        const float shift = step_.logit.softcap == 0 ? shifts_[row] : 0;  // with a softcap the logits have it
        const float sink = (sinks.as<const float>()[head * sinks.stride[0]] - shift) * kLog2e;
        const float largest = seen_.largest[row] > sink ? seen_.largest[row] : sink;
        alignas(64) float weight[16] = {seen_.largest[row] - largest, sink - largest};
        store(weight, power_of_two(load(weight)));
        const float seen = sum * weight[0];
        sum = sum * weight[0] + weight[1];
        factor = weight[0];
        share = seen / sum;
      }
      factor /= sum;
      float* out = result(row);
      if (row + kResultsAhead < rows_) {
        const float* ahead = result(row + kResultsAhead);
        for (std::int64_t d = 0; d < step_.value_dim; d += kLanes) fetch(ahead + d);
      }
      const float* values = seen_.values + row * step_.width;
      if constexpr (kRotatesValues<T>) {
        std::copy_n(values, step_.value_dim, turning_);
        rotate(turning_, step_.value_dim, turning_ + step_.width);
        values = turning_;
      }
      std::int64_t d = 0;
      for (; !value_shift_ && d + kLanes <= step_.value_dim; d += kLanes) store(out + d, load(values + d) * factor);
      for (; d < step_.value_dim; d += kLanes) {
        const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, step_.value_dim - d));
        f32x16 x = load(values + d) * factor;
        if (value_shift_.scale != nullptr) x = x / load(value_shift_.scale + d, lanes);
        if (value_shift_.center != nullptr) x = fmadd(load(value_shift_.center + d, lanes), broadcast(share), x);
        store(out + d, x, lanes);
      }
    }
  }

 private:
  void clear(const Seen& seen) const {  // but for the values
    std::fill_n(seen.largest, padded(rows_), kNothing);
    std::fill_n(seen.sum, padded(rows_), 0.0f);
  }

  // What each token sees of the tile, and what any of them does.
  TilePart find_parts() {
    const TilePart all{clamp_to_tile(all_see_.begin), clamp_to_tile(all_see_.end)};
    const bool were_whole = parts_whole_;
    parts_whole_ = all.begin == 0 && all.end == kTile;
    if (were_whole && parts_whole_) return all;  // which is usual, and nothing is to be done
    TilePart any;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      parts_[t] = {clamp_to_tile(ranges_[t].begin), clamp_to_tile(ranges_[t].end)};
      any.join(parts_[t]);
    }
    return any;
  }

  Logit logit_of(std::int64_t row) const {
    Logit logit = step_.logit;
    if (const Tensor& slopes = step_.context.in[4]; slopes) {
      logit.slope = slopes.as<const float>()[(kv_head_ * step_.group + row % step_.group) * slopes.stride[0]];
    }
    logit.shift = shifts_[row];
    return logit;
  }

  // What the logits of a query lack where its keys are stored without their center: the softmax does not see it, but
  // softcaps and sinks do.
  float shift_of(const float* query, std::int64_t stride, const Shift& shift) const {
    float sum = 0;
    if (shift.center == nullptr || (step_.logit.softcap == 0 && !step_.context.in[3])) return sum;
    for (std::int64_t d = 0; d < step_.key_dim; ++d) sum += query[d * stride] * shift.center[d];
    return sum * step_.logit.scale;
  }

  void turn_query(const float* query, std::int64_t stride, const Shift& shift) {
    const std::int64_t dims = step_.key_dim;
    copy_row(query, stride, dims, turning_);
    for (std::int64_t d = 0; shift.scale != nullptr && d < dims; ++d) turning_[d] /= shift.scale[d];
    if constexpr (kRotated<T>) rotate(turning_, dims, turning_ + padded(dims));
  }

  // From the page on in which a tree begins its tokens see pages of their own. What is before the tree is the same in
  // all of them.
  void start_branches(std::int64_t first_token) {
    const std::int64_t past = sequence_.past;
    branch_page_ = past / kLanes;
    first_token_ = first_token;
    laid_keys_ = laid_values_ = -1;
    const auto pages = static_cast<std::size_t>(last_page_ - branch_page_ + 1);  // with numbers, whatever was there
    std::memset(branch_keys_, 0, pages * static_cast<std::size_t>(cache_.key_page.bytes()));
    std::memset(branch_values_, 0, pages * static_cast<std::size_t>(cache_.value_page.bytes()));
    std::int64_t begin = past;
    for (std::int64_t t = 0; t < tokens_; ++t) begin = std::min(begin, ranges_[t].begin);
    for (std::int64_t p = std::max(branch_page_ * kLanes, begin); p < past; ++p) copy_to_branch(p, p, true, true);
  }

 protected:
  // Copies a token's ancestors to the positions that they will have if the branch is accepted, so that it sees the same
  // tiles as without a tree. They stay there until it is another token's turn.
  void lay_out_branch(std::int64_t t, bool keys, bool values) {
    keys &= laid_keys_ != t;
    values &= laid_values_ != t;
    if (keys) laid_keys_ = t;
    if (values) laid_values_ = t;
    if (!keys && !values) return;
    const std::int64_t past = sequence_.past;
    const std::uint64_t* bits = tree_bits(step_.context.batch, sequence_, first_token_ + t);
    std::int64_t position = past;
    for (std::int64_t w = 0; w < step_.context.batch.tree_words; ++w) {
      for (std::uint64_t word = bits[w]; word != 0; word &= word - 1) {
        copy_to_branch(past + w * 64 + __builtin_ctzll(word), position++, keys, values);
      }
    }
  }

 private:
  void copy_to_branch(std::int64_t from, std::int64_t to, bool keys, bool values) {
    const auto copy = [&](bool is_key, const PageLayout& layout, const T* page, T* to_page) {
      copy_position(kKvType<T>, is_key, layout, reinterpret_cast<const std::byte*>(page), from % kLanes,
                    reinterpret_cast<std::byte*>(to_page), to % kLanes);
    };
    const std::int64_t page = from / kLanes, to_page = to / kLanes;
    if (keys) copy(true, cache_.key_page, cache_.key_page_of(sequence_, kv_head_, page), branch_keys(to_page));
    if (values) copy(false, cache_.value_page, cache_.value_page_of(sequence_, kv_head_, page), branch_values(to_page));
  }

 protected:
  const Step& step_;
  const CacheView<T> cache_;

 private:
  std::byte* memory_;
  std::size_t used_ = 0;

 protected:
  Seen tile_, seen_;
  Split* split_ = nullptr;
  const Job* following_ = nullptr;  // that comes next, in the last tile of a job
  Range* ranges_;                   // of the job's tokens
  TilePart* parts_;                 // of the same in the current tile
  float* turning_;                  // room to rotate a query or a result in
  float* shifts_;                   // of the rows: what their logits lack
  Shift value_shift_;
  std::byte *branch_keys_, *branch_values_;
  Sequence sequence_{};
  std::int64_t kv_head_ = 0, tokens_ = 0, rows_ = 0, tile_start_ = 0, last_page_ = 0, branch_page_ = 0;
  std::int64_t first_token_ = 0, laid_keys_ = -1,
               laid_values_ = -1;  // of the tree; the tokens whose branch is laid out
  int own_ = kTileBlocks;          // block of the tile from which on each token has pages of its own
  bool whole_ = false;             // all of the rows see all of the tile, and none has pages of its own

 private:
  Range all_see_{};           // by all of the job's tokens
  bool parts_whole_ = false;  // all of parts_ are the whole tile
};

}  // namespace llmc::LLMC_ISA
