// Tiles of a bf16 or quantized cache computed with AMX: queries and weights are rounded to bf16, sums are float32; with
// an int8 cache all is in integers (amx_codes.h). Rows fill tiles of 16; a row's result does not depend on the others,
// and positions that it does not see have weight 0, which adds nothing.
#pragma once
#ifdef __AMX_BF16__
#include <immintrin.h>

#include "amx_codes.h"
#include "amx_product.h"
#include "job_rows.h"

namespace llmc::LLMC_ISA {

template <class T>
class AmxRows : public JobRows<T> {
  using Base = JobRows<T>;
  using Base::cache_, Base::rows_, Base::step_, Base::parts_, Base::seen_, Base::own_;

 public:
  static constexpr std::int64_t kMostRows = 192;

  AmxRows(const Step& step, const JobSizes& sizes, std::byte* memory)
      : Base(step, sizes, memory),
        depth_((step.key_dim + kTileDepth - 1) / kTileDepth * kTileDepth),
        q_(this->template take<Number>(this->padded(sizes.rows) * kParts * depth_)),
        scores_(this->template take<float>(kGroup * kTile)),
        weights_(this->template take<Weight>(kGroup * kParts * kTile)),
        values_(this->template take<Number>(kTile * step.width)),
        rest_(!kQuantized<T> && depth_ != step.key_dim ? this->template take<Number>(kTileBlocks * kTileSize)
                                                       : nullptr),
        keys_of_codes_(kQuantized<T> ? this->template take<Number>(kTile * depth_) : nullptr),
        sums_(kInteger ? this->template take<float>(kGroup * kParts * std::max<std::int64_t>(kTile, step.width))
                       : nullptr),
        query_factors_(kInteger ? this->template take<float>(sizes.rows) : nullptr) {}

  void run(const Job& job, const JobQueue& queue) {
    this->start(job);
    this->for_each_query(job, [&](std::int64_t row, const float* query, std::int64_t stride) {
      Number* q = q_ + row * kParts * depth_;
      if constexpr (kInteger) {
        query_factors_[row] = split_query(query, step_.key_dim, depth_, q);  // it was rotated, so it is contiguous
      } else {
        std::memset(q, 0, static_cast<std::size_t>(depth_) * sizeof(Number));
        convert_row(query, stride, step_.key_dim, q);
      }
    });
    if (!this->walk(job, queue, [&](std::int64_t tile, const TilePart& any) { attend(tile, any); })) return;
    if constexpr (!kQuantized<T>) order_values();
    this->finish(job);
  }

 private:
  static constexpr bool kInteger = std::is_same_v<T, i8>;
  using Number = std::conditional_t<kInteger, std::int8_t, bf16>;
  using Weight = std::conditional_t<kInteger, std::uint8_t, bf16>;
  static constexpr int kParts = kInteger ? 2 : 1;           // rows of A for a row
  static constexpr int kTileDepth = 64 / sizeof(Number);    // what one tile instruction sums over
  static constexpr int kTileSize = kTileRows * kTileDepth;  // of B
  static constexpr int kTilePages = kTileDepth / kLanes;    // of values
  // Rows that go through all steps of a tile before the next ones: what they use stays in the nearest cache.
  static constexpr std::int64_t kGroup = 2 * kTileRows / kParts;

  void attend(std::int64_t tile, const TilePart& any) {
    const int first = any.begin / kLanes, last = any.blocks_end();
    for (int b = 0; b < kTileBlocks; ++b) {
      this->find_page(tile * kTileBlocks + std::clamp(b, first, last - 1), keys_[b], pages_[b]);
      this->find_next_page(tile, b, next_keys_[b], next_pages_[b]);
      if (b < first || b >= last) {
        fetch_page(next_keys_[b], cache_.key_page);
        fetch_page(next_pages_[b], cache_.value_page);
      }
      if constexpr (kQuantized<T>) {
        operands_[b] = keys_of_codes_ + std::clamp(b, first, last - 1) * kLanes * depth_;
      } else {
        operands_[b] = keys_[b];
      }
    }
    shared_end_ = own_ < last ? own_ / kTilePages * kTileDepth : kTile;
    prepare_keys(first, std::min(last, own_));
    prepare_values(any.begin, std::min(any.end, shared_end_));
    for (std::int64_t row = 0; row < rows_; row += kGroup) attend_rows(row, std::min(kGroup, rows_ - row));
  }

  // Blocks first .. last - 1 of the tile's keys as operands.
  void prepare_keys(int first, int last) {
    if constexpr (kQuantized<T>) {
      for (int b = first; b < last; ++b) convert_keys(b, keys_[b], next_keys_[b]);
    } else if (step_.key_dim % kTileDepth != 0) {
      copy_rest(first, last);
    }
  }

  // The same of the values of positions begin .. end - 1, in whole steps.
  void prepare_values(int begin, int end) {
    if (begin >= end) return;
    if constexpr (kQuantized<T>) {
      const int last = (end + kTileDepth - 1) / kTileDepth * kTilePages;
      for (int b = begin / kTileDepth * kTilePages; b < last; ++b) convert_values(b, pages_[b], next_pages_[b]);
    } else {
      TilePart part;
      part.begin = begin;
      part.end = end;
      pair_values(part);
    }
  }

  // Block b of a tile of codes.
  void convert_keys(int b, const T* keys, const T* ahead) {
    fetch_page(ahead, cache_.key_page);
    Number* out = keys_of_codes_ + b * kLanes * depth_;
    if constexpr (kInteger) {
      quad_keys(keys, step_.key_dim, out);
    } else {
      pair_keys(keys, cache_.key_page, step_.key_dim, depth_, out);
    }
    if constexpr (kScaled<T>) store(key_scales_ + b * kLanes, load_scales(keys, cache_.key_page));
  }
  void convert_values(int b, const T* values, const T* ahead) {
    const std::int64_t blocks = step_.width / kLanes;
    fetch_page(ahead, cache_.value_page);
    Number* out = values_ + b / kTilePages * blocks * kTileSize + b % kTilePages * (kTileSize / kTilePages);
    if constexpr (kInteger) {
      quad_values(values, step_.value_dim, kTileSize, out);
    } else {
      pair_page(values, cache_.value_page, step_.value_dim, kTileSize, out);
    }
    store(factors_ + b * kLanes, value_factors(values, cache_.value_page, step_.value_dim));
  }

  void attend_rows(std::int64_t row, std::int64_t count) {
    TilePart part;
    for (std::int64_t t = row / step_.group; t <= (row + count - 1) / step_.group; ++t) part.join(parts_[t]);
    if (part.begin >= part.end) return;
    const Seen seen = this->seen_in_tile(row);
    configure(count);
    score(row, 0, count, part.begin / kLanes, std::min(part.blocks_end(), own_));
    for_each_branch(row, count, true, [&](std::int64_t r, std::int64_t rows, const TilePart& own) {
      const int from = std::max(own.begin / kLanes, own_);
      prepare_keys(from, own.blocks_end());
      score(row + r, r, rows, from, own.blocks_end());
    });
    soften_rows(row, count, seen);
    const int end = std::min(part.end, shared_end_);
    configure(count);
    if (part.begin < end) weigh(0, count, part.begin, end, seen, false);
    for_each_branch(row, count, false, [&](std::int64_t r, std::int64_t rows, const TilePart& own) {
      const int begin = std::max(own.begin, shared_end_);
      prepare_values(begin, own.end);
      weigh(r, rows, begin, own.end, seen, part.begin < end);
    });
    if constexpr (kInteger) join_values(count, seen);
    this->settle(row, count);
  }

  // Calls f(r, rows, part) for the tokens that see pages of their own, whose keys, or values, are laid out: r is their
  // first row of these.
  template <class F>
  void for_each_branch(std::int64_t first, std::int64_t count, bool keys, F&& f) {
    if (shared_end_ == kTile) return;
    const std::int64_t group = step_.group;
    for (std::int64_t t = first / group; t <= (first + count - 1) / group; ++t) {
      const std::int64_t begin = std::max(first, t * group), end = std::min(first + count, (t + 1) * group);
      if (parts_[t].begin >= parts_[t].end || parts_[t].end <= shared_end_) continue;
      this->lay_out_branch(t, keys, !keys);
      configure(end - begin);
      f(begin - first, end - begin, parts_[t]);
    }
  }

  void configure(std::int64_t count) {
    tiles_.configure(static_cast<int>(std::min<std::int64_t>(count * kParts, kTileRows)),
                     static_cast<int>(std::max<std::int64_t>(count * kParts - kTileRows, 0)));
  }

  // Where a page's last dims fill no tile: what follows them is not the key's.
  void copy_rest(int first, int last) const {
    const std::int64_t whole = step_.key_dim / kTileDepth, size = (step_.key_dim % kTileDepth + 1) / 2 * 2 * kLanes;
    for (int b = first; b < last; ++b) {
      bf16* rest = rest_ + b * kTileSize;
      std::copy_n(operands_[b] + whole * kTileSize, size, rest);
      std::memset(rest + size, 0, static_cast<std::size_t>(kTileSize - size) * sizeof(bf16));
    }
  }

  // The values of the tile as pairs of positions: [steps][width / 16][16 pairs][16 dims][2]. Of 32 dims, the first 16
  // are 0-3, 8-11, 16-19 and 24-27, as unpacking leaves them. Positions that no row sees are 0, whatever stands there.
  void pair_values(const TilePart& any) const {
    const std::int64_t dims = step_.value_dim, blocks = step_.width / kLanes;
    const int first = any.begin / kTileDepth * kTileDepth, last = (any.end + kTileDepth - 1) / kTileDepth * kTileDepth;
    for (int j = first; j < last; j += 2) {
      const std::int64_t offset = j % kLanes * dims;
      const bf16* page = pages_[j / kLanes] + offset;
      const bf16 *ahead = next_pages_[j / kLanes] + offset, *ahead_keys = next_keys_[j / kLanes] + offset;
      bf16* out = values_ + (j / kTileDepth * blocks * kTileRows + j % kTileDepth / 2) * kTileDepth;
      for (std::int64_t d = 0; d < dims; d += 32) {
        const std::int64_t left = dims - d;
        const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
        const __m512i even = _mm512_maskz_loadu_epi16(sees(any, j) ? mask : 0, page + d);
        const __m512i odd = _mm512_maskz_loadu_epi16(sees(any, j + 1) ? mask : 0, page + dims + d);
        fetch(ahead + d);
        fetch(ahead + dims + d);
        fetch(ahead_keys + d);
        fetch(ahead_keys + dims + d);
        bf16* place = out + d / kLanes * kTileSize;
        if (d + kLanes < step_.width) {
          _mm512_storeu_si512(place, _mm512_unpacklo_epi16(even, odd));
          _mm512_storeu_si512(place + kTileSize, _mm512_unpackhi_epi16(even, odd));
        } else {  // a single block of 16 dims stays in order
          const __m256i low = _mm256_unpacklo_epi16(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd));
          const __m256i high = _mm256_unpackhi_epi16(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), _mm256_permute2x128_si256(low, high, 0x20));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(place + kLanes), _mm256_permute2x128_si256(low, high, 0x31));
        }
      }
    }
  }

  static bool sees(const TilePart& any, int j) { return any.begin <= j && j < any.end; }

  // Undoes the order of dims that pair_values makes.
  void order_values() const {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (std::int64_t row = 0; row < rows_; ++row) {
      float* values = seen_.values + row * step_.width;
      for (std::int64_t d = 0; d + kLanes < step_.width; d += 2 * kLanes) {
        const f32x16 a = load(values + d), b = load(values + d + kLanes);
        store(values + d, f32x16{_mm512_permutex2var_ps(a.v, low, b.v)});
        store(values + d + kLanes, f32x16{_mm512_permutex2var_ps(a.v, high, b.v)});
      }
    }
  }

  // Products with one or two tiles of rows and of columns.
  template <bool kMore, class A>
  static auto product(std::int64_t count, bool pair) {
    if (count * kParts > kTileRows) {
      return pair ? multiply_tiles<true, true, kMore, A, Number> : multiply_tiles<true, false, kMore, A, Number>;
    }
    return pair ? multiply_tiles<false, true, kMore, A, Number> : multiply_tiles<false, false, kMore, A, Number>;
  }

  // Rows of the job from `row` on, and blocks first .. end - 1: the scores from row r on.
  void score(std::int64_t row, std::int64_t r, std::int64_t count, int first, int end) const {
    const std::int64_t steps = (kQuantized<T> ? depth_ : step_.key_dim) / kTileDepth;
    const auto rest_of = [&](int b) { return rest_ != nullptr ? rest_ + b * kTileSize : nullptr; };
    for (int b = first; b < end; b += 2) {
      const bool pair = b + 1 < end;
      const int other = pair ? b + 1 : b;
      float* out = (kInteger ? sums_ : scores_) + r * kParts * kTile + b * kLanes;
      product<false, Number>(count, pair)(q_ + row * kParts * depth_, depth_, steps, operands_[b], operands_[other],
                                          kTileSize, rest_of(b), rest_of(other), out, out + kLanes, kTile);
    }
  }

  void soften_rows(std::int64_t first, std::int64_t count, const Seen& seen) {
    this->for_each_alike(first, first + count,
                         [&](std::int64_t row, int alike, const TilePart& part, const Logit& logit, float distance) {
                           soften_alike(row, row - first, alike, part, logit, distance, seen);
                         });
  }

  // Rows of the job from `row` on, which are those from r on of the group and see the same.
  void soften_alike(std::int64_t row, std::int64_t r, int alike, const TilePart& part, const Logit& logit,
                    float distance, const Seen& seen) {
    Weight* weights = weights_ + r * kParts * kTile;
    if (part.begin != 0 || part.end != kTile) {  // what a row does not see has weight 0
      std::memset(weights, 0, static_cast<std::size_t>(alike * kParts) * kTile * sizeof(Weight));
      std::fill_n(weight_factors_ + r, alike, 0.0f);
    }
    if (part.begin >= part.end) return;
    if constexpr (kQuantized<T>) {
      if (part.end > shared_end_) find_factors(row / step_.group, part);
    }
    float *scores = scores_ + r * kTile, *largest = seen.largest + r, *sum = seen.sum + r;
    if constexpr (kInteger) {
      constexpr decltype(&soften_to_integers<1, Weight>) run[] = {
          nullptr, soften_to_integers<1, Weight>, soften_to_integers<2, Weight>, soften_to_integers<3, Weight>,
          soften_to_integers<4, Weight>};
      join_scores(row, r, alike, part);
      run[alike](scores, weights, part.begin, part.end, logit, distance, factors_, largest, sum, weight_factors_ + r);
    } else {
      constexpr decltype(&soften_to_bf16<1>) run[] = {nullptr, soften_to_bf16<1>, soften_to_bf16<2>, soften_to_bf16<3>,
                                                      soften_to_bf16<4>};
      if constexpr (kScaled<T>) scale_rows(scores, alike, part, key_scales_);
      run[alike](scores, weights, part.begin, part.end, logit, distance, kQuantized<T> ? factors_ : nullptr, largest,
                 sum);
    }
  }

  // Scores of rows from the sums over their parts.
  void join_scores(std::int64_t row, std::int64_t r, int count, const TilePart& part) {
    for (int j = part.begin / kLanes * kLanes; j < part.end; j += kLanes) {
      const f32x16 scale = load(key_scales_ + j);
      for (int i = 0; i < count; ++i) {
        const float* sums = sums_ + (r + i) * kParts * kTile + j;
        store(scores_ + (r + i) * kTile + j, join_parts(sums, sums + kTile) * (scale * query_factors_[row + i]));
      }
    }
  }

  // The same of the weighted values.
  void join_values(std::int64_t count, const Seen& seen) {
    const std::int64_t width = step_.width;
    for (std::int64_t r = 0; r < count; ++r) {
      const float* sums = sums_ + r * kParts * width;
      for (std::int64_t d = 0; d < width; d += kLanes) {
        store(seen.values + r * width + d, join_parts(sums + d, sums + width + d) * weight_factors_[r]);
      }
    }
  }

  // What the scores and weights of a token are multiplied by where it has pages of its own.
  void find_factors(std::int64_t t, const TilePart& part) {
    this->lay_out_branch(t, true, true);
    for (int b = shared_end_ / kLanes; b < part.blocks_end(); ++b) {
      if constexpr (kScaled<T>) store(key_scales_ + b * kLanes, load_scales(keys_[b], cache_.key_page));
      store(factors_ + b * kLanes, value_factors(pages_[b], cache_.value_page, step_.value_dim));
    }
  }

  // Rows from r on of these, and positions begin .. end - 1; `more`: added to what is there.
  void weigh(std::int64_t r, std::int64_t count, int begin, int end, const Seen& seen, bool more) const {
    const std::int64_t blocks = step_.width / kLanes;
    const int first = begin / kTileDepth, last = (end + kTileDepth - 1) / kTileDepth;
    for (std::int64_t d = 0; d < blocks; d += 2) {
      const bool pair = d + 1 < blocks;
      const Number* b = values_ + (first * blocks + d) * kTileSize;
      float* out = (kInteger ? sums_ : seen.values) + r * kParts * step_.width + d * kLanes;
      (more ? product<true, Weight>(count, pair) : product<false, Weight>(count, pair))(
          weights_ + r * kParts * kTile + first * kTileDepth, kTile, last - first, b, pair ? b + kTileSize : b,
          blocks * kTileSize, nullptr, nullptr, out, out + kLanes, step_.width);
    }
  }

  const std::int64_t depth_;  // key_dim in whole tiles
  Number* q_;                 // [rows][kParts][depth]
  float* scores_;             // [kGroup][kTile]
  Weight* weights_;           // [kGroup][kParts][kTile]
  Number *values_, *rest_;
  Number* keys_of_codes_;         // [8][depth / kTilePages][16][kTilePages], where the cache holds codes
  float *sums_, *query_factors_;  // of integers: [kGroup][kParts][kTile or width], [rows]
  Tiles tiles_;
  int shared_end_ = kTile;  // position of the tile up to which all tokens weigh the same values
  const T *keys_[kTileBlocks], *pages_[kTileBlocks], *next_keys_[kTileBlocks], *next_pages_[kTileBlocks];
  const Number* operands_[kTileBlocks];  // keys
  alignas(64) float key_scales_[kTile], factors_[kTile], weight_factors_[2 * kTileRows];
};

}  // namespace llmc::LLMC_ISA
#endif
