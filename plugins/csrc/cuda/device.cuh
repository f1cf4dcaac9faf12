// What CUDA kernels are written with. One source serves NVRTC, nvcc and g++: this file alone has two branches, inline
// PTX for a GPU (no CUDA headers are needed) and the emulator of tests/cuda/simt. See CUDA kernels in CONTRIBUTING.md.
//
// A kernel is a function template of a params struct in plugins/<op>/<op>_cuda.cuh; see plugins/cuda.py. Rules: shared
// memory is dynamic (DYN_SMEM), one barrier a line, full-warp masks, 64-bit offsets, loads and stores of several
// numbers by ld_vec and st_vec. A multiply and an add are fused only by fma_, so that every compiler gives the same
// bits.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "csrc/cuda/gpu.cuh"
#else
#include "simt_device.h"
#endif

// ---- numbers

struct F32 {
  float x;
};

DEV float to_f(F32 v) { return v.x; }
DEV float to_f(float v) { return v; }
DEV float from_f(F32, float f) { return f; }

// The number nearest to `f` in type T.
template <class T>
DEV T round_to(float f) {
  return T{from_f(T{}, f)};
}

// 8-bit floats with 4 bits of exponent and 3 of mantissa: largest 448, 0x7f is no number.
struct E4M3 {
  uint8_t x;
};

DEV float to_f(E4M3 v) {
  uint32_t magnitude = v.x & 0x7fu, sign = (v.x & 0x80u) << 24;
  if (magnitude == 0x7fu) return uint_as_float(0x7fc00000u);
  // The bits as a float's are the number divided by 2**120; the product is exact for those without a leading one too.
  return uint_as_float(sign | float_as_uint(uint_as_float(magnitude << 20) * uint_as_float(0x7b800000u)));
}

// Rounds to the nearest, ties to even; what is too large becomes 448.
DEV uint8_t from_f(E4M3, float f) {
  uint32_t bits = float_as_uint(f), sign = bits >> 24 & 0x80u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7f;
  if (bits >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448
  if (bits < 0x3c800000u) {                                            // below 2**-6: steps of 2**-9
    float steps = uint_as_float(bits) * 512.0f + 8388608.0f;           // 2**23: the sum rounds to whole steps
    return static_cast<uint8_t>(sign | (float_as_uint(steps) & 0xfu));
  }
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return static_cast<uint8_t>(sign | ((bits >> 20) - (120u << 3)));
}

// ---- sums of a warp and of a block, in an order that depends on nothing but the number of threads

#define FULL_WARP 0xffffffffu

DEV float warp_sum(float v) {
  UNROLL for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
  return v;
}

DEV float warp_max(float v) {
  UNROLL for (int offset = 16; offset > 0; offset >>= 1) v = max(v, __shfl_xor_sync(FULL_WARP, v, offset));
  return v;
}

// Of a block of `Warps` warps, with `Warps` floats of shared memory that nobody else uses until the next barrier after
// the call; every thread gets the result.
template <int Warps>
DEV float block_sum(float v, float* shared) {
  v = warp_sum(v);
  if (Warps == 1) return v;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.0f;
  UNROLL for (int i = 0; i < Warps; ++i) sum += shared[i];
  return sum;
}

template <int Warps>
DEV float block_max(float v, float* shared) {
  v = warp_max(v);
  if (Warps == 1) return v;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  float most = shared[0];
  UNROLL for (int i = 1; i < Warps; ++i) most = max(most, shared[i]);
  return most;
}
