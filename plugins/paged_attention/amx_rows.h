// Tiles of a bf16 cache computed with AMX: queries and weights are rounded to bf16, sums are float32. Rows fill tiles
// of 16; a row's result does not depend on the others, and positions that it does not see have weight 0, which adds
// nothing.
#pragma once
#ifdef __AMX_BF16__
#include <immintrin.h>

#include "job_rows.h"
#include "panels_amx.h"

namespace llmc::LLMC_ISA {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;                     // what one tile instruction sums over
constexpr int kTileSize = kTileRows * kTileDepth;  // elements of bf16
constexpr int kTileSteps = kTile / kTileDepth;

// c [16 or 32 rows][16 or 32 columns] = a [rows][32 steps] times b, whose 32-step tiles [16][16][2] are b_step elements
// apart; the columns from 16 on are those of b1. Behind the steps may come one more, in rest0 and rest1.
template <bool kTwoRows, bool kTwoColumns>
void multiply_tiles(const bf16* a, std::int64_t a_stride, std::int64_t steps, const bf16* b0, const bf16* b1,
                    std::int64_t b_step, const bf16* rest0, const bf16* rest1, float* c0, float* c1,
                    std::int64_t c_stride) {
  memory_barrier();
  _tile_zero(0);
  if constexpr (kTwoColumns) _tile_zero(1);
  if constexpr (kTwoRows) _tile_zero(2);
  if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
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

class AmxRows : public JobRows<bf16> {
 public:
  static constexpr std::int64_t kMostRows = 128;

  AmxRows(const Step& step, const JobSizes& sizes, std::byte* memory)
      : JobRows(step, sizes, memory),
        depth_((step.key_dim + kTileDepth - 1) / kTileDepth * kTileDepth),
        q_(take<bf16>(padded(sizes.rows) * depth_)),
        scores_(take<float>(padded(sizes.rows) * kTile)),
        weights_(take<bf16>(padded(sizes.rows) * kTile)),
        values_(take<bf16>(kTile * step.width)),
        rest_(depth_ != step.key_dim ? take<bf16>(kTileBlocks * kTileSize) : nullptr) {}

  void run(const Job& job) {
    tiles_.configure(kTileRows, kTileRows);
    start(job);
    std::memset(q_, 0, static_cast<std::size_t>(padded(rows_) * depth_) * sizeof(bf16));
    std::memset(weights_ + rows_ * kTile, 0, static_cast<std::size_t>((padded(rows_) - rows_) * kTile) * sizeof(bf16));
    for_each_query(job, [&](std::int64_t row, const float* query, std::int64_t stride) {
      convert_row(query, stride, step_.key_dim, q_ + row * depth_);
    });
    walk(job, [&](std::int64_t tile, const TilePart& any, const Seen& seen) { attend(tile, any, seen); });
  }

 private:
  void attend(std::int64_t tile, const TilePart& any, const Seen& seen) {
    const bf16 *keys[kTileBlocks], *pages[kTileBlocks], *next[kTileBlocks], *unused;
    const int first = any.begin / kLanes, last = any.blocks_end();
    for (int b = 0; b < kTileBlocks; ++b) {
      find_page(tile * kTileBlocks + std::clamp(b, first, last - 1), keys[b], pages[b]);
      find_page(std::min((tile + 1) * kTileBlocks + b, last_page_), next[b], unused);
    }
    score(keys, first, last);
    for (std::int64_t t = 0; t < tokens_; ++t) {  // what a row does not see has weight 0
      if (parts_[t].begin == 0 && parts_[t].end == kTile) continue;
      std::memset(weights_ + t * step_.group * kTile, 0, static_cast<std::size_t>(step_.group * kTile) * sizeof(bf16));
    }
    soften_rows(scores_, weights_, seen);
    pair_values(pages, next, any);
    weigh(seen);
  }

  // What rows first .. first + count - 1 see of the tile.
  TilePart seen_by(std::int64_t first, std::int64_t count) const {
    TilePart any;
    const std::int64_t last = std::min(rows_, first + count) - 1;
    for (std::int64_t t = first / step_.group; t <= last / step_.group; ++t) any.join(parts_[t]);
    return any;
  }

  // f(row, two, part) for all rows, 32 of them at a time (two tiles) or 16.
  template <class F>
  void for_each_tile_rows(F&& f) const {
    for (std::int64_t row = 0; row < rows_; row += 2 * kTileRows) {
      const bool two = rows_ - row > kTileRows;
      const TilePart part = seen_by(row, 2 * kTileRows);
      if (part.begin < part.end) f(row, two, part);
    }
  }

  void score(const bf16* const* keys, int first, int last) const {
    const std::int64_t steps = step_.key_dim / kTileDepth, used = step_.key_dim % kTileDepth;
    if (used != 0) {  // the page ends within a tile: what follows is not the key's
      const std::int64_t size = (used + 1) / 2 * 2 * kLanes;
      for (int b = first; b < last; ++b) {
        bf16* rest = rest_ + b * kTileSize;
        std::copy_n(keys[b] + steps * kTileSize, size, rest);
        std::memset(rest + size, 0, static_cast<std::size_t>(kTileSize - size) * sizeof(bf16));
      }
    }
    const auto rest_of = [&](int b) { return used != 0 ? rest_ + b * kTileSize : nullptr; };
    for_each_tile_rows([&](std::int64_t row, bool two, const TilePart& part) {
      const bf16* q = q_ + row * depth_;
      const int end = part.blocks_end();
      for (int b = part.begin / kLanes; b < end; b += 2) {
        const bool pair = b + 1 < end;
        const auto multiply = two ? (pair ? multiply_tiles<true, true> : multiply_tiles<true, false>)
                                  : (pair ? multiply_tiles<false, true> : multiply_tiles<false, false>);
        const int other = pair ? b + 1 : b;
        float* out = scores_ + row * kTile + b * kLanes;
        multiply(q, depth_, steps, keys[b], keys[other], kTileSize, rest_of(b), rest_of(other), out, out + kLanes,
                 kTile);
      }
    });
  }

  // The values of the tile as pairs of positions: [steps][width / 16][16 pairs][16 dims][2]. Positions that no row sees
  // are 0, whatever stands there.
  void pair_values(const bf16* const* pages, const bf16* const* next, const TilePart& any) const {
    alignas(64) static constexpr std::uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                           37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                           11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const std::int64_t dims = step_.value_dim, blocks = step_.width / kLanes;
    const int first = any.begin / kTileDepth * kTileDepth, last = (any.end + kTileDepth - 1) / kTileDepth * kTileDepth;
    for (int j = first; j < last; j += 2) {
      const std::int64_t offset = j % kLanes * dims;
      const bf16* page = pages[j / kLanes] + offset;
      const bf16* ahead = next[j / kLanes] + offset;
      bf16* out = values_ + (j / kTileDepth * blocks * kTileRows + j % kTileDepth / 2) * kTileDepth;
      for (std::int64_t d = 0; d < dims; d += 32) {
        const std::int64_t left = dims - d;
        const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
        const __m512i even = _mm512_maskz_loadu_epi16(sees(any, j) ? mask : 0, page + d);
        const __m512i odd = _mm512_maskz_loadu_epi16(sees(any, j + 1) ? mask : 0, page + dims + d);
        __builtin_prefetch(ahead + d);
        __builtin_prefetch(ahead + dims + d);
        bf16* place = out + d / kLanes * kTileSize;
        _mm512_storeu_si512(place, _mm512_permutex2var_epi16(even, low, odd));
        if (d + kLanes < step_.width)
          _mm512_storeu_si512(place + kTileSize, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }

  static bool sees(const TilePart& any, int j) { return any.begin <= j && j < any.end; }

  void weigh(const Seen& seen) const {
    const std::int64_t blocks = step_.width / kLanes;
    for_each_tile_rows([&](std::int64_t row, bool two, const TilePart& part) {
      const int first = part.begin / kTileDepth, last = (part.end + kTileDepth - 1) / kTileDepth;
      const bf16* weights = weights_ + row * kTile + first * kTileDepth;
      for (std::int64_t d = 0; d < blocks; d += 2) {
        const bool pair = d + 1 < blocks;
        const auto multiply = two ? (pair ? multiply_tiles<true, true> : multiply_tiles<true, false>)
                                  : (pair ? multiply_tiles<false, true> : multiply_tiles<false, false>);
        const bf16* b = values_ + (first * blocks + d) * kTileSize;
        float* out = seen.values + row * step_.width + d * kLanes;
        multiply(weights, kTile, last - first, b, pair ? b + kTileSize : b, blocks * kTileSize, nullptr, nullptr, out,
                 out + kLanes, step_.width);
      }
    });
  }

  const std::int64_t depth_;  // key_dim in whole tiles
  bf16* q_;                   // [rows][depth]
  float* scores_;             // [rows][kTile]
  bf16* weights_;             // [rows][kTile]
  bf16 *values_, *rest_;
  Tiles tiles_;
};

}  // namespace llmc::LLMC_ISA
#endif
