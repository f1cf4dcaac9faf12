// The device layer of sm_90a for GPU compilers: inline PTX. tests/cuda/simt/simt_hopper.h is its twin.
#pragma once

// ---- barriers of 8 bytes in shared memory. A phase ends when `count` threads have arrived and all bytes that they
// expect are there. Phases are numbered from 0; parity: the last bit of a number.

DEV void mbar_init(void* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(bar)), "r"(count) : "memory");
}

// After mbar_init and before the __syncthreads behind it: the copy unit sees the barriers too.
DEV void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }

DEV void mbar_arrive(void* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(bar)) : "memory");
}

// Arrives; the phase ends only after so many bytes more.
DEV void mbar_expect(void* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}

// Until the phase with this parity has ended; it is the one that runs, or the one before.
DEV void mbar_wait(void* bar, int parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;}\n"
        : "=r"(done)
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
  }
}

// Copies from global to shared memory in the background, both and the size multiples of 16; `bar` counts the bytes.
DEV void bulk_copy(void* to, const void* from, int bytes, void* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(bar))
               : "memory");
}

// ---- registers: all warps of a warpgroup give some back, or take so many as are free then

template <int N>
DEV void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N));
}
template <int N>
DEV void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N));
}

// ---- tensor cores: c [64, N] = a [64, K] b [N, K]^T, plus c if `add`, K of 32 bytes. Warp i of the warpgroup has rows
// 16 i to 16 i + 15 of a and c, in registers as mma has them (csrc/cuda/gpu.cuh), of c tile after tile of 8 columns. b
// stands in shared memory: rows of 128 bytes, eight of them in 1024 bytes whose 16-byte pieces p of row r are at
// p ^ (r % 8).

// Of 32 bytes of each row of b; the rows begin at a multiple of 1024.
DEV uint64_t wgmma_operand(const void* p) {
  return static_cast<uint64_t>((shared_address(p) & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Before the first product after registers of products have been written.
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// Ends a group of products.
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// The number is in a register here: what reads it stays behind, what it is made of before.
DEV void wgmma_pin(uint32_t& v) { asm volatile("" : "+r"(v)::"memory"); }
DEV void wgmma_pin(float& v) { asm volatile("" : "+f"(v)::"memory"); }
DEV void wgmma_pin(int32_t& v) { asm volatile("" : "+r"(v)::"memory"); }

// Until all groups are done; c may be read then.
template <int N, class Number>
DEV void wgmma_wait(Number (&c)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
  UNROLL for (int i = 0; i < N; ++i) wgmma_pin(c[i]);
}

#define LLMC_C4(kind, i) kind(c[i]), kind(c[i + 1]), kind(c[i + 2]), kind(c[i + 3])
#define LLMC_C16(kind, i) LLMC_C4(kind, i), LLMC_C4(kind, i + 4), LLMC_C4(kind, i + 8), LLMC_C4(kind, i + 12)
#define LLMC_C64(kind, i) LLMC_C16(kind, i), LLMC_C16(kind, i + 16), LLMC_C16(kind, i + 32), LLMC_C16(kind, i + 48)
#define LLMC_WGMMA(shape, types, list, a0, a1, a2, a3, b, add, more, ...)                                            \
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned." shape "." types " {" list \
               "}, {" a0 "," a1 "," a2 "," a3 "}, " b ", p" more ";}\n"                                              \
               : __VA_ARGS__                                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand), "r"(static_cast<int>(sum))                \
               : "memory")
#define LLMC_LIST8 "%0,%1,%2,%3"
#define LLMC_LIST32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LLMC_LIST128                                                 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LLMC_WGMMA8(k, types, more, kind) \
  LLMC_WGMMA("m64n8k" k, types, LLMC_LIST8, "%4", "%5", "%6", "%7", "%8", "%9", more, LLMC_C4(kind, 0))
#define LLMC_WGMMA32(k, types, more, kind) \
  LLMC_WGMMA("m64n32k" k, types, LLMC_LIST32, "%16", "%17", "%18", "%19", "%20", "%21", more, LLMC_C16(kind, 0))
#define LLMC_WGMMA128(k, types, more, kind) \
  LLMC_WGMMA("m64n128k" k, types, LLMC_LIST128, "%64", "%65", "%66", "%67", "%68", "%69", more, LLMC_C64(kind, 0))

// Templates, so that other targets compile them only where they are called, which is an error.
#define LLMC_WGMMAS(Number, name, k, types, more, kind)                         \
  template <int C>                                                              \
  DEV void name(Number(&c)[C], const uint32_t* a, uint64_t operand, bool sum) { \
    if constexpr (C == 4) LLMC_WGMMA8(k, types, more, kind);                    \
    if constexpr (C == 16) LLMC_WGMMA32(k, types, more, kind);                  \
    if constexpr (C == 64) LLMC_WGMMA128(k, types, more, kind);                 \
  }
LLMC_WGMMAS(float, wgmma_bf16, "16", "f32.bf16.bf16", ", 1, 1, 0", "+f")
LLMC_WGMMAS(float, wgmma_f16, "16", "f32.f16.f16", ", 1, 1, 0", "+f")
LLMC_WGMMAS(float, wgmma_e4m3, "32", "f32.e4m3.e4m3", ", 1, 1", "+f")
LLMC_WGMMAS(int32_t, wgmma_s8, "32", "s32.s8.s8", "", "+r")
