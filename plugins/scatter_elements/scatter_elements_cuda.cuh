// llmc::scatter_elements: a row a warp, whose lanes copy it; then one of them goes through the ids in order.
#pragma once
#include "csrc/cuda/strided.cuh"

template <bool Add, class X, class I, class S, class Y, class P>
DEV void scatter_elements(const P& p) {
  const Position row = position(blockIdx.x, p.n1, p.n2, p.n3);
  const int64_t from = offset(row, p.x0, p.x1, p.x2, p.x3), to = offset(row, p.y0, p.y1, p.y2, p.y3);
  const int64_t ids = offset(row, p.i0, p.i1, p.i2, p.i3), source = offset(row, p.s0, p.s1, p.s2, p.s3);
  for (int64_t i = threadIdx.x; i < p.size; i += 32) {
    put<Y>(p.y, to + i * p.y_stride, get<X>(p.x, from + i * p.x_stride));
  }
  __syncwarp();
  if (threadIdx.x != 0) return;
  for (int64_t k = 0; k < p.inner; ++k) {
    int64_t id = get<I>(p.ids, ids + k * p.i_stride);
    if (id < 0) id += p.size;
    if (id < 0 || id >= p.size) continue;  // garbage of surplus rows
    const Number<S> v = get<S>(p.src, source + k * p.s_stride);
    const int64_t place = to + id * p.y_stride;
    if constexpr (Add) {
      put<Y>(p.y, place, get<Y>(p.y, place) + v);
    } else {
      put<Y>(p.y, place, v);
    }
  }
}
