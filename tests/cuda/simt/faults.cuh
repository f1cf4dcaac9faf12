// Kernels with a planted mistake each, and their correct twins: what the emulator has to report, and what not.
#pragma once

template <int Case>
DEV void fault(const FaultParams& p) {
  DYN_SMEM(memory);
  auto* shared = reinterpret_cast<int32_t*>(memory);
  auto* x = static_cast<int32_t*>(p.x);
  const auto* table = static_cast<const int32_t*>(p.table);
  int t = threadIdx.x, lane = t % 32;
  if (Case == 0) {  // correct: a barrier between the threads
    shared[t] = t;
    __syncthreads();
    x[t] = shared[63 - t];
  }
  if (Case == 1) {  // half of the block waits
    if (t < 32) __syncthreads();
  }
  if (Case == 2) {  // half of a warp waits for all of it
    if (lane < 16) __syncwarp();
  }
  if (Case == 3) {  // waits for what never comes
    while (static_cast<volatile int32_t*>(p.x)[0] != 7) {
    }
  }
  if (Case == 4) atomicAdd(x, 1);  // correct
  if (Case == 5) x[0] += 1;
  if (Case == 6) {  // a barrier of the warp, where one of the block is needed
    shared[t] = t;
    __syncwarp();
    x[t] = shared[t ^ 32];
  }
  if (Case == 7) {  // correct: within the warp
    shared[t] = t;
    __syncwarp();
    x[t] = shared[t ^ 1];
  }
  if (Case == 8) {  // lane 15 reads lane 16, which is left out
    if (lane < 16) x[t] = __shfl_sync(0x0000ffffu, t, lane + 1);
  }
  if (Case == 9) shared[t + 1] = t;  // one past the end
  if (Case == 10) {                  // different barriers meet
    if (t < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
    x[t] = t;
  }
  if (Case == 11) x[2 * t] = t;      // out of bounds
  if (Case == 12) x[t] = shared[t];  // nobody has written it
  if (Case == 13) x[t] = x[t] + 1;   // nor this
  if (Case == 14) {                  // read-only
    const_cast<int32_t*>(table)[t] = 1;
  }
  if (Case == 15) {  // used before it has arrived
    cp_async16(memory + 16 * (t % 16), table + 4 * (t % 16), true);
    cp_commit();
    x[t] = shared[0];
    cp_wait<0>();
  }
  if (Case == 16) {  // correct
    if (t < 16) cp_async16(memory + 16 * t, table + 4 * t, true);
    cp_commit();
    cp_wait<0>();
    __syncthreads();
    x[t] = shared[t];
  }
  if (Case == 17) {  // never waited for
    if (t < 16) cp_async16(memory + 16 * t, table + 4 * t, true);
    cp_commit();
  }
  if (Case == 18) x[0] = ld_vec<int2>(table + t).x;  // misaligned
  if (Case == 19) {                                  // a tensor-core instruction without all lanes
    uint32_t r[4];
    if (lane < 8) ldmatrix4(r, memory + 16 * lane);
  }
  if (Case == 20) x[0] = static_cast<int32_t>(blockIdx.x);  // two blocks write the same
  if (Case == 21) {                                         // a barrier after some have left
    if (t >= 32) return;
    __syncthreads();
  }
  if (Case == 22) {  // an array behind a null pointer
    x[t] = static_cast<const int32_t*>(nullptr)[t];
  }
  if (Case == 23) {  // past the end of an array of the thread
    int32_t own[2] = {t, t};
    for (int i = 0; i <= 2; ++i) x[t] = own[i];
  }
  if (Case == 24 || Case == 25) {  // correct: several read what one reads again and changes, behind a barrier; without
    shared[t] = t;
    __syncthreads();
    x[t] = shared[t ^ 1] + shared[t ^ 2];
    if (Case == 24) __syncwarp();
    shared[t] += 1;
  }
}
