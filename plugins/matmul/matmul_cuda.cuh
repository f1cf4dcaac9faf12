// llmc::matmul: a product of two activations of any strides, in float32 and without tensor cores: models have few.
#pragma once
#include "csrc/cuda/gemm_rows.cuh"

constexpr int MATMUL_TILE = 16;

// A block of 16 x 16 threads for a tile of y; K in ascending order.
template <class A, class B, class P>
DEV void matmul(const P& p) {
  DYN_SMEM(memory);
  float* left = reinterpret_cast<float*>(memory);
  float* right = left + MATMUL_TILE * (MATMUL_TILE + 1);
  const int row = threadIdx.x / MATMUL_TILE, column = threadIdx.x % MATMUL_TILE;
  const int64_t batch = blockIdx.z, i1 = batch % p.n1, i0 = batch / p.n1;
  const A* a = static_cast<const A*>(p.a) + i0 * p.a0 + i1 * p.a1;
  const B* b = static_cast<const B*>(p.b) + i0 * p.b0 + i1 * p.b1;
  const int m = static_cast<int>(blockIdx.y) * MATMUL_TILE, n = static_cast<int>(blockIdx.x) * MATMUL_TILE;
  float sum = 0.0f;
  for (int k = 0; k < p.K; k += MATMUL_TILE) {
    const bool in_a = m + row < p.M && k + column < p.K, in_b = k + row < p.K && n + column < p.N;
    left[row * (MATMUL_TILE + 1) + column] = in_a ? to_f(a[(m + row) * p.am + (k + column) * p.ak]) : 0.0f;
    right[row * (MATMUL_TILE + 1) + column] = in_b ? to_f(b[(k + row) * p.bk + (n + column) * p.bn]) : 0.0f;
    __syncthreads();
    UNROLL for (int i = 0; i < MATMUL_TILE; ++i) {
      sum = fma_(left[row * (MATMUL_TILE + 1) + i], right[i * (MATMUL_TILE + 1) + column], sum);
    }
    __syncthreads();
  }
  if (m + row < p.M && n + column < p.N) {
    put_float(p.y, p.y_type, i0 * p.y0 + i1 * p.y1 + (m + row) * p.ym + (n + column) * p.yn, sum);
  }
}
