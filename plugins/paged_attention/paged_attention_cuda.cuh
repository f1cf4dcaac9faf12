// Attention over a paged cache with tensor cores; see rows_cuda.cuh for how it is cut, cuda.py for who launches what.
#pragma once
// clang-format off: the order matters
#include "paged_attention/rows_cuda.cuh"
#include "paged_attention/tile_cuda.cuh"
// clang-format on

// Adds what was seen of a unit to what was seen before: both are multiplied by factors.
struct Merge {
  float before, now;

  DEV Merge(float& top, float& sum, float unit_top, float unit_sum) {
    float both = max(top, unit_top), base = both == NEG_INF ? 0.0f : both;
    before = exp2_(top - base);
    now = exp2_(unit_top - base);
    sum = fma_(sum, before, unit_sum * now);
    top = both;
  }
  DEV float operator()(float old_value, float unit_value) const { return fma_(old_value, before, unit_value * now); }
};

// What makes a row's result of its sums.
struct Finish {
  float factor, weight;  // of the values, of the value's center

  DEV Finish(const AttentionParams& p, int head, float top, float sum) {
    float keys = sum;
    factor = 1.0f;
    if (p.sinks) {
      float sink = side(p.sinks, p.sinks_kind, head) * LOG2_E, both = max(top, sink);
      factor = exp2_(top - both);
      keys = sum * factor;
      sum = fma_(sum, factor, exp2_(sink - both));
    }
    float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    factor *= inverse;
    weight = keys * inverse;
  }
  DEV float operator()(const AttentionParams& p, int kv_head, int d, float value) const {
    value *= factor;
    int64_t place = static_cast<int64_t>(kv_head) * p.value_dim + d;
    if (p.value_scale) value /= side(p.value_scale, p.value_scale_kind, place);
    if (p.value_center) value = fma_(side(p.value_center, p.value_center_kind, place), weight, value);
    return value;
  }
};

// Queries of 16 rows for each of so many warps, zeros behind their dims.
template <class T, int DK, int THREADS, int ROWS>
DEV void copy_queries(const AttentionParams& p, const Sequence& sequence, int kv_head, int first_row,
                      unsigned char* to) {
  constexpr int PIECES = DK / 8, STRIDE = DK * 2 + 16;
  for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
    int row = i / PIECES, piece = i % PIECES, r = first_row + row, token = r / p.group;
    bool exists = token < sequence.rows;
    const T* from = static_cast<const T*>(p.q);
    if (exists) from += (sequence.first + token) * p.q_token + (kv_head * p.group + r % p.group) * p.q_head;
    unsigned char* place = to + row * STRIDE + piece * 16;
    if (p.q_vectors) {
      bool ok = exists && piece * 8 < p.q_dim;
      cp_async16(place, from + (ok ? piece * 8 : 0), ok);
    } else {
      UNROLL for (int e = 0; e < 8; ++e) {
        int d = piece * 8 + e;
        st_vec<uint16_t>(place + 2 * e, exists && d < p.q_dim ? from[d].x : static_cast<uint16_t>(0));
      }
    }
  }
}

// Sequences of many rows: a block takes 16 rows WARPS times, each time for the warps that share them (see Tile), and
// all keys that these see. Grid: as many blocks as there can be, kv heads.
template <class T, class KV, int DK, int DV, int WARPS, bool BIASED>
DEV void attention_prefill(const AttentionParams& p) {
  using Sizes = Tile<T, KV, DK, DV>;
  constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS * Sizes::SHARE, PART = Sizes::PART;
  DYN_SMEM(shared);
  int s, block, lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / Sizes::SHARE, kv_head = blockIdx.y;
  auto blocks = [&](int i) {
    Sequence of = sequence_of(p, i);
    return is_short(p, of) ? 0 : (of.rows * p.group + ROWS - 1) / ROWS;
  };
  // Later rows see more keys: those of a block that starts late should not be the ones that take longest.
  if (!find_work(p, gridDim.x - 1 - blockIdx.x, blocks, s, block)) return;
  Sequence sequence = sequence_of(p, s);
  int first_row = block * ROWS;
  LaneRows rows = rows_of_lane(p, sequence, kv_head, first_row + team * 16);
  int low = first_visible(p, sequence.past + (p.tree_mask ? 0 : first_row / p.group));
  int end = min(sequence.length(), sequence.past + (first_row + ROWS - 1) / p.group + 1);
  if (p.tree_mask) end = sequence.length();
  unsigned char* queries = shared + team * 16 * (DK * 2 + 16);
  unsigned char* tiles = shared + ROWS * (DK * 2 + 16);
  // What was seen of the units before, for each lane its own numbers: values, then largest logits and sums.
  unsigned char* saved = tiles + Sizes::BYTES + warp * (PART * 64 + 512) + lane * 16;
  copy_queries<T, DK, THREADS, ROWS>(p, sequence, kv_head, first_row, shared);
  Seen<PART> seen;
  int first_unit = unit_of(low);
  walk<T, KV, DK, DV, THREADS, BIASED>(
      p, sequence, rows, kv_head, queries, tiles, low, end, seen, [&](int unit, bool last) {
        float4 sums = {NEG_INF, NEG_INF, 0.0f, 0.0f};
        if (unit != first_unit) sums = ld_vec<float4>(saved + PART * 64);
        Merge merge[2] = {Merge(sums.x, sums.z, seen.top[0], seen.sum[0]),
                          Merge(sums.y, sums.w, seen.top[1], seen.sum[2])};
        UNROLL for (int i = 0; i < PART / 8; ++i) {
          float4 old = {0.0f, 0.0f, 0.0f, 0.0f};
          if (unit != first_unit) old = ld_vec<float4>(saved + i * 512);
          float* now = seen.values[i];
          old = {merge[0](old.x, now[0]), merge[0](old.y, now[1]), merge[1](old.z, now[2]), merge[1](old.w, now[3])};
          if (!last) st_vec<float4>(saved + i * 512, old);
          now[0] = old.x;
          now[1] = old.y;
          now[2] = old.z;
          now[3] = old.w;
        }
        if (!last) {
          st_vec<float4>(saved + PART * 64, sums);
          seen.clear();
        } else {
          seen.top[0] = sums.x;
          seen.top[1] = sums.y;
          seen.sum[0] = sums.z;
          seen.sum[2] = sums.w;
        }
      });
  bool pairs = ((p.y_token | p.y_head | p.value_dim) & 1) == 0;
  UNROLL for (int half = 0; half < 2; ++half) {
    if (rows.token[half] < 0) continue;
    Finish finish(p, rows.head[half], seen.top[half], seen.sum[2 * half]);
    T* y = static_cast<T*>(p.y) + rows.token[half] * p.y_token + rows.head[half] * p.y_head;
    UNROLL for (int i = 0; i < PART / 8; ++i) {
      int d = warp % Sizes::SHARE * PART + i * 8 + lane % 4 * 2;
      if (d >= p.value_dim) continue;
      float first = finish(p, kv_head, d, seen.values[i][2 * half]);
      if (pairs) {
        st_vec<uint32_t>(y + d, pack2(T{}, first, finish(p, kv_head, d + 1, seen.values[i][2 * half + 1])));
      } else {
        y[d] = round_to<T>(first);
        if (d + 1 < p.value_dim) y[d + 1] = round_to<T>(finish(p, kv_head, d + 1, seen.values[i][2 * half + 1]));
      }
    }
  }
}

// Where attention_decode leaves what it saw of a unit: [sequences][units][kv heads][rows], DV numbers, and two.
DEV int64_t part_of(const AttentionParams& p, int sequence, int unit, int kv_head, int row) {
  return ((static_cast<int64_t>(sequence) * p.max_units + unit) * p.kv_heads + kv_head) * p.part_rows + row;
}

// Sequences of few rows: a block is the warps that share 16 rows (see Tile) and takes a unit with them. Grid: any
// number of blocks, which share the units; kv heads times 16 rows.
template <class T, class KV, int DK, int DV, bool BIASED>
DEV void attention_decode(const AttentionParams& p) {
  using Sizes = Tile<T, KV, DK, DV>;
  constexpr int THREADS = 32 * Sizes::SHARE, PART = Sizes::PART;
  DYN_SMEM(shared);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y % p.kv_heads, s, item;
  int first_row = blockIdx.y / p.kv_heads * 16;
  auto units = [&](int i) {
    int first;
    return units_of(p, sequence_of(p, i), first);
  };
  for (int work = blockIdx.x; find_work(p, work, units, s, item); work += gridDim.x) {
    Sequence sequence = sequence_of(p, s);
    if (first_row >= sequence.rows * p.group) continue;
    int first_unit;
    units_of(p, sequence, first_unit);
    int mine = first_unit + item;
    LaneRows rows = rows_of_lane(p, sequence, kv_head, first_row);
    int low = max(first_visible(p, sequence.past), unit_start(mine));
    int end = min(sequence.length(), unit_start(mine + 1));
    tile_barrier<THREADS>();  // queries of the unit before are not read any more
    copy_queries<T, DK, THREADS, 16>(p, sequence, kv_head, first_row, shared);
    Seen<PART> seen;
    walk<T, KV, DK, DV, THREADS, BIASED>(
        p, sequence, rows, kv_head, shared, shared + 16 * (DK * 2 + 16), low, end, seen, [&](int unit, bool) {
          UNROLL for (int half = 0; half < 2; ++half) {
            if (rows.token[half] < 0) continue;
            int64_t part = part_of(p, s, unit, kv_head, first_row + lane / 4 + 8 * half);
            float* values = static_cast<float*>(p.part_values) + part * DV + warp * PART + lane % 4 * 2;
            UNROLL for (int i = 0; i < PART / 8; ++i) {
              st_vec<float2>(values + i * 8, float2{seen.values[i][2 * half], seen.values[i][2 * half + 1]});
            }
            if (lane % 4 == 0 && warp == 0) {
              st_vec<float2>(static_cast<float*>(p.part_sums) + part * 2, float2{seen.top[half], seen.sum[2 * half]});
            }
          }
        });
  }
}

// Adds up the units of a row. Grid: tokens, heads / 4; a warp for each head.
template <class T, int DV>
DEV void attention_combine(const AttentionParams& p) {
  constexpr int QUADS = (DV + 127) / 128;
  int token = blockIdx.x, lane = threadIdx.x % 32, head = blockIdx.y * 4 + threadIdx.x / 32, s;
  if (head >= p.heads || !find_sequence(p, token, s)) return;
  Sequence sequence = sequence_of(p, s);
  int first, count = units_of(p, sequence, first), kv_head = head / p.group;
  if (count == 0) return;
  int row = (token - sequence.first) * p.group + head % p.group;
  float top = NEG_INF, sum = 0.0f;
  float4 total[QUADS];
  UNROLL for (int i = 0; i < QUADS; ++i) total[i] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int unit = first; unit < first + count; ++unit) {
    int64_t part = part_of(p, s, unit, kv_head, row);
    const float* values = static_cast<const float*>(p.part_values) + part * DV + lane * 4;
    float2 found = ld_vec<float2>(static_cast<const float*>(p.part_sums) + part * 2);
    Merge merge(top, sum, found.x, found.y);
    UNROLL for (int i = 0; i < QUADS; ++i) {
      if (i * 128 + lane * 4 >= DV) continue;
      float4 v = ld_vec<float4>(values + i * 128), &t = total[i];
      t = {merge(t.x, v.x), merge(t.y, v.y), merge(t.z, v.z), merge(t.w, v.w)};
    }
  }
  Finish finish(p, head, top, sum);
  T* y = static_cast<T*>(p.y) + token * p.y_token + head * p.y_head;
  UNROLL for (int i = 0; i < QUADS; ++i) {
    float value[4] = {total[i].x, total[i].y, total[i].z, total[i].w};
    UNROLL for (int e = 0; e < 4; ++e) {
      int d = i * 128 + lane * 4 + e;
      if (d < p.value_dim) y[d] = round_to<T>(finish(p, kv_head, d, value[e]));
    }
  }
}
