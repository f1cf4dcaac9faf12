// Runs CUDA kernels on the CPU: every thread is a fiber, a warp operation happens when its last lane arrives. This is
// the face that kernels see; simt_device.h has the device layer on top.
//
// Kernels that are compiled with -fsanitize=thread and linked without its library report every load and store to the
// hooks in memory.cpp, which check bounds, initialisation and races.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <source_location>

#define __device__
#define __host__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) int2 {
  int32_t x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace simt {

struct Index {
  unsigned x, y, z;
};

// What a kernel was compiled to. `checked`: its loads and stores are reported.
struct Kernel {
  const char* name;
  size_t params;
  int threads;
  bool checked;
  void (*body)(const void*);
};

// Const functions: one call a kernel, and no access that would be checked.
Index thread_index() __attribute__((const));
Index block_index() __attribute__((const));
Index block_size() __attribute__((const));
Index grid_size() __attribute__((const));
int lane() __attribute__((const));
unsigned char* dynamic_shared() __attribute__((const));

enum class Op { syncwarp, shuffle, ballot, ldmatrix, ldmatrix_trans, mma_bf16, mma_f16, mma_s8, mma_e4m3 };

// The arguments of one lane: value and source lane of a shuffle, registers of a mma, address of a matrix row.
struct Args {
  uint64_t value;
  int source;
  void* out;
  const void *a, *b;
};

// Where the source calls an operation; lanes have to call it at the same place.
using Place = std::source_location;
#define SIMT_PLACE simt::Place place = simt::Place::current()

void collective(Op op, unsigned mask, Args& args, Place place);
int block_barrier(int predicate, bool count, Place place);
void cp_async(void* to, const void* from, int bytes, int source_bytes, Place place);
void cp_commit();
void cp_wait(int pending);
void check_vector(const void* p, int bytes, bool write, Place place);
void check_atomic(const void* p, int bytes);

}  // namespace simt

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())

inline void __syncthreads(SIMT_PLACE) { simt::block_barrier(0, false, place); }
inline int __syncthreads_or(int predicate, SIMT_PLACE) { return simt::block_barrier(predicate, false, place); }
inline int __syncthreads_count(int predicate, SIMT_PLACE) { return simt::block_barrier(predicate, true, place); }

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_PLACE) {
  simt::Args args{};
  simt::collective(simt::Op::syncwarp, mask, args, place);
}

template <class T>
T simt_shuffle(unsigned mask, T v, int source, simt::Place place) {
  static_assert(sizeof(T) <= 8);
  simt::Args args{};
  __builtin_memcpy(&args.value, &v, sizeof(T));
  args.source = source;
  simt::collective(simt::Op::shuffle, mask, args, place);
  T result;
  __builtin_memcpy(&result, &args.value, sizeof(T));
  return result;
}

// The source lane, or the lane itself where that is outside of its part of the warp.
inline int simt_source(int source, int width) {
  int lane = simt::lane();
  return (source & ~(width - 1)) == (lane & ~(width - 1)) ? source : lane;
}

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32, SIMT_PLACE) {
  return simt_shuffle(mask, v, (simt::lane() & ~(width - 1)) | (source & (width - 1)), place);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, SIMT_PLACE) {
  return simt_shuffle(mask, v, simt_source(simt::lane() ^ bits, width), place);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, int distance, int width = 32, SIMT_PLACE) {
  return simt_shuffle(mask, v, simt_source(simt::lane() + distance, width), place);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, int distance, int width = 32, SIMT_PLACE) {
  return simt_shuffle(mask, v, simt_source(simt::lane() - distance, width), place);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_PLACE) {
  simt::Args args{};
  args.value = predicate != 0;
  simt::collective(simt::Op::ballot, mask, args, place);
  return static_cast<unsigned>(args.value);
}
inline int __any_sync(unsigned mask, int predicate, SIMT_PLACE) { return __ballot_sync(mask, predicate, place) != 0; }
inline int __all_sync(unsigned mask, int predicate, SIMT_PLACE) { return __ballot_sync(mask, !predicate, place) == 0; }

// Atomics of integers; those of floats depend on the order, which no kernel here may. Not to be reported by the hooks.
#define SIMT_ATOMIC  \
  template <class T> \
  __attribute__((no_sanitize_thread, noinline)) T
SIMT_ATOMIC atomicAdd(T* p, T v) {
  simt::check_atomic(p, sizeof(T));
  return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
SIMT_ATOMIC atomicOr(T* p, T v) {
  simt::check_atomic(p, sizeof(T));
  return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);
}
SIMT_ATOMIC atomicExch(T* p, T v) {
  simt::check_atomic(p, sizeof(T));
  return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
}
SIMT_ATOMIC atomicCAS(T* p, T expected, T v) {
  simt::check_atomic(p, sizeof(T));
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
SIMT_ATOMIC atomicMax(T* p, T v) {
  simt::check_atomic(p, sizeof(T));
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
SIMT_ATOMIC atomicMin(T* p, T v) {
  simt::check_atomic(p, sizeof(T));
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (old > v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t __float_as_uint(float f) { return __builtin_bit_cast(uint32_t, f); }
inline float __int_as_float(int32_t bits) { return __builtin_bit_cast(float, bits); }
inline int32_t __float_as_int(float f) { return __builtin_bit_cast(int32_t, f); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __float2int_rn(float f) { return static_cast<int>(rintf(f)); }

// Integers of mixed types take the wider one, as CUDA's overloads do; floats pass over what is no number.
template <class A, class B>
constexpr auto min(A a, B b) {
  using T = decltype(a + b);
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B>
constexpr auto max(A a, B b) {
  using T = decltype(a + b);
  return static_cast<T>(a) > static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
