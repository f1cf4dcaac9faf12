// llmc::lora: y = base + (x a^T) b with the adapter of each row.
#pragma once
#include "csrc/cuda/gemm_rows.cuh"

constexpr int LORA_COLUMNS = 1024;  // of y, of a block

// A block for each row and some columns: a warp for each number of the low-rank form, then a thread for each column.
template <class X, class W, class P>
DEV void lora(const P& p) {
  DYN_SMEM(memory);
  float* low = reinterpret_cast<float*>(memory);
  const int64_t row = blockIdx.x;
  const int first = static_cast<int>(blockIdx.y) * LORA_COLUMNS, last = min(first + LORA_COLUMNS, p.N);
  const int adapter = static_cast<const int32_t*>(p.adapters)[row];
  const int rank = adapter >= 0 ? static_cast<const int32_t*>(p.ranks)[adapter] : 0;
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride;
  for (int r = threadIdx.x / 32; r < rank; r += ROW_THREADS / 32) {
    const W* a = static_cast<const W*>(p.a) + (static_cast<int64_t>(adapter) * p.rank + r) * p.K;
    float sum = 0.0f;
    for (int k = threadIdx.x % 32; k < p.K; k += 32) sum = fma_(to_f(a[k]), to_f(x[k]), sum);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) low[r] = sum;
  }
  __syncthreads();
  const X* base = static_cast<const X*>(p.base) + row * p.base_stride;
  for (int n = first + static_cast<int>(threadIdx.x); n < last; n += ROW_THREADS) {
    float sum = 0.0f;
    const W* b = static_cast<const W*>(p.b) + static_cast<int64_t>(adapter < 0 ? 0 : adapter) * p.rank * p.N + n;
    for (int r = 0; r < rank; ++r) sum = fma_(low[r], to_f(b[static_cast<int64_t>(r) * p.N]), sum);
    const float v = to_f(base[n]);
    put_float(p.y, p.y_type, row * p.y_stride + n, rank > 0 ? v + sum : v);
  }
}
