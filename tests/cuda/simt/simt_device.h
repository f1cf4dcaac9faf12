// The device layer on the emulator: the twin of plugins/csrc/cuda/gpu.cuh, which says what the functions do.
#pragma once
#include "numbers.h"
#include "simt.h"

#define DEV inline
#define SIMT_STRING(x) #x
#define KERNEL(name, Params, threads, blocks_per_sm)                                           \
  static void name##_body(const Params& p);                                                    \
  extern "C" __attribute__((visibility("default"))) const simt::Kernel name;                   \
  const simt::Kernel name{#name, sizeof(Params), threads, SIMT_CHECKED,                        \
                          [](const void* p) { name##_body(*static_cast<const Params*>(p)); }}; \
  static void name##_body(const Params& p)
#define DYN_SMEM(name) unsigned char* name = simt::dynamic_shared()
#define UNROLL

struct BF16 {
  uint16_t x;
};
struct F16 {
  uint16_t x;
};

DEV float uint_as_float(uint32_t bits) { return __uint_as_float(bits); }
DEV uint32_t float_as_uint(float f) { return __float_as_uint(f); }
#define NEG_INF (-INFINITY)
#define INF INFINITY

template <class V>
DEV V ld_vec(const void* p, SIMT_PLACE) {
  simt::check_vector(p, sizeof(V), false, place);
  return *static_cast<const V*>(p);
}
DEV uint4 ld_stream(const void* p, SIMT_PLACE) { return ld_vec<uint4>(p, place); }

template <class V>
DEV void st_vec(void* p, V v, SIMT_PLACE) {
  simt::check_vector(p, sizeof(V), true, place);
  *static_cast<V*>(p) = v;
}

DEV void cp_async16(void* to, const void* from, bool ok, SIMT_PLACE) {
  simt::cp_async(to, from, 16, ok ? 16 : 0, place);
}
DEV void cp_commit() { simt::cp_commit(); }
template <int N>
DEV void cp_wait() {
  simt::cp_wait(N);
}

DEV void simt_tensor(simt::Op op, void* out, const void* a, const void* b, simt::Place place) {
  simt::Args args{0, 0, out, a, b};
  simt::collective(op, 0xffffffffu, args, place);
}
DEV void ldmatrix4(uint32_t* r, const void* p, SIMT_PLACE) { simt_tensor(simt::Op::ldmatrix, r, p, nullptr, place); }
DEV void ldmatrix4_t(uint32_t* r, const void* p, SIMT_PLACE) {
  simt_tensor(simt::Op::ldmatrix_trans, r, p, nullptr, place);
}
DEV void mma16816(BF16, float* c, const uint32_t* a, const uint32_t* b, SIMT_PLACE) {
  simt_tensor(simt::Op::mma_bf16, c, a, b, place);
}
DEV void mma16816(F16, float* c, const uint32_t* a, const uint32_t* b, SIMT_PLACE) {
  simt_tensor(simt::Op::mma_f16, c, a, b, place);
}
DEV void mma16832_s8(int32_t* c, const uint32_t* a, const uint32_t* b, SIMT_PLACE) {
  simt_tensor(simt::Op::mma_s8, c, a, b, place);
}
DEV void mma16832_e4m3(float* c, const uint32_t* a, const uint32_t* b, SIMT_PLACE) {
  simt_tensor(simt::Op::mma_e4m3, c, a, b, place);
}

DEV float to_f(BF16 v) { return simt::bf16_to_float(v.x); }
DEV float to_f(F16 v) { return simt::f16_to_float(v.x); }
DEV uint16_t from_f(BF16, float f) { return simt::float_to_bf16(f); }
DEV uint16_t from_f(F16, float f) { return simt::float_to_f16(f); }

template <class T>
DEV uint32_t pack2(T type, float low, float high) {
  return from_f(type, low) | static_cast<uint32_t>(from_f(type, high)) << 16;
}

// In double the product is exact, and so is the sum unless the two are further apart than a float can show.
template <class T>
DEV uint32_t fma2(T type, uint32_t a, uint32_t b, uint32_t c) {
  float r[2];
  for (int i = 0; i < 2; ++i) {
    float x[3] = {to_f(T{static_cast<uint16_t>(a >> 16 * i)}), to_f(T{static_cast<uint16_t>(b >> 16 * i)}),
                  to_f(T{static_cast<uint16_t>(c >> 16 * i)})};
    r[i] = static_cast<float>(static_cast<double>(x[0]) * x[1] + x[2]);
  }
  return pack2(type, r[0], r[1]);
}

template <int Table>
DEV uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r = 0;
  for (int i = 0; i < 8; ++i) {
    if (Table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return r;
}

DEV uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t which = selector >> 4 * i & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (which & 7)) & 0xffu;
    if (which & 8) byte = byte & 0x80u ? 0xffu : 0;  // the sign, eight times
    r |= byte << 8 * i;
  }
  return r;
}

DEV float fma_(float a, float b, float c) { return fmaf(a, b, c); }
DEV float exp2_(float x) { return exp2f(x); }
