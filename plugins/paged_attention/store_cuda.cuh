// Writes keys and values to the pool, turns queries to where keys are, and moves positions.
//
// The pool of a slot: codes of keys [blocks][kv heads][block size][dims padded to 16], the same of values, and where
// the type has scales those as float32 [blocks][kv heads][block size]. storage.py says what is stored.
#pragma once
// clang-format off: the order matters
#include "paged_attention/rows_cuda.cuh"
#include "paged_attention/tile_cuda.cuh"
// clang-format on

// Hadamard's matrix for each block of dims, the largest powers of two that fit; lane l has the dims l + 32 i.
template <int COUNT>
DEV void rotate(float* x, int dims) {
  int lane = threadIdx.x % 32, size[COUNT];
  UNROLL for (int i = 0; i < COUNT; ++i) {
    int start = 0;
    size[i] = 0;
    UNROLL for (int bit = 256; bit > 0; bit /= 2) {
      if (!(dims & bit)) continue;
      if (size[i] == 0 && lane + 32 * i < start + bit) size[i] = bit;
      start += bit;
    }
  }
  UNROLL for (int h = 1; h < 32; h *= 2) {
    UNROLL for (int i = 0; i < COUNT; ++i) {
      float other = __shfl_xor_sync(FULL_WARP, x[i], h);
      if (h < size[i]) x[i] = lane & h ? other - x[i] : x[i] + other;
    }
  }
  UNROLL for (int h = 1; h < COUNT; h *= 2) {
    UNROLL for (int i = 0; i + h < COUNT; ++i) {
      if (i & h || 32 * h >= size[i]) continue;
      float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
  UNROLL for (int i = 0; i < COUNT; ++i) {  // by the root of the size
    UNROLL for (int bit = 256; bit > 1; bit /= 4) {
      if (size[i] >= bit) x[i] *= 0.5f;
    }
    if (size[i] & 0xaaaa) x[i] *= size[i] == 2 ? 0.70710678f : 1.41421356f * 0.5f;
  }
}

constexpr float SMALLEST_ROW = 7.888609e-31f;  // 2**-100

// What the largest number of a row of E4M3 becomes: of eight numbers from 448 down to more than 224 that with the least
// error, of numbers rounded to 4 bits.
template <int COUNT>
DEV float best_reach(const float* x, float most) {
  constexpr float REACHES[8] = {448.0f,      410.8178f,   376.721588f, 345.455231f,
                                316.783844f, 290.492065f, 266.382385f, 244.273727f};
  float least = 0.0f, best = 0.0f;
  UNROLL for (int c = 0; c < 8; ++c) {
    float factor = REACHES[c] / most, sum = 0.0f;
    UNROLL for (int i = 0; i < COUNT; ++i) {
      float y = x[i] * factor, shifted = y * 1048577.0f, error = (shifted - (shifted - y)) - y;
      sum = fma_(error, error, sum);
    }
    sum = warp_sum(sum) / (REACHES[c] * REACHES[c]);
    if (best != 0.0f && sum >= least) continue;
    least = sum;
    best = REACHES[c];
  }
  return best;
}

// Numbers of E4M3 in place of the warp's, dim after dim, whose errors those behind it make up for.
template <int COUNT>
DEV void feed_back(float* x, int dims, const void* feedback, int kind, int64_t first) {
  int lane = threadIdx.x % 32;
  UNROLL for (int i = 0; i < COUNT; ++i) {
    for (int d = 32 * i; d < min(32 * i + 32, dims); ++d) {
      float given = __shfl_sync(FULL_WARP, x[i], d % 32), error = given - to_f(round_to<E4M3>(given));
      UNROLL for (int j = i; j < COUNT; ++j) {
        int at = lane + 32 * j;
        if (at < dims) x[j] -= error * side(feedback, kind, first + static_cast<int64_t>(d) * dims + at);
      }
    }
  }
}

// A row of a head: the warp's numbers to codes, those of keys perhaps with feedback from place `first` on. Gives the
// scale.
template <class KV, int COUNT>
DEV float encode(const float* x, KV* to, int dims, int width, const void* feedback = nullptr, int kind = 0,
                 int64_t first = 0) {
  int lane = threadIdx.x % 32;
  float factor = 1.0f, scale = 1.0f;
  if constexpr (SCALED<KV>) {
    float most = 0.0f;
    bool finite = true;
    UNROLL for (int i = 0; i < COUNT; ++i) {
      finite = finite && x[i] - x[i] == 0.0f;
      most = max(most, max(x[i], -x[i]));
    }
    finite = __ballot_sync(FULL_WARP, !finite) == 0;
    most = warp_max(most);
    bool stored = finite && most >= SMALLEST_ROW;
    float reach = 127.0f;
    if constexpr (SAME<KV, E4M3>) reach = stored ? best_reach<COUNT>(x, most) : 1.0f;
    factor = stored ? reach / most : 0.0f;
    scale = stored ? most / reach : finite ? 0.0f : uint_as_float(0x7fc00000u);
  }
  float y[COUNT], rounded[COUNT], own = 0.0f, shared = 0.0f;
  UNROLL for (int i = 0; i < COUNT; ++i) {
    y[i] = rounded[i] = lane + 32 * i >= dims || factor == 0.0f ? 0.0f : x[i] * factor;
  }
  if constexpr (SAME<KV, E4M3>) {
    if (feedback) feed_back<COUNT>(rounded, dims, feedback, kind, first);
  }
  UNROLL for (int i = 0; i < COUNT; ++i) {
    int d = lane + 32 * i;
    if (d >= width) continue;
    KV code = round_to<KV>(rounded[i]);
    to[d] = code;
    if constexpr (SAME<KV, E4M3>) {
      own = fma_(y[i], y[i], own);
      shared = fma_(y[i], to_f(code), shared);
    }
  }
  if constexpr (SAME<KV, E4M3>) {
    own = warp_sum(own);
    shared = warp_sum(shared);
    if (factor != 0.0f) scale *= own / shared;  // the error has no part along the row
  }
  return scale;
}

// Grid: tokens, (2 kv heads + heads) / 4; a warp for each row of a key, a value, or, where queries have to be turned,
// a query. COUNT * 32: not less than the padded dims.
template <class T, class KV, int COUNT>
DEV void attention_store(const AttentionParams& p) {
  int token = blockIdx.x, lane = threadIdx.x % 32, s;
  int item = blockIdx.y * 4 + threadIdx.x / 32 + (p.writes ? 0 : 2 * p.kv_heads);
  if (item >= 2 * p.kv_heads + (p.turned ? p.heads : 0) || !find_sequence(p, token, s)) return;
  bool key = item < p.kv_heads, query = item >= 2 * p.kv_heads;
  int head = query ? item - 2 * p.kv_heads : key ? item : item - p.kv_heads;
  int kv_head = query ? head / p.group : head, dims = key || query ? p.key_dim : p.value_dim;
  const T* from = query ? static_cast<const T*>(p.given_q) + token * p.given_token + head * p.given_head
                  : key ? static_cast<const T*>(p.k) + token * p.k_token + head * p.k_head
                        : static_cast<const T*>(p.v) + token * p.v_token + head * p.v_head;
  const void* center = key || query ? p.key_center : p.value_center;
  const void* factor = key || query ? p.key_scale : p.value_scale;
  int center_kind = key || query ? p.key_center_kind : p.value_center_kind;
  int factor_kind = key || query ? p.key_scale_kind : p.value_scale_kind;
  float x[COUNT], product = 0.0f;
  UNROLL for (int i = 0; i < COUNT; ++i) {
    int d = lane + 32 * i;
    x[i] = 0.0f;
    if (d >= dims) continue;
    x[i] = to_f(from[d]);
    int64_t place = static_cast<int64_t>(kv_head) * dims + d;
    if (query) {
      if (center) product = fma_(x[i], side(center, center_kind, place), product);
      if (factor) x[i] /= side(factor, factor_kind, place);
    } else {
      if (center) x[i] -= side(center, center_kind, place);
      if (factor) x[i] *= side(factor, factor_kind, place);
    }
  }
  if (SCALED<KV> && (key || query)) rotate<COUNT>(x, dims);
  if (query) {
    product = warp_sum(product);
    int64_t row = static_cast<int64_t>(token) * p.heads + head;
    if (p.shifts && lane == 0) static_cast<float*>(p.shifts)[row] = product * p.true_scale;
    encode<T, COUNT>(x, static_cast<T*>(p.turned) + row * p.key_width, dims, p.key_width);
    return;
  }
  Sequence sequence = sequence_of(p, s);
  int64_t place = place_of(p, sequence, kv_head, sequence.past + token - sequence.first);
  int width = key ? p.key_width : p.value_width;
  KV* to = static_cast<KV*>(key ? p.keys : p.values) + place * width;
  float scale = encode<KV, COUNT>(x, to, dims, width, key ? p.key_feedback : nullptr, p.key_feedback_kind,
                                  static_cast<int64_t>(kv_head) * dims * dims);
  if (SCALED<KV> && lane == 0) static_cast<float*>(key ? p.key_scales : p.value_scales)[place] = scale;
}
