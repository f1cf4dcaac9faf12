// The device layer of sm_90a on the emulator: the twin of plugins/csrc/cuda/gpu_hopper.cuh, which says what the
// functions do; hopper.cpp runs them.
#pragma once
#include "simt.h"

namespace simt {

// Operations of a warp beside those of simt.h.
constexpr Op kWgmma = static_cast<Op>(32), kWgmmaFence = static_cast<Op>(33), kWgmmaCommit = static_cast<Op>(34),
             kWgmmaWait = static_cast<Op>(35);

enum class Product { bf16, f16, e4m3, s8 };

// What Args::value of a product holds beside the operand, in `source`: columns, type, and whether it adds.
inline int wgmma_form(int columns, Product type, bool add) {
  return columns << 8 | static_cast<int>(type) << 1 | static_cast<int>(add);
}

uint32_t shared_offset(const void* p);
void mbar_init(void* bar, int count, Place place);
void mbar_arrive(void* bar, int bytes, Place place);
void mbar_wait(void* bar, int parity, Place place);
void bulk_copy(void* to, const void* from, int bytes, void* bar, Place place);

}  // namespace simt

DEV uint32_t shared_address(const void* p) { return simt::shared_offset(p); }
DEV void mbar_init(void* bar, int count, SIMT_PLACE) { simt::mbar_init(bar, count, place); }
DEV void mbar_init_fence() {}
DEV void mbar_arrive(void* bar, SIMT_PLACE) { simt::mbar_arrive(bar, 0, place); }
DEV void mbar_expect(void* bar, int bytes, SIMT_PLACE) { simt::mbar_arrive(bar, bytes, place); }
DEV void mbar_wait(void* bar, int parity, SIMT_PLACE) { simt::mbar_wait(bar, parity, place); }
DEV void bulk_copy(void* to, const void* from, int bytes, void* bar, SIMT_PLACE) {
  simt::bulk_copy(to, from, bytes, bar, place);
}

template <int N>
DEV void registers_give() {}
template <int N>
DEV void registers_take() {}

DEV uint64_t wgmma_operand(const void* p) {
  return static_cast<uint64_t>((shared_address(p) & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

DEV void simt_wgmma(simt::Op op, simt::Place place) {
  simt::Args args{};
  simt::collective(op, 0xffffffffu, args, place);
}
DEV void wgmma_fence(SIMT_PLACE) { simt_wgmma(simt::kWgmmaFence, place); }
DEV void wgmma_commit(SIMT_PLACE) { simt_wgmma(simt::kWgmmaCommit, place); }
DEV void wgmma_pin(uint32_t&) {}
template <int N, class Number>
DEV void wgmma_wait(Number (&)[N], SIMT_PLACE) {
  simt_wgmma(simt::kWgmmaWait, place);
}

#define SIMT_WGMMA(Number, name, type)                                                                              \
  template <int C>                                                                                                  \
  DEV void name(Number(&c)[C], const uint32_t* a, uint64_t operand, bool add, SIMT_PLACE) {                         \
    static_assert(C == 4 || C == 16 || C == 64, "columns that gpu_hopper.cuh has");                                 \
    simt::Args args{operand, simt::wgmma_form(2 * C, simt::Product::type, add), static_cast<void*>(c), a, nullptr}; \
    simt::collective(simt::kWgmma, 0xffffffffu, args, place);                                                       \
  }
SIMT_WGMMA(float, wgmma_bf16, bf16)
SIMT_WGMMA(float, wgmma_f16, f16)
SIMT_WGMMA(float, wgmma_e4m3, e4m3)
SIMT_WGMMA(int32_t, wgmma_s8, s8)
