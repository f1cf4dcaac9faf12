// llmc::cumsum: a row a thread, added one after the other. Rows are short: groups of experts, positions.
#pragma once
#include "csrc/cuda/strided.cuh"

template <bool Exclusive, class X, class Y, class P>
DEV void cumsum(const P& p) {
  const int64_t row = thread_number();
  if (row >= p.count) return;
  const Position at = position(row, p.n1, p.n2, p.n3);
  const int64_t from = offset(at, p.x0, p.x1, p.x2, p.x3), to = offset(at, p.y0, p.y1, p.y2, p.y3);
  Number<X> sum{};
  for (int64_t i = 0; i < p.size; ++i) {
    const Number<X> v = get<X>(p.x, from + i * p.x_stride);
    if (Exclusive) put<Y>(p.y, to + i * p.y_stride, sum);
    sum += v;
    if (!Exclusive) put<Y>(p.y, to + i * p.y_stride, sum);
  }
}
