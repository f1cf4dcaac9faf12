// The background of sm_90a with a planted mistake each, and its correct twin: what the emulator has to report.
#pragma once
#include "csrc/cuda/hopper.cuh"

// A warpgroup and a warp that copies. table: eight rows of 128 bytes, swizzled. x [64, 8] float32: their first 32 bytes
// times 64 rows of the same bytes, each warp those of its own, twice.
template <int Case>
DEV void hopper_fault(const FaultParams& p) {
  DYN_SMEM(memory);
  void *full = memory + 1024, *empty = memory + 1032;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbar_init(full, 1);
    mbar_init(empty, Case == 1 ? 5 : 4);  // nobody else arrives
    mbar_init_fence();
  }
  if (Case != 2) __syncthreads();  // the barriers may not be there
  if (warp == 4) {
    if (lane != 0) return;
    for (int round = 0; round < 2; ++round) {
      if (Case != 3) mbar_wait(empty, round & 1 ^ 1);  // overwrites what others still read
      mbar_expect(full, Case == 4 ? 1040 : 1024);      // more bytes than come
      bulk_copy(memory, static_cast<const char*>(p.table) + (Case == 5 ? 8 : 0), 1024, full);  // misaligned
    }
    return;
  }
  float c[4], other[4];
  uint32_t a[4];
  for (int round = 0; round < 2; ++round) {
    if (Case != 6 || round == 0) mbar_wait(full, Case == 7 ? 1 : round);  // 6, 7: has not arrived
    for (int i = 0; i < 4; ++i) a[i] = ld_vec<uint32_t>(memory + 256 * warp + 8 * lane + 4 * (i % 2));
    if (Case != 8) wgmma_fence();
    if (Case == 9 && warp == 3) break;  // a warp of the four is missing
    wgmma_bf16(c, a, wgmma_operand(memory) & (Case == 10 ? ~(1ull << 62) : ~0ull), round > 0);  // 10: not swizzled
    if (Case == 11) a[0] = 0;                                                                   // an operand in flight
    if (Case == 12) c[0] = 0.0f;                                                                // a sum in flight
    if (Case == 13 && lane == 0) memory[lane] = 0;                                              // what it reads
    if (Case != 14) wgmma_commit();                                                             // waits for nothing
    if (Case != 15) wgmma_wait(c);  // 15: the numbers are not there, and the warp ends before
    if (Case != 16) __syncwarp();   // lanes may still read
    if (lane == 0) mbar_arrive(empty);
    if (Case == 17 && lane == 0) mbar_arrive(empty);  // more than are counted
  }
  for (int i = 0; i < 4; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    static_cast<float*>(p.x)[row * 8 + column] = c[i];
  }
}
