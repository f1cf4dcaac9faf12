// llmc::gather: one thread an element. An id that is out of range, as garbage of surplus rows may be, gives zeros.
#pragma once
#include "csrc/cuda/strided.cuh"

template <class X, class I, class Y, class P>
DEV void gather(const P& p) {
  const int64_t number_of = thread_number();
  if (number_of >= p.count) return;
  const int64_t inner = number_of % p.inner;
  const Position of_id = position(number_of / p.inner, p.n1, p.n2, p.n3), at = position(inner, p.m1, p.m2, p.m3);
  int64_t id = get<I>(p.ids, offset(of_id, p.i0, p.i1, p.i2, p.i3));
  if (id < 0) id += p.size;
  const int64_t from = id * p.x_stride + offset(at, p.x0, p.x1, p.x2, p.x3);
  const int64_t to = offset(of_id, p.y0, p.y1, p.y2, p.y3) + offset(at, p.z0, p.z1, p.z2, p.z3);
  if (id >= 0 && id < p.size) {
    put<Y>(p.y, to, get<X>(p.x, from));
  } else {
    put<Y>(p.y, to, Number<X>{});
  }
}
