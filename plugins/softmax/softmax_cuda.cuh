// llmc::softmax: a warp or a block a row.
#pragma once
#include "csrc/cuda/strided.cuh"

template <bool Log, class X, class Y, int Warps, class P>
DEV void softmax(const P& p) {
  DYN_SMEM(memory);
  float* shared = reinterpret_cast<float*>(memory);
  constexpr int threads = 32 * Warps;
  const Position at = position(blockIdx.x, p.n1, p.n2, p.n3);
  const X* x = static_cast<const X*>(p.x) + offset(at, p.x0, p.x1, p.x2, p.x3);
  Y* y = static_cast<Y*>(p.y) + offset(at, p.y0, p.y1, p.y2, p.y3);
  float most = NEG_INF;
  for (int64_t i = threadIdx.x; i < p.size; i += threads) most = fmaxf(most, to_f(x[i * p.x_stride]));
  most = block_max<Warps>(most, shared);
  if constexpr (Warps > 1) __syncthreads();
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.size; i += threads) sum += expf(to_f(x[i * p.x_stride]) - most);
  sum = block_sum<Warps>(sum, shared);
  const float shift = logf(sum), factor = 1.0f / sum;
  for (int64_t i = threadIdx.x; i < p.size; i += threads) {
    const float v = to_f(x[i * p.x_stride]) - most;
    y[i * p.y_stride] = round_to<Y>(Log ? v - shift : expf(v) * factor);
  }
}
