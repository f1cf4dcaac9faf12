// Tiles of a bf16 or quantized cache computed with products of pairs: queries and weights are rounded to bf16, sums are
// float32; with an int8 cache all is in integers, queries and weights having 15 bits. A row's result does not depend on
// the others.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include "job_rows.h"
#include "pair_soft.h"

namespace llmc::LLMC_ISA {

template <class T>
class PairRows : public JobRows<T> {
  using Base = JobRows<T>;
  using Base::cache_, Base::rows_, Base::step_, Base::parts_, Base::own_, Base::whole_;

 public:
  static constexpr std::int64_t kMostRows = 192;

  PairRows(const Step& step, const JobSizes& sizes, std::byte* memory)
      : Base(step, sizes, memory),
        depth_((step.key_dim + 1) / 2 * 2),
        q_(this->template take<Number>(sizes.rows * depth_ + kLanes)),
        scores_(this->template take<float>(kGroup * kTile)),
        weights_(this->template take<Number>(kGroup * kTile)),
        values_(this->template take<Number>(kTile * step.width)),
        keys_of_codes_(kQuantized<T> ? this->template take<Number>(kTile * depth_) : nullptr),
        sums_(kInteger ? this->template take<float>(kGroup * step.width) : nullptr),
        query_factors_(kInteger ? this->template take<float>(sizes.rows) : nullptr) {}

  void run(const Job& job, const JobQueue& queue) {
    this->start(job);
    this->for_each_query(job, [&](std::int64_t row, const float* query, std::int64_t stride) {
      if constexpr (kInteger) {
        query_factors_[row] = round_query(query, q_ + row * depth_);  // it was rotated, so it is contiguous
      } else {
        convert_row(query, stride, step_.key_dim, q_ + row * depth_);
      }
    });
    if (this->walk(job, queue, [&](std::int64_t tile, const TilePart& any) { attend(tile, any); })) this->finish(job);
  }

 private:
  static constexpr bool kInteger = std::is_same_v<T, i8>;
  using Number = std::conditional_t<kInteger, std::int16_t, bf16>;
  static constexpr bool kStored = !std::is_same_v<T, i4>;  // numbers can be read while they are multiplied,
  // as they are for so few rows; codes of fp8 take longer
  static constexpr std::int64_t kDirectRows = !kStored ? 0 : std::is_same_v<T, e4m3> ? 8 : 2 * kRowBlock;
  // Rows that go through all steps of a tile before the next ones: what they use stays in the nearest cache.
  static constexpr std::int64_t kGroup = 8 * kRowBlock;

  // A query as integers of which sums over products with codes are in reach of 32 bits; gives the factor of these.
  // What it writes behind the last dim belongs to the next row, which is written later.
  float round_query(const float* x, std::int16_t* out) const {
    const std::int64_t dims = step_.key_dim, most = std::numeric_limits<std::int32_t>::max() / (127 * dims);
    const PartScale scale(largest_magnitude(x, dims), static_cast<float>(std::min<std::int64_t>(32767, most)));
    for (std::int64_t d = 0; d < dims; d += kLanes) {
      const f32x16 v = load(x + d, static_cast<int>(std::min<std::int64_t>(kLanes, dims - d))) * scale.inverse;
      const __m512i q = scale.inverse != 0 ? _mm512_cvtps_epi32(v.v) : _mm512_setzero_si512();
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), _mm512_cvtepi32_epi16(q));
    }
    return scale.factor;
  }

  void attend(std::int64_t tile, const TilePart& any) {
    const int first = any.begin / kLanes, last = any.blocks_end();
    for (int b = 0; b < kTileBlocks; ++b) {
      this->find_page(tile * kTileBlocks + std::clamp(b, first, last - 1), keys_[b], pages_[b]);
      this->find_next_page(tile, b, next_keys_[b], next_pages_[b]);
      if constexpr (kQuantized<T>) {
        operands_[b] = keys_of_codes_ + b * kLanes * depth_;
      } else {
        operands_[b] = keys_[b];
      }
    }
    prepare_keys(first, std::min(last, own_));
    prepare_values(first, std::min(last, own_));
    for (std::int64_t row = 0; row < rows_; row += kGroup) attend_rows(row, std::min(kGroup, rows_ - row));
  }

  // Whether the rows are so few that keys and values are multiplied as they are stored. What comes next is fetched
  // meanwhile: of codes the next tile; two tiles of bf16 would not stay in the nearest cache, so with the keys of a
  // tile its values are fetched, and with these the next keys.
  bool is_direct() const { return rows_ <= kDirectRows; }

  // Blocks first .. last - 1 of the tile's keys as operands, and of its values.
  void prepare_keys(int first, int last) {
    if constexpr (!kQuantized<T>) {
      for (int b = first; b < last && !is_direct(); ++b) fetch_page(next_keys_[b], cache_.key_page);
    } else {
      for (int b = first; b < last; ++b) {
        if constexpr (kScaled<T>) store(key_scales_ + b * kLanes, load_scales(keys_[b], cache_.key_page));
        if (is_direct()) {
          if constexpr (kScaled<T>) fetch(CacheView<T>::template scales_of<float>(next_keys_[b], cache_.key_page));
          continue;
        }
        fetch_page(next_keys_[b], cache_.key_page);
        Number* out = keys_of_codes_ + b * kLanes * depth_;
        if constexpr (kStored) {
          pair_key_words(keys_[b], step_.key_dim, out);
        } else {
          pair_keys(keys_[b], cache_.key_page, step_.key_dim, depth_, out);
        }
      }
    }
  }
  void prepare_values(int first, int last) {
    const std::int64_t step = kLanes * kLanes;
    for (int b = first; b < last; ++b) {
      if constexpr (kQuantized<T>) {
        store(factors_ + b * kLanes, value_factors(pages_[b], cache_.value_page, step_.value_dim));
      }
      if (is_direct()) {
        if constexpr (kScaled<T>) fetch(CacheView<T>::template scales_of<float>(next_pages_[b], cache_.value_page));
        continue;
      }
      fetch_page(next_pages_[b], cache_.value_page);
      Number* out = values_ + b * kLanes * step_.width;
      if constexpr (kStored) {
        pair_value_words(pages_[b], step_.value_dim, step, out);
      } else {
        pair_page(pages_[b], cache_.value_page, step_.value_dim, step, out);
      }
    }
  }

  void attend_rows(std::int64_t first, std::int64_t count) {
    TilePart part;
    if (whole_) part = {0, kTile};
    bool softly = !kInteger && step_.logit.plain() && !step_.context.in[4];
    for (std::int64_t t = first / step_.group; !whole_ && t <= (first + count - 1) / step_.group; ++t) {
      part.join(parts_[t]);
      softly &= parts_[t].begin == 0;
    }
    if (part.begin >= part.end) return;
    const Seen seen = this->seen_in_tile(first);
    if (own_ < kTileBlocks) return attend_branches(first, count, seen);
    if (!softly) {
      score(first, first, first + count, {0, kTile});
      soften_rows(first, count, seen);
    } else {
      score_softly(first, count, seen);
    }
    Target target{seen.values, true};
    if constexpr (kInteger) target.factors = weight_factors_;
    if (this->split_ == nullptr) {
      const Seen total = this->behind(this->seen_, first);
      for (std::int64_t r = 0; r < count; r += kLanes) join_sums(total, seen, r, before_ + r, now_ + r);
      target = {total.values, true, before_, now_, target.factors};
    }
    weigh(first, first, first + count, {0, kTile}, target);
  }

  // The same of a tile in which tokens see pages of their own.
  void attend_branches(std::int64_t first, std::int64_t count, const Seen& seen) {
    float* values = kInteger ? sums_ : seen.values;
    std::fill_n(values, count * step_.width, 0.0f);
    const TilePart shared{0, own_ * kLanes}, own{own_ * kLanes, kTile};
    score(first, first, first + count, shared);
    for_each_branch(first, count, true, [&](std::int64_t row, std::int64_t end) { score(first, row, end, own); });
    soften_rows(first, count, seen);
    weigh(first, first, first + count, shared, {values, false});
    for_each_branch(first, count, false,
                    [&](std::int64_t row, std::int64_t end) { weigh(first, row, end, own, {values, false}); });
    if constexpr (kInteger) {
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t d = 0; d < step_.width; d += kLanes) {
          store(seen.values + r * step_.width + d, load_integers(sums_ + r * step_.width + d) * weight_factors_[r]);
        }
      }
    }
    Base::settle(first, count);
  }

  // Calls f(row, end) for the tokens that see pages of their own, whose keys, or values, are laid out; these are their
  // rows among those from `first` on.
  template <class F>
  void for_each_branch(std::int64_t first, std::int64_t count, bool keys, F&& f) {
    if (own_ == kTileBlocks) return;
    const std::int64_t group = step_.group;
    for (std::int64_t t = first / group; t <= (first + count - 1) / group; ++t) {
      if (parts_[t].begin >= parts_[t].end || parts_[t].blocks_end() <= own_) continue;
      this->lay_out_branch(t, keys, !keys);
      const int from = std::max(parts_[t].begin / kLanes, own_);
      if (keys) {
        prepare_keys(from, parts_[t].blocks_end());
      } else {
        prepare_values(from, parts_[t].blocks_end());
      }
      f(std::max(first, t * group), std::min(first + count, (t + 1) * group));
    }
  }

  // Calls f with the keys of the tile.
  template <class F>
  void with_keys(F&& f) const {
    if constexpr (!kQuantized<T>) {
      if (is_direct()) return f(PairedKeys<Number, true>{keys_, pages_});
      return f(PairedKeys<Number, false>{keys_, nullptr});
    } else {
      if constexpr (kStored) {
        if (is_direct()) return f(StoredKeys<T, Number>{keys_, next_keys_});
      }
      f(PairedKeys<Number, false>{operands_, nullptr});
    }
  }

  // Rows begin .. end - 1 of the group that starts at row `first`, and positions `clip`.
  void score(std::int64_t first, std::int64_t begin, std::int64_t end, const TilePart& clip) const {
    with_keys([&]<class Keys>(const Keys& keys) {
      this->for_each_block(begin, end, clip, [&](const RowBlock& block) {
        if (block.any.begin >= block.any.end) return;
        kScorePairs<Keys>[block.rows](q_ + block.row * depth_, depth_, keys, block.any.begin / kLanes,
                                      block.any.blocks_end(), scores_ + (block.row - first) * kTile);
      });
    });
  }

  // Weights of rows that see the tile from its first position on, with plain logits; at a time of those that end in the
  // same block, as evenly as possible: the sums of a single row wait for one another.
  void score_softly(std::int64_t first, std::int64_t count, const Seen& seen) {
    if constexpr (!kInteger) {
      const std::int64_t group = step_.group;
      SoftRows rows{step_.logit.scale * kLog2e, kScaled<T> ? key_scales_ : nullptr, kQuantized<T> ? factors_ : nullptr};
      std::fill_n(rows.end, kSoftRows, kTile);
      with_keys([&]<class Keys>(const Keys& keys) {
        std::int64_t t = first / group, next = (t + 1) * group;  // the row's token, and the first row behind it
        for (std::int64_t r = 0; r < count;) {
          const int blocks = whole_ ? kTileBlocks : parts_[t].blocks_end();
          const std::int64_t passes = (count - r + soft_rows_for(blocks) - 1) / soft_rows_for(blocks);
          const std::int64_t most = (count - r + passes - 1) / passes;
          int n = 0;
          if (whole_) n = static_cast<int>(most);
          for (; n < most && !whole_ && parts_[t].blocks_end() == blocks; ++n) {
            rows.end[n] = parts_[t].end;
            if (first + r + n + 1 == next) ++t, next += group;
          }
          if (blocks > 0) {
            Keys part = keys;
            if constexpr (Keys::kShares) {
              part.share = {static_cast<int>(r * kTileBlocks / count), static_cast<int>((r + n) * kTileBlocks / count)};
            }
            kAttendSoftly<Keys>[n - 1][blocks - 1](q_ + (first + r) * depth_, depth_, part, rows, weights_ + r * kTile,
                                                   seen.largest + r, seen.sum + r);
          }
          r += n;
        }
      });
    }
  }

  // The same rows and positions, weighed.
  void weigh(std::int64_t first, std::int64_t begin, std::int64_t end, const TilePart& clip,
             const Target& target) const {
    if constexpr (kStored) {
      const StoredValues<T, Number> values{pages_, kQuantized<T> ? next_pages_ : next_keys_, step_.width,
                                           step_.value_dim};
      if (is_direct()) return weigh(values, first, begin, end, clip, target);
    }
    weigh(PairedValues<Number>{values_, step_.width, step_.value_dim}, first, begin, end, clip, target);
  }

  template <class Values>
  void weigh(const Values& values, std::int64_t first, std::int64_t begin, std::int64_t end, const TilePart& clip,
             const Target& target) const {
    PairParts parts;
    std::fill_n(parts.rows, Values::kRows, TilePart{0, kTile});
    this->template for_each_block<Values::kRows>(begin, end, clip, [&](const RowBlock& block) {
      if (block.any.begin >= block.any.end) return;
      parts.any = block.any;
      parts.from = (block.all.begin + 1) / 2 * 2;
      parts.to = block.all.end / 2 * 2;
      if (parts.from >= parts.to) parts.from = parts.to = (block.any.end + 1) / 2 * 2;
      std::int64_t t = block.row / step_.group, next = (t + 1) * step_.group;
      for (int r = 0; r < block.rows && !whole_; ++r) {
        if (block.row + r == next) ++t, next += step_.group;
        parts.rows[r] = this->clipped(t, clip);
      }
      const std::int64_t r = block.row - first;
      const auto behind = [r](const float* x) { return x == nullptr ? x : x + r; };
      kWeighPairs<Values>[block.rows](weights_ + r * kTile, values, parts,
                                      {target.out + r * step_.width, target.fresh, behind(target.before),
                                       behind(target.now), behind(target.factors)});
    });
  }

  void soften_rows(std::int64_t first, std::int64_t count, const Seen& seen) {
    std::fill_n(weight_factors_, kInteger ? count : 0, 0.0f);
    this->for_each_alike(first, first + count,
                         [&](std::int64_t row, int alike, const TilePart& part, const Logit& logit, float distance) {
                           if (part.begin >= part.end) return;
                           soften_alike(row, row - first, alike, part, logit, distance, seen);
                         });
  }

  // Rows of the job from `row` on, which are those from r on of the group and see the same.
  void soften_alike(std::int64_t row, std::int64_t r, int alike, const TilePart& part, const Logit& logit,
                    float distance, const Seen& seen) {
    if constexpr (kQuantized<T>) {
      if (part.blocks_end() > own_) find_factors(row / step_.group, part);
    }
    Number* weights = weights_ + r * kTile;
    float *scores = scores_ + r * kTile, *largest = seen.largest + r, *sum = seen.sum + r;
    if constexpr (kInteger) {
      constexpr decltype(&soften_to_integers<1, Number>) run[] = {
          nullptr, soften_to_integers<1, Number>, soften_to_integers<2, Number>, soften_to_integers<3, Number>,
          soften_to_integers<4, Number>};
      if (logit.plain() && part.begin == 0) {
        for (int i = 0; i < alike; i += 2) {
          const IntegerScores from{scores + i * kTile, key_scales_, query_factors_ + row + i};
          const auto soften = (alike - i > 1 ? kSoftenBlocks<2> : kSoftenBlocks<1>)[part.blocks_end()];
          soften(from, weights + i * kTile, part.end, logit.scale * kLog2e, factors_, largest + i, sum + i,
                 weight_factors_ + r + i);
        }
        return;
      }
      join_scores(row, scores, alike, part);
      run[alike](scores, weights, part.begin, part.end, logit, distance, factors_, largest, sum, weight_factors_ + r);
    } else {
      constexpr decltype(&soften_to_bf16<1>) run[] = {nullptr, soften_to_bf16<1>, soften_to_bf16<2>, soften_to_bf16<3>,
                                                      soften_to_bf16<4>};
      if constexpr (kScaled<T>) scale_rows(scores, alike, part, key_scales_);
      run[alike](scores, weights, part.begin, part.end, logit, distance, kQuantized<T> ? factors_ : nullptr, largest,
                 sum);
    }
  }

  // Makes scores of the sums of integers in their place.
  void join_scores(std::int64_t row, float* scores, int count, const TilePart& part) const {
    for (int j = part.begin / kLanes * kLanes; j < part.end; j += kLanes) {
      const f32x16 scale = load(key_scales_ + j);
      for (int i = 0; i < count; ++i) {
        float* place = scores + i * kTile + j;
        store(place, load_integers(place) * (scale * query_factors_[row + i]));
      }
    }
  }

  // What the scores and weights of a token are multiplied by where it has pages of its own.
  void find_factors(std::int64_t t, const TilePart& part) {
    this->lay_out_branch(t, true, true);
    for (int b = std::max(part.begin / kLanes, own_); b < part.blocks_end(); ++b) {
      if constexpr (kScaled<T>) store(key_scales_ + b * kLanes, load_scales(keys_[b], cache_.key_page));
      store(factors_ + b * kLanes, value_factors(pages_[b], cache_.value_page, step_.value_dim));
    }
  }

  const std::int64_t depth_;      // key_dim in whole pairs
  Number* q_;                     // [rows][depth]
  float* scores_;                 // [kGroup][kTile]
  Number *weights_, *values_;     // [kGroup][kTile], the tile as pairs
  Number* keys_of_codes_;         // [8][depth / 2][16][2], where the cache holds codes
  float *sums_, *query_factors_;  // of integers: [kGroup][width], [rows]
  const T *keys_[kTileBlocks], *pages_[kTileBlocks], *next_keys_[kTileBlocks], *next_pages_[kTileBlocks];
  const Number* operands_[kTileBlocks];  // keys
  alignas(64) float key_scales_[kTile], factors_[kTile], weight_factors_[kGroup], before_[kGroup], now_[kGroup];
};

}  // namespace llmc::LLMC_ISA
#endif
