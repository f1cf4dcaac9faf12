// llmc::gather_elements: one thread an element; an id that is out of range gives zero.
#pragma once
#include "csrc/cuda/strided.cuh"

template <class X, class I, class Y, class P>
DEV void gather_elements(const P& p) {
  const int64_t number_of = thread_number();
  if (number_of >= p.count) return;
  const int64_t k = number_of % p.inner;
  const Position row = position(number_of / p.inner, p.n1, p.n2, p.n3);
  int64_t id = get<I>(p.ids, offset(row, p.i0, p.i1, p.i2, p.i3) + k * p.i_stride);
  if (id < 0) id += p.size;
  const int64_t to = offset(row, p.y0, p.y1, p.y2, p.y3) + k * p.y_stride;
  if (id >= 0 && id < p.size) {
    put<Y>(p.y, to, get<X>(p.x, offset(row, p.x0, p.x1, p.x2, p.x3) + id * p.x_stride));
  } else {
    put<Y>(p.y, to, Number<X>{});
  }
}
