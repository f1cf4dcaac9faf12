// llmc::norm and llmc::add_norm: a warp or a block a row, whose numbers are summed in an order that depends on the
// length of the row alone. They are read again for each pass: a row stays in the cache.
#pragma once
#include "csrc/cuda/strided.cuh"

enum NormKind { RMS, LAYER, L2 };

// y = n(row) * (weight + shift) + bias of a row that `load(i)` gives.
template <NormKind Kind, class Y, int Warps, class P, class Load>
DEV void norm_row(const P& p, int64_t row, const Load& load, Y* y, float* shared) {
  const int64_t size = p.size;
  constexpr int threads = 32 * Warps;
  float mean = 0.0f;
  if constexpr (Kind == LAYER) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < size; i += threads) sum += load(i);
    mean = block_sum<Warps>(sum, shared) / static_cast<float>(size);
    if constexpr (Warps > 1) __syncthreads();
  }
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < size; i += threads) {
    const float v = load(i) - mean;
    squares = fma_(v, v, squares);
  }
  squares = block_sum<Warps>(squares, shared);
  float factor;
  if constexpr (Kind == L2) {
    const float length = sqrtf(squares);
    factor = 1.0f / (length < p.epsilon ? p.epsilon : length);
  } else {
    factor = 1.0f / sqrtf(squares / static_cast<float>(size) + p.epsilon);
  }
  const int64_t weights = p.weight_rows > 1 ? row % p.weight_rows * size : 0;
  const float* weight = static_cast<const float*>(p.weight);
  const float* bias = static_cast<const float*>(p.bias);
  for (int64_t i = threadIdx.x; i < size; i += threads) {
    float v = (load(i) - mean) * factor;
    if (weight) v *= weight[weights + i] + p.shift;
    if (bias) v += bias[weights + i];
    y[i] = round_to<Y>(v);
  }
}

template <NormKind Kind, class X, class Y, int Warps, class P>
DEV void norm(const P& p) {
  DYN_SMEM(shared);
  const int64_t row = blockIdx.x;
  const Position at = position(row, p.n1, p.n2, p.n3);
  const X* x = static_cast<const X*>(p.x) + offset(at, p.x0, p.x1, p.x2, p.x3);
  Y* y = static_cast<Y*>(p.y) + offset(at, p.y0, p.y1, p.y2, p.y3);
  norm_row<Kind, Y, Warps>(p, row, [x](int64_t i) { return to_f(x[i]); }, y, reinterpret_cast<float*>(shared));
}

// The norm is that of the sum as it is stored; each thread reads what it has written itself.
template <NormKind Kind, class A, class B, class S, class Y, int Warps, class P>
DEV void add_norm(const P& p) {
  DYN_SMEM(shared);
  const int64_t row = blockIdx.x;
  const Position at = position(row, p.n1, p.n2, p.n3);
  const A* a = static_cast<const A*>(p.a) + offset(at, p.a0, p.a1, p.a2, p.a3);
  const B* b = static_cast<const B*>(p.b) + offset(at, p.b0, p.b1, p.b2, p.b3);
  S* sum = static_cast<S*>(p.s) + offset(at, p.s0, p.s1, p.s2, p.s3);
  Y* y = static_cast<Y*>(p.y) + offset(at, p.y0, p.y1, p.y2, p.y3);
  for (int64_t i = threadIdx.x; i < p.size; i += 32 * Warps) sum[i] = round_to<S>(to_f(a[i]) + to_f(b[i]));
  norm_row<Kind, Y, Warps>(p, row, [sum](int64_t i) { return to_f(sum[i]); }, y, reinterpret_cast<float*>(shared));
}
