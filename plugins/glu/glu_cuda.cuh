// llmc::glu: y = function(gate) * up, eight numbers a thread where rows allow it.
#pragma once
#include "csrc/cuda/activations.cuh"
#include "csrc/cuda/strided.cuh"

template <class F, class A, class B, class Y, int Width, class P>
DEV void glu(const P& p) {
  const int64_t i = thread_number();
  if (i >= p.count) return;
  const int64_t row = i / p.chunks, column = i % p.chunks * Width;
  const A* gate = static_cast<const A*>(p.gate) + row * p.gate_stride + column;
  const B* up = static_cast<const B*>(p.up) + row * p.up_stride + column;
  Y* y = static_cast<Y*>(p.y) + row * p.y_stride + column;
  if constexpr (Width == 1) {
    *y = round_to<Y>(F::apply(to_f(*gate)) * to_f(*up));
  } else {
    const uint4 gates = ld_vec<uint4>(gate), ups = ld_vec<uint4>(up);
    uint4 result;
    const A* g = reinterpret_cast<const A*>(&gates);
    const B* u = reinterpret_cast<const B*>(&ups);
    Y* r = reinterpret_cast<Y*>(&result);
    UNROLL for (int j = 0; j < Width; ++j) r[j] = round_to<Y>(F::apply(to_f(g[j])) * to_f(u[j]));
    st_vec(y, result);
  }
}
