// llmc::rope: one thread an output; the coefficients are those of its position.
#pragma once
#include "csrc/cuda/strided.cuh"

template <class X, class Y, class I, class P>
DEV void rope(const P& p) {
  const int64_t i = thread_number();
  if (i >= p.count) return;
  const int64_t d = i % p.size, head = i / p.size % p.heads, t = i / p.size / p.heads;
  const int64_t place = static_cast<int64_t>(static_cast<const I*>(p.positions)[t * p.positions_stride]);
  const float* table = static_cast<const float*>(p.table) + place * p.columns;
  const int32_t* index = static_cast<const int32_t*>(p.index) + d;
  const float* sign = static_cast<const float*>(p.sign) + d;
  const X* x = static_cast<const X*>(p.x) + t * p.x_token + head * p.x_head;
  const float first = to_f(x[index[0] * p.x_dim]) * (sign[0] * table[index[p.size]]);
  const float second = to_f(x[index[2 * p.size] * p.x_dim]) * (sign[p.size] * table[index[3 * p.size]]);
  static_cast<Y*>(p.y)[t * p.y_token + head * p.y_head + d * p.y_dim] = round_to<Y>(first + second);
}
