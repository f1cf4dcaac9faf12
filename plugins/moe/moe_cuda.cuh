// llmc::moe around its two grouped products: rows grouped by expert, activations, weighted sums. See moe/cuda.py.
#pragma once
#include "csrc/cuda/gemm_rows.cuh"

constexpr int ROUTE_WARPS = 8;

template <class P>
DEV int64_t expert_of(const P& p, int pair) {
  const int64_t token = pair / p.choices;
  return static_cast<const int64_t*>(p.ids)[token * p.token_stride + (pair - token * p.choices) * p.choice_stride];
}

// A block for each expert: its pairs (token * choices + choice) in ascending order at rows[start], where start is the
// number of pairs of the experts before it, and its tiles (expert, begin, count). Tiles of an expert begin at number
// start / tile_rows + expert, as the experts before it need no more; those left over are empty.
template <class P>
DEV void route(const P& p) {
  DYN_SMEM(memory);
  int32_t* counts = reinterpret_cast<int32_t*>(memory);  // of each warp: pairs of this expert, of those before it
  const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int share = (p.pairs + 32 * ROUTE_WARPS - 1) / (32 * ROUTE_WARPS) * 32;
  const int first = min(warp * share, p.pairs), last = min(first + share, p.pairs);
  int mine = 0, below = 0;
  for (int base = first; base < last; base += 32) {
    const int64_t id = base + lane < last ? expert_of(p, base + lane) : -1;
    mine += __popc(__ballot_sync(FULL_WARP, id == expert));
    below += __popc(__ballot_sync(FULL_WARP, id >= 0 && id < expert));
  }
  if (lane == 0) {
    counts[2 * warp] = mine;
    counts[2 * warp + 1] = below;
  }
  __syncthreads();
  int start = 0, count = 0, at = 0;
  for (int w = 0; w < ROUTE_WARPS; ++w) {
    if (w == warp) at = count;
    count += counts[2 * w];
    start += counts[2 * w + 1];
  }
  at += start;
  int32_t* rows = static_cast<int32_t*>(p.rows);
  for (int base = first; base < last; base += 32) {
    const bool chosen = base + lane < last && expert_of(p, base + lane) == expert;
    const uint32_t all = __ballot_sync(FULL_WARP, chosen);
    if (chosen) rows[at + __popc(all & ((1u << lane) - 1u))] = base + lane;
    at += __popc(all);
  }
  const int tile = start / p.tile_rows + expert, end = (start + count) / p.tile_rows + expert + 1;
  const int stop = expert + 1 == p.experts ? p.tiles : end;
  for (int i = tile + static_cast<int>(threadIdx.x); i < stop; i += 32 * ROUTE_WARPS) {
    const int begin = (i - tile) * p.tile_rows;
    int32_t* to = static_cast<int32_t*>(p.tile) + 3 * static_cast<int64_t>(i);
    to[0] = expert;
    to[1] = start + begin;
    to[2] = i < end ? max(0, min(p.tile_rows, count - begin)) : 0;
  }
}

struct GptOss {};  // the gated form of its own

template <class F>
struct Activation {
  static DEV float apply(float gate, float up, float) { return F::apply(gate) * up; }
};
template <>
struct Activation<GptOss> {
  static DEV float apply(float gate, float up, float alpha) { return gate * sigmoid_(alpha * gate) * (up + 1.0f); }
};

// hidden [pairs, inner] of gates and ups [pairs, 2 inner], or of [pairs, inner] alone. Pairs without an expert are 0.
template <class F, bool GatedUnit, bool Interleaved, class P>
DEV void activate(const P& p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * ROW_THREADS + threadIdx.x;
  const int64_t pair = i / p.inner;
  const int column = static_cast<int>(i - pair * p.inner);
  if (pair >= p.pairs) return;
  const int64_t expert = expert_of(p, static_cast<int>(pair));
  float v = 0.0f;
  if (expert >= 0 && expert < p.experts) {
    const float* from = static_cast<const float*>(p.gate_up) + pair * p.inner * (GatedUnit ? 2 : 1);
    if constexpr (GatedUnit) {
      float gate = from[Interleaved ? 2 * column : column];
      float up = from[Interleaved ? 2 * column + 1 : p.inner + column];
      if (p.limit > 0.0f) {
        gate = gate > p.limit ? p.limit : gate;
        up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
      }
      v = Activation<F>::apply(gate, up, p.alpha);
    } else {
      v = F::apply(from[column]);
    }
  }
  put_float(p.hidden, p.type, i, v);
}

// y[t] = sum over the choices of a token, in their order, of weight * out.
template <class W, class P>
DEV void add_experts(const P& p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * ROW_THREADS + threadIdx.x;
  const int64_t token = i / p.width;
  const int column = static_cast<int>(i - token * p.width);
  if (token >= p.tokens) return;
  float sum = 0.0f;
  for (int choice = 0; choice < p.choices; ++choice) {
    const int64_t pair = token * p.choices + choice, expert = expert_of(p, static_cast<int>(pair));
    if (expert < 0 || expert >= p.experts) continue;
    const float weight = to_f(static_cast<const W*>(p.weights)[token * p.weight_stride + choice * p.weight_step]);
    sum = fma_(weight, static_cast<const float*>(p.out)[pair * p.width + column], sum);
  }
  put_float(p.y, p.type, token * p.y_stride + column, sum);
}
