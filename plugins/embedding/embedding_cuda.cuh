// llmc::embedding: rows of a table that is plain, or packed for the output layer that shares it.
#pragma once
#include "csrc/cuda/gemm_rows.cuh"

// A block for each id and 256 columns. An id that the table lacks gives a row that is no number.
template <class Id, class Numbers, class P>
DEV void embedding(const P& p) {
  const int64_t row = blockIdx.x;
  const int column = static_cast<int>(blockIdx.y) * ROW_THREADS + static_cast<int>(threadIdx.x);
  if (column >= p.K) return;
  const int64_t id = static_cast<const Id*>(p.ids)[row * p.id_stride];
  const bool known = id >= 0 && id < p.N;
  put_float(p.y, p.y_type, row * p.y_stride + column,
            known ? Numbers::number(p, 0, id, column) : uint_as_float(0x7fc00000u));
}
