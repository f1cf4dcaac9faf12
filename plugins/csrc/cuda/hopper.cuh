// What sm_90a has beyond csrc/cuda/device.cuh: barriers in shared memory that count bytes, copies by the TMA unit, and
// products of a warpgroup (four warps) that run in the background. Like device.cuh this file has two branches.
#pragma once
#include "csrc/cuda/device.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "csrc/cuda/gpu_hopper.cuh"
#else
#include "simt_hopper.h"
#endif
