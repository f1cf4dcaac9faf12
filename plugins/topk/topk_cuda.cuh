// llmc::topk: a row a warp, which looks k times for the next element in order. Rows are scores of experts: short.
#pragma once
#include "csrc/cuda/strided.cuh"

// Integers in the order of the numbers; one that is none comes somewhere, so that every place is found once.
DEV int64_t order(float v) {
  const uint32_t bits = float_as_uint(v + 0.0f);  // -0 is 0
  return bits & 0x80000000u ? -static_cast<int64_t>(bits & 0x7fffffffu) : static_cast<int64_t>(bits);
}
DEV int64_t order(int64_t v) { return v; }

template <bool Largest, class X, class Y, class P>
DEV void topk(const P& p) {
  const Position row = position(blockIdx.x, p.n1, p.n2, p.n3);
  const int64_t from = offset(row, p.x0, p.x1, p.x2, p.x3);
  const int64_t values = offset(row, p.y0, p.y1, p.y2, p.y3), places = offset(row, p.i0, p.i1, p.i2, p.i3);
  int64_t last = 0, last_place = -1;  // none yet
  for (int64_t k = 0; k < p.k; ++k) {
    int64_t best = 0, place = p.size;
    for (int64_t i = threadIdx.x; i < p.size; i += 32) {
      int64_t v = order(get<X>(p.x, from + i * p.x_stride));
      if (!Largest) v = -v;
      const bool taken = last_place >= 0 && (v > last || (v == last && i <= last_place));
      if (!taken && (place == p.size || v > best)) {
        best = v;
        place = i;
      }
    }
    for (int step = 16; step > 0; step >>= 1) {
      const int64_t other = __shfl_xor_sync(FULL_WARP, best, step);
      const int64_t there = __shfl_xor_sync(FULL_WARP, place, step);
      if (there < p.size && (place == p.size || other > best || (other == best && there < place))) {
        best = other;
        place = there;
      }
    }
    last = best;
    last_place = place;
    if (threadIdx.x == 0) {
      put<Y>(p.y, values + k * p.y_stride, get<X>(p.x, from + place * p.x_stride));
      static_cast<int64_t*>(p.i)[places + k * p.i_stride] = place;
    }
  }
}
