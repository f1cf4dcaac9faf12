// llmc::reduce: a warp a row. Lanes take elements in turn and are joined in pairs, in an order that depends on the size
// of the row alone.
#pragma once
#include "csrc/cuda/strided.cuh"

// `V none()` changes nothing, `V join(V, V)`. Results of argmax and argmin are places, see below.
template <class V>
struct R_sum {
  static DEV V none() { return V{}; }
  static DEV V join(V a, V b) { return a + b; }
};
template <class V>
struct R_prod {
  static DEV V none() { return static_cast<V>(1); }
  static DEV V join(V a, V b) { return a * b; }
};
template <class V>
struct R_any {
  static DEV V none() { return V{}; }
  static DEV V join(V a, V b) { return a != V{} || b != V{} ? static_cast<V>(1) : V{}; }
};
template <class V>
struct R_all {
  static DEV V none() { return static_cast<V>(1); }
  static DEV V join(V a, V b) { return a != V{} && b != V{} ? static_cast<V>(1) : V{}; }
};

template <class X, class P>
DEV Number<X> element(const P& p, int64_t base, int64_t i) {
  const Position at = position(i, p.m1, p.m2, p.m3);
  return get<X>(p.x, base + offset(at, p.r0, p.r1, p.r2, p.r3));
}

template <template <class> class R, bool Mean, class X, class Y, class P>
DEV void reduce(const P& p) {
  using V = Number<X>;
  const Position row = position(blockIdx.x, p.n1, p.n2, p.n3);
  const int64_t base = offset(row, p.x0, p.x1, p.x2, p.x3);
  V found = R<V>::none();
  for (int64_t i = threadIdx.x; i < p.size; i += 32) found = R<V>::join(found, element<X>(p, base, i));
  for (int step = 16; step > 0; step >>= 1) found = R<V>::join(found, __shfl_xor_sync(FULL_WARP, found, step));
  if constexpr (Mean) found = found / static_cast<V>(p.size);
  if (threadIdx.x == 0) put<Y>(p.y, offset(row, p.y0, p.y1, p.y2, p.y3), found);
}

// The extreme element, or its place: of equal ones the first, and 0 where no element is a number.
template <bool Largest, bool Place, class X, class Y, class P>
DEV void extreme(const P& p) {
  using V = Number<X>;
  const Position row = position(blockIdx.x, p.n1, p.n2, p.n3);
  const int64_t base = offset(row, p.x0, p.x1, p.x2, p.x3);
  int64_t place = threadIdx.x < p.size ? threadIdx.x : 0;
  V best = element<X>(p, base, place);
  for (int64_t i = place + 32; i < p.size; i += 32) {
    const V v = element<X>(p, base, i);
    if (Largest ? v > best : v < best) {
      best = v;
      place = i;
    }
  }
  for (int step = 16; step > 0; step >>= 1) {
    const V other = __shfl_xor_sync(FULL_WARP, best, step);
    const int64_t there = __shfl_xor_sync(FULL_WARP, place, step);
    if ((Largest ? other > best : other < best) || (other == best && there < place)) {
      best = other;
      place = there;
    }
  }
  if (threadIdx.x != 0) return;
  const int64_t to = offset(row, p.y0, p.y1, p.y2, p.y3);
  if constexpr (Place) {
    put<Y>(p.y, to, place);
  } else {
    put<Y>(p.y, to, best);
  }
}
