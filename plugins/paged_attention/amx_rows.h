// Tiles of a bf16 or quantized cache computed with AMX: queries and weights are rounded to bf16, sums are float32. Rows
// fill tiles of 16; a row's result does not depend on the others, and positions that it does not see have weight 0,
// which adds nothing.
#pragma once
#ifdef __AMX_BF16__
#include <immintrin.h>

#include "amx_pages.h"
#include "job_rows.h"
#include "panels_amx.h"

namespace llmc::LLMC_ISA {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;                     // what one tile instruction sums over
constexpr int kTileSize = kTileRows * kTileDepth;  // elements of bf16
constexpr int kTileSteps = kTile / kTileDepth;

// c [16 or 32 rows][16 or 32 columns] = a [rows][32 steps] times b, whose 32-step tiles [16][16][2] are b_step elements
// apart; the columns from 16 on are those of b1. Behind the steps may come one more, in rest0 and rest1. kMore: added
// to what c already is.
template <bool kTwoRows, bool kTwoColumns, bool kMore>
void multiply_tiles(const bf16* a, std::int64_t a_stride, std::int64_t steps, const bf16* b0, const bf16* b1,
                    std::int64_t b_step, const bf16* rest0, const bf16* rest1, float* c0, float* c1,
                    std::int64_t c_stride) {
  memory_barrier();
  if constexpr (kMore) {
    _tile_loadd(0, c0, c_stride * 4);
    if constexpr (kTwoColumns) _tile_loadd(1, c1, c_stride * 4);
    if constexpr (kTwoRows) _tile_loadd(2, c0 + kTileRows * c_stride, c_stride * 4);
    if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, c1 + kTileRows * c_stride, c_stride * 4);
  } else {
    _tile_zero(0);
    if constexpr (kTwoColumns) _tile_zero(1);
    if constexpr (kTwoRows) _tile_zero(2);
    if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
  }
  const auto step = [&](const bf16* x, const bf16* y0, const bf16* y1) {
    (void)y1;
    _tile_loadd(4, x, a_stride * 2);
    _tile_loadd(6, y0, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) _tile_loadd(7, y1, 64);
    if constexpr (kTwoColumns) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoRows) _tile_loadd(5, x + kTileRows * a_stride, a_stride * 2);
    if constexpr (kTwoRows) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTwoRows && kTwoColumns) _tile_dpbf16ps(3, 5, 7);
  };
  for (std::int64_t s = 0; s < steps; ++s) step(a + s * kTileDepth, b0 + s * b_step, b1 + s * b_step);
  if (rest0 != nullptr) step(a + steps * kTileDepth, rest0, rest1);
  store_tile<0>(c0, c_stride * 4);
  if constexpr (kTwoColumns) store_tile<1>(c1, c_stride * 4);
  if constexpr (kTwoRows) store_tile<2>(c0 + kTileRows * c_stride, c_stride * 4);
  if constexpr (kTwoRows && kTwoColumns) store_tile<3>(c1 + kTileRows * c_stride, c_stride * 4);
}

// Weights of R rows as in weights.h, but times `factors` of the positions, if there are any, and rounded to bf16 in
// `weights` [R][kTile], 32 positions at a time; the
// polynomial is good for 3e-6, which bf16 does not tell apart, and all of it is in instructions that issue twice a
// cycle.
template <int R>
LLMC_INLINE void soften_to_bf16(float* scores, bf16* weights, int begin, int end, const Logit& logit, float distance,
                                const float* factors, float* top, float* total) {
  const int first = begin / kTileDepth * kTileDepth, last = (end + kTileDepth - 1) / kTileDepth * kTileDepth;
  const f32x16 factor = broadcast(find_largest<R>(scores, begin, end, first, last, logit, distance, top));
  f32x16 sum[R], least[R];
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) sum[r] = zero(), least[r] = broadcast(-top[r]);
  const auto power = [](f32x16 x) -> f32x16 {  // 2^x = 2^(x - floor(x)) * 2^floor(x); scalef takes the floor itself
    x = max(broadcast(-126.0f), x);
    const f32x16 rest = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
    const f32x16 p = polynomial(rest, 1.0f, 0.69304484f, 0.2412802f, 0.052242473f, 0.013426685f);
    return {_mm512_scalef_ps(p.v, x.v)};
  };
  for (int j = first; j < last; j += kTileDepth) {
    const bool partial = j < begin || j + kTileDepth > end;
    LLMC_UNROLL
    for (int r = 0; r < R; ++r) {
      const float* place = scores + r * kTile + j;
      f32x16 a = power(fmadd(load(place), factor, least[r])), b = power(fmadd(load(place + kLanes), factor, least[r]));
      if (partial) {
        a = select(lanes_between(begin, end, j), a, zero());
        b = select(lanes_between(begin, end, j + kLanes), b, zero());
      }
      sum[r] = sum[r] + a;
      sum[r] = sum[r] + b;
      if (factors != nullptr) {
        a = a * load(factors + j);
        b = b * load(factors + j + kLanes);
        if (partial) {  // 0 * NaN
          a = select(lanes_between(begin, end, j), a, zero());
          b = select(lanes_between(begin, end, j + kLanes), b, zero());
        }
      }
      _mm512_storeu_si512(weights + r * kTile + j, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v)));
    }
  }
  LLMC_UNROLL
  for (int r = 0; r < R; ++r) total[r] = reduce_add(sum[r]);
}

template <class T>
class AmxRows : public JobRows<T> {
  using Base = JobRows<T>;
  using Base::cache_, Base::rows_, Base::step_, Base::parts_, Base::last_page_, Base::seen_, Base::own_;

 public:
  static constexpr std::int64_t kMostRows = 192;

  AmxRows(const Step& step, const JobSizes& sizes, std::byte* memory)
      : Base(step, sizes, memory),
        depth_((step.key_dim + kTileDepth - 1) / kTileDepth * kTileDepth),
        q_(this->template take<bf16>(this->padded(sizes.rows) * depth_)),
        scores_(this->template take<float>(kGroup * kTile)),
        weights_(this->template take<bf16>(kGroup * kTile)),
        values_(this->template take<bf16>(kTile * step.width)),
        rest_(!kQuantized<T> && depth_ != step.key_dim ? this->template take<bf16>(kTileBlocks * kTileSize) : nullptr),
        keys16_(kQuantized<T> ? this->template take<bf16>(kTile * depth_) : nullptr) {}

  void run(const Job& job) {
    this->start(job);
    this->for_each_query(job, [&](std::int64_t row, const float* query, std::int64_t stride) {
      std::memset(q_ + row * depth_, 0, static_cast<std::size_t>(depth_) * sizeof(bf16));
      convert_row(query, stride, step_.key_dim, q_ + row * depth_);
    });
    if (!this->walk(job, [&](std::int64_t tile, const TilePart& any) { attend(tile, any); })) return;
    if constexpr (!kQuantized<T>) order_values();
    this->finish(job);
  }

 private:
  // Rows that go through all steps of a tile before the next ones: what they use stays in the nearest cache.
  static constexpr std::int64_t kGroup = 2 * kTileRows;

  void attend(std::int64_t tile, const TilePart& any) {
    const int first = any.begin / kLanes, last = any.blocks_end();
    for (int b = 0; b < kTileBlocks; ++b) {
      this->find_page(tile * kTileBlocks + std::clamp(b, first, last - 1), keys_[b], pages_[b]);
      this->find_page(std::min((tile + 1) * kTileBlocks + b, last_page_), next_keys_[b], next_pages_[b]);
      if constexpr (kQuantized<T>) {
        operands_[b] = keys16_ + std::clamp(b, first, last - 1) * kLanes * depth_;
      } else {
        operands_[b] = keys_[b];
      }
    }
    shared_end_ = own_ < last ? own_ / 2 * kTileDepth : kTile;
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
      const int last = (end + kTileDepth - 1) / kTileDepth * 2;
      for (int b = begin / kTileDepth * 2; b < last; ++b) convert_values(b, pages_[b], next_pages_[b]);
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
    pair_keys(keys, cache_.key_page, step_.key_dim, depth_, keys16_ + b * kLanes * depth_);
    if constexpr (kScaled<T>) store(key_scales_ + b * kLanes, load_scales(keys, cache_.key_page));
  }
  void convert_values(int b, const T* values, const T* ahead) {
    const std::int64_t blocks = step_.width / kLanes;
    fetch_page(ahead, cache_.value_page);
    bf16* out = values_ + b / 2 * blocks * kTileSize + b % 2 * kLanes * kLanes;
    pair_page(values, cache_.value_page, step_.value_dim, kTileSize, out);
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
    tiles_.configure(static_cast<int>(std::min<std::int64_t>(count, kTileRows)),
                     static_cast<int>(std::max<std::int64_t>(count - kTileRows, 0)));
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
  template <bool kMore>
  static auto product(std::int64_t count, bool pair) {
    if (count > kTileRows) return pair ? multiply_tiles<true, true, kMore> : multiply_tiles<true, false, kMore>;
    return pair ? multiply_tiles<false, true, kMore> : multiply_tiles<false, false, kMore>;
  }

  // Rows of the job from `row` on, and blocks first .. end - 1: the scores from row r on.
  void score(std::int64_t row, std::int64_t r, std::int64_t count, int first, int end) const {
    const std::int64_t steps = (kQuantized<T> ? depth_ : step_.key_dim) / kTileDepth;
    const auto rest_of = [&](int b) { return rest_ != nullptr ? rest_ + b * kTileSize : nullptr; };
    for (int b = first; b < end; b += 2) {
      const bool pair = b + 1 < end;
      const int other = pair ? b + 1 : b;
      float* out = scores_ + r * kTile + b * kLanes;
      product<false>(count, pair)(q_ + row * depth_, depth_, steps, operands_[b], operands_[other], kTileSize,
                                  rest_of(b), rest_of(other), out, out + kLanes, kTile);
    }
  }

  void soften_rows(std::int64_t first, std::int64_t count, const Seen& seen) {
    this->for_each_alike(first, first + count,
                         [&](std::int64_t row, int alike, const TilePart& part, const Logit& logit, float distance) {
                           const std::int64_t r = row - first;
                           bf16* weights = weights_ + r * kTile;
                           if (part.begin != 0 || part.end != kTile) {  // what a row does not see has weight 0
                             std::memset(weights, 0, static_cast<std::size_t>(alike) * kTile * sizeof(bf16));
                           }
                           if (part.begin >= part.end) return;
                           if constexpr (kQuantized<T>) {
                             if (part.end > shared_end_) find_factors(row / step_.group, part);
                           }
                           constexpr decltype(&soften_to_bf16<1>) run[] = {
                               nullptr, soften_to_bf16<1>, soften_to_bf16<2>, soften_to_bf16<3>, soften_to_bf16<4>};
                           if constexpr (kScaled<T>) scale_rows(scores_ + r * kTile, alike, part, key_scales_);
                           run[alike](scores_ + r * kTile, weights, part.begin, part.end, logit, distance,
                                      kQuantized<T> ? factors_ : nullptr, seen.largest + r, seen.sum + r);
                         });
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
      const bf16* b = values_ + (first * blocks + d) * kTileSize;
      float* out = seen.values + r * step_.width + d * kLanes;
      (more ? product<true>(count, pair) : product<false>(count, pair))(
          weights_ + r * kTile + first * kTileDepth, kTile, last - first, b, pair ? b + kTileSize : b,
          blocks * kTileSize, nullptr, nullptr, out, out + kLanes, step_.width);
    }
  }

  const std::int64_t depth_;  // key_dim in whole tiles
  bf16* q_;                   // [rows][depth]
  float* scores_;             // [kGroup][kTile]
  bf16* weights_;             // [kGroup][kTile]
  bf16 *values_, *rest_;
  bf16* keys16_;  // a tile of codes: [8][depth / 2][16][2]
  Tiles tiles_;
  int shared_end_ = kTile;  // position of the tile up to which all tokens weigh the same values
  const T *keys_[kTileBlocks], *pages_[kTileBlocks], *next_keys_[kTileBlocks], *next_pages_[kTileBlocks];
  const bf16* operands_[kTileBlocks];  // keys
  alignas(64) float key_scales_[kTile], factors_[kTile];
};

}  // namespace llmc::LLMC_ISA
#endif
