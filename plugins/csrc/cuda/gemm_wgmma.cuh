// y [M, N] = x [M, K] w [N, K]^T by the warpgroup products of sm_90a; the weights are those of csrc/cuda/gemm.cuh.
//
// What is computed is y^T = w x^T: fragments b of mma.sync, in whose order weights are packed, are fragments a of wgmma
// as they stand in registers, two tiles of 8 rows for the 16 of a warp. So every format becomes numbers in registers as
// before, and x alone is read from shared memory by the tensor cores. prepare_rows has put it there in the order of
// wgmma, so that all of a chunk arrives by a few copies of the TMA unit: one of x, one for each panel of w.
//
// A block has 128 rows of w (eight warps, half a panel each) and Tokens rows of x; a thread of a third warpgroup asks
// for copies, and the registers of that warpgroup serve the others. Sums have the same order whatever Tokens is: the
// chunks of a way one after the other, then the ways, which are blocks of their own where there are few rows of x
// (csrc/cuda/gemm_rows.cuh adds them), or follow each other in one block.
#pragma once
#include "csrc/cuda/gemm.cuh"
#include "csrc/cuda/hopper.cuh"

constexpr int CONSUMERS = 8;   // warps that multiply, before four of which one copies
constexpr int SWIZZLE = 1024;  // bytes of eight rows of x

// ---- what is multiplied; ROUNDS: the tensor cores drop digits of long sums, which are so added up after each chunk

template <class T>
struct Wide16;
template <>
struct Wide16<BF16> : Half16<BF16> {
  static constexpr bool ROUNDS = false;
  template <int C>
  static DEV void multiply(float (&c)[C], const uint32_t* a, uint64_t b, bool add) {
    wgmma_bf16(c, a, b, add);
  }
};
template <>
struct Wide16<F16> : Half16<F16> {
  static constexpr bool ROUNDS = false;
  template <int C>
  static DEV void multiply(float (&c)[C], const uint32_t* a, uint64_t b, bool add) {
    wgmma_f16(c, a, b, add);
  }
};
struct WideSigned8 : Signed8 {
  static constexpr bool ROUNDS = false;
  template <int C>
  static DEV void multiply(int32_t (&c)[C], const uint32_t* a, uint64_t b, bool add) {
    wgmma_s8(c, a, b, add);
  }
};
struct WideFloat8 : Float8 {
  static constexpr bool ROUNDS = true;
  template <int C>
  static DEV void multiply(float (&c)[C], const uint32_t* a, uint64_t b, bool add) {
    wgmma_e4m3(c, a, b, add);
  }
};

// FoldSteps: as in csrc/cuda/gemm.cuh.
template <class Math_, class Weight_, int Tokens, int Stages, int FoldSteps>
struct Wide {
  using Math = Math_;
  using Weight = Weight_;
  using Sum = typename Math::Sum;
  static constexpr int TOKENS = Tokens, STAGES = Stages, FOLD = FoldSteps, SUMS = Tokens / 2, PANELS = CONSUMERS / 2;
  static constexpr int X = Tokens * ROW_BYTES, CHUNK = STEPS * Weight::WORDS * 128;
  static constexpr int SLOT = X + PANELS * CHUNK, HEAD = SWIZZLE;
  static_assert(SLOT % SWIZZLE == 0, "rows of x begin at multiples of 1024");
};

template <class G, class P>
struct WideBlock {
  using Math = typename G::Math;
  using Weight = typename G::Weight;
  using Sum = typename G::Sum;
  static constexpr int SUMS = G::SUMS, WORDS = Weight::WORDS / 2;  // of a lane for a step of half a panel

  const P& p;
  unsigned char* memory;
  int warp, lane, first, panel, half;  // first: panel of the block; panel and half: of the warp
  int begin, end;                      // chunks
  Sum part[SUMS];                      // since the last fold
  float acc[SUMS], total[SUMS];        // of a way, of quantized weights; of the ways so far
  float scale[2], zero[2];             // of the two rows of w that the lane has

  DEV unsigned char* full(int slot) const { return memory + 16 * slot; }
  DEV unsigned char* empty(int slot) const { return memory + 16 * slot + 8; }
  DEV unsigned char* slot(int number) const { return memory + G::HEAD + number * G::SLOT; }
  DEV int group_of(int step) const {
    const int group = static_cast<int>(static_cast<uint64_t>(step) * static_cast<uint64_t>(p.group_inverse) >> 32);
    return min(group, p.groups - 1);
  }

  // One thread: copies of all chunks, each into a slot that all warps have left.
  DEV void produce() const {
    const int count = min(G::PANELS, p.panels - first);
    const char* x = static_cast<const char*>(p.x) + static_cast<int64_t>(blockIdx.y) * G::X;
    const char* w = static_cast<const char*>(p.w);
    int now = 0, round = 0;
    for (int chunk = begin; chunk < end; ++chunk) {
      mbar_wait(empty(now), (round & 1) ^ 1);
      mbar_expect(full(now), G::X + count * G::CHUNK);
      bulk_copy(slot(now), x + static_cast<int64_t>(chunk) * p.atoms * SWIZZLE, G::X, full(now));
      for (int i = 0; i < count; ++i) {
        const int64_t at = (static_cast<int64_t>(first + i) * p.chunks + chunk) * G::CHUNK;
        bulk_copy(slot(now) + G::X + i * G::CHUNK, w + at, G::CHUNK, full(now));
      }
      if (++now == G::STAGES) now = 0, ++round;
    }
  }

  DEV void load_scales(int group) {
    using S = typename Weight::Scale;
    if constexpr (Weight::QUANTIZED) {
      UNROLL for (int i = 0; i < 2; ++i) {
        const int64_t at = (static_cast<int64_t>(min(panel, p.panels - 1)) * p.groups + group) * PANEL + half * 16 +
                           i * 8 + (lane >> 2);
        scale[i] = to_f(static_cast<const S*>(p.scale)[at]);
        zero[i] = static_cast<float>(Weight::MIDDLE);
        if constexpr (Weight::ZERO == BYTE_ZERO) zero[i] = static_cast<float>(static_cast<const uint8_t*>(p.zero)[at]);
      }
    }
  }

  // The warp's rows of w of one step; zeros behind the last panel.
  DEV void load(const unsigned char* data, int step, uint32_t* a) const {
    a[0] = a[1] = a[2] = a[3] = 0;
    if (panel >= p.panels) return;
    const unsigned char* from = data + G::X + (warp >> 1) * G::CHUNK + step * Weight::WORDS * 128;
    uint32_t words[WORDS];
    if constexpr (WORDS == 1) {
      words[0] = ld_vec<uint32_t>(from + lane * 8 + half * 4);
    } else if constexpr (WORDS == 2) {
      const uint2 v = ld_vec<uint2>(from + lane * 16 + half * 8);
      words[0] = v.x, words[1] = v.y;
    } else {
      const uint4 v = ld_vec<uint4>(from + half * 512 + lane * 16);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
    UNROLL for (int j = 0; j < 2; ++j) {
      uint32_t b[2];
      Weight::decode(words, j, Weight::shift(zero[j]), b);
      a[j] = b[0];
      a[2 + j] = b[1];
    }
  }

  // acc += scale * part
  DEV void fold() {
    UNROLL for (int i = 0; i < SUMS; ++i) {
      Sum sum = part[i];
      if constexpr (Weight::TIMES == 16) sum >>= 4;
      acc[i] = fma_(scale[i >> 1 & 1], static_cast<float>(sum), acc[i]);
    }
  }

  // The sum of a way is done.
  DEV void add_way(bool only) {
    UNROLL for (int i = 0; i < SUMS; ++i) {
      float sum;
      if constexpr (Weight::QUANTIZED) {
        sum = acc[i];
        acc[i] = 0.0f;
        if (p.factor != nullptr) {
          const int token = min(static_cast<int>(blockIdx.y) * G::TOKENS + column(i), p.M - 1);
          sum *= static_cast<const float*>(p.factor)[token];
        }
      } else {
        sum = part[i];
      }
      total[i] = only ? sum : total[i] + sum;
    }
  }

  DEV int column(int i) const { return (i >> 2) * 8 + (lane & 3) * 2 + (i & 1); }

  // The fragments of a chunk are all loaded before the first product, and stay while the products run.
  DEV void consume() {
    int now = 0, round = 0, left = p.way_chunks, group = -1;
    bool add = false, only = true;
    UNROLL for (int i = 0; i < SUMS; ++i) acc[i] = 0.0f;
    for (int chunk = begin; chunk < end; ++chunk) {
      const bool last = --left == 0 || chunk + 1 == end;
      uint32_t a[STEPS][4];
      const unsigned char* data = slot(now);
      if (Weight::QUANTIZED && group_of(chunk * STEPS) != group) load_scales(group = group_of(chunk * STEPS));
      mbar_wait(full(now), round & 1);
      if constexpr (G::FOLD == STEPS) {
        UNROLL for (int step = 0; step < STEPS; ++step) {
          load(data, step, a[step]);
          if (WORDS == 2 && step == 1) {  // bytes that become 16 bits: registers for half of them at a time
            UNROLL for (int i = 0; i < 4; ++i) wgmma_pin(a[0][i]), wgmma_pin(a[1][i]);
          }
        }
        wgmma_fence();
        UNROLL for (int step = 0; step < STEPS; ++step) {
          Math::multiply(part, a[step], wgmma_operand(data + 32 * step), add || step > 0);
        }
        wgmma_commit();
        wgmma_wait(part);
        add = true;
        const bool ends = last || Math::ROUNDS || group_of(chunk * STEPS + STEPS) != group;
        if (Weight::QUANTIZED && ends) fold(), add = false;
      } else {  // groups may end with any step
        for (int step = 0; step < STEPS; ++step) {
          const int at = chunk * STEPS + step;
          if (group_of(at) != group) load_scales(group = group_of(at));
          load(data, step, a[0]);
          wgmma_fence();
          Math::multiply(part, a[0], wgmma_operand(data + 32 * step), add);
          wgmma_commit();
          wgmma_wait(part);
          add = true;
          const bool ends = (step + 1 == STEPS && (last || Math::ROUNDS)) || group_of(at + 1) != group;
          if (ends) fold(), add = false;
        }
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(empty(now));
      if (++now == G::STAGES) now = 0, ++round;
      if (!last) continue;
      add_way(only);
      left = p.way_chunks, add = false, only = false;
    }
  }

  DEV void store() const {
    if (panel >= p.panels) return;
    UNROLL for (int i = 0; i < SUMS; ++i) {
      const int token = static_cast<int>(blockIdx.y) * G::TOKENS + column(i);
      const int row = panel * PANEL + half * 16 + (i >> 1 & 1) * 8 + (lane >> 2);
      if (token >= p.M || row >= p.N) continue;
      const float v = p.bias == nullptr ? total[i] : total[i] + static_cast<const float*>(p.bias)[row];
      const int64_t at = token * p.y_stride + row + blockIdx.z * p.y_split;
      if (p.y_type == 0) {
        static_cast<float*>(p.y)[at] = v;
      } else {
        static_cast<uint16_t*>(p.y)[at] = p.y_type == 1 ? from_f(BF16{}, v) : from_f(F16{}, v);
      }
    }
  }
};

template <class G, class P>
DEV void gemm_wgmma(const P& p) {
  DYN_SMEM(memory);
  WideBlock<G, P> block{p, memory + (-shared_address(memory) & (SWIZZLE - 1))};
  block.warp = threadIdx.x >> 5;
  block.lane = threadIdx.x & 31;
  block.first = static_cast<int>(blockIdx.x) * G::PANELS;
  block.panel = block.first + (block.warp >> 1);
  block.half = block.warp & 1;
  const int chunks = p.ways * p.way_chunks;
  block.begin = static_cast<int>(blockIdx.z) * chunks;
  block.end = min(block.begin + chunks, p.chunks);
  if (threadIdx.x == 0) {
    for (int i = 0; i < G::STAGES; ++i) {
      mbar_init(block.full(i), 1);
      mbar_init(block.empty(i), CONSUMERS);
    }
    mbar_init_fence();
  }
  __syncthreads();
  if (block.warp < CONSUMERS) {
    if constexpr (G::SUMS > 16) registers_take<240>();
    block.consume();
    block.store();
  } else {
    if constexpr (G::SUMS > 16) registers_give<24>();
    if (threadIdx.x == CONSUMERS * 32) block.produce();
  }
}
