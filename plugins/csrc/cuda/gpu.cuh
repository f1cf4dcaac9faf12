// The device layer for GPU compilers: inline PTX in place of CUDA's headers, which NVRTC does not bring. sm_80 and up.
// tests/cuda/simt/simt_device.h is its twin.
#pragma once

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
#else
#include <stdint.h>
#endif

#define DEV __device__ __forceinline__
#define KERNEL(name, Params, threads, blocks_per_sm) \
  extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm) name(const __grid_constant__ Params p)
#define DYN_SMEM(name) extern __shared__ __align__(128) unsigned char name[]
#define UNROLL _Pragma("unroll")

struct BF16 {
  uint16_t x;
};
struct F16 {
  uint16_t x;
};

DEV float uint_as_float(uint32_t bits) { return __uint_as_float(bits); }
DEV uint32_t float_as_uint(float f) { return __float_as_uint(f); }
#define NEG_INF __uint_as_float(0xff800000u)
#define INF __uint_as_float(0x7f800000u)

// ---- memory

// A load of sizeof(V) bytes at once, aligned to as much.
template <class V>
DEV V ld_vec(const void* p) {
  return *static_cast<const V*>(p);
}

// 16 bytes that are read once, past the caches of the multiprocessor; from memory that no kernel writes.
DEV uint4 ld_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

template <class V>
DEV void st_vec(void* p, V v) {
  *static_cast<V*>(p) = v;
}

DEV uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes from global to shared memory in the background. !ok: writes zeros and reads nothing.
DEV void cp_async16(void* to, const void* from, bool ok) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(ok ? 16 : 0)
               : "memory");
}

DEV void cp_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Until all but the last N groups of this thread have arrived; other threads see them after a barrier.
template <int N>
DEV void cp_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// ---- tensor cores

// Four 8x8 matrices of 16-bit numbers; lane 8 i + r has the address of row r of matrix i.
DEV void ldmatrix4(uint32_t* r, const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}

// The same, each transposed.
DEV void ldmatrix4_t(uint32_t* r, const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}

#define LLMC_MMA(shape, types, kind)                                                                               \
  asm volatile("mma.sync.aligned." shape ".row.col." types " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n" \
               : kind(c[0]), kind(c[1]), kind(c[2]), kind(c[3])                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// c [16, 8] += a [16, 16] b [16, 8]. With g = lane / 4 and t = lane % 4, number j of a lane's registers is
// a[g + 8 (j / 2 % 2)][2 t + j % 2 + 8 (j / 4)], b[2 t + j % 2 + 8 (j / 2)][g], c[g + 8 (j / 2)][2 t + j % 2].
DEV void mma16816(BF16, float* c, const uint32_t* a, const uint32_t* b) {
  LLMC_MMA("m16n8k16", "f32.bf16.bf16.f32", "+f");
}
DEV void mma16816(F16, float* c, const uint32_t* a, const uint32_t* b) {
  LLMC_MMA("m16n8k16", "f32.f16.f16.f32", "+f");
}

// c [16, 8] += a [16, 32] b [32, 8] of bytes: a[g + 8 (j / 4 % 2)][4 t + j % 4 + 16 (j / 8)],
// b[4 t + j % 4 + 16 (j / 4)][g], c as above.
DEV void mma16832_s8(int32_t* c, const uint32_t* a, const uint32_t* b) { LLMC_MMA("m16n8k32", "s32.s8.s8.s32", "+r"); }
// From sm_89 on; a template, so that older targets compile it only where it is called, which is an error.
template <int = 0>
DEV void mma16832_e4m3(float* c, const uint32_t* a, const uint32_t* b) {
  LLMC_MMA("m16n8k32", "f32.e4m3.e4m3.f32", "+f");
}

// ---- numbers

// Two numbers in a word, the first in the low half.
DEV uint32_t pack2(BF16, float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEV uint32_t pack2(F16, float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

DEV float to_f(BF16 v) { return __uint_as_float(static_cast<uint32_t>(v.x) << 16); }
DEV float to_f(F16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.x));
  return f;
}
DEV uint16_t from_f(BF16, float f) { return static_cast<uint16_t>(pack2(BF16{}, f, 0.0f)); }
DEV uint16_t from_f(F16, float f) { return static_cast<uint16_t>(pack2(F16{}, f, 0.0f)); }

// a * b + c of two pairs, each rounded once.
DEV uint32_t fma2(BF16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEV uint32_t fma2(F16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// Bit i is bit (a_i * 4 + b_i * 2 + c_i) of Table.
template <int Table>
DEV uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(Table));
  return r;
}

// Byte i of the result is byte (selector >> 4 i & 7) of the eight of a (0 to 3) and b.
DEV uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

DEV float fma_(float a, float b, float c) {
  float r;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}

// 2**x within 2 units in the last place; 0 for -inf.
DEV float exp2_(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
