// y [M, N] = x [M, K] w [N, K]^T on tensor cores, for weights of every format.
//
// K goes in steps of 32 bytes of a row of x (16 or 32 numbers) and chunks of four steps. The weight is packed in the
// order in which lanes hold the fragments of mma (plugins/cuda_packing.py), so it goes through shared memory as it is
// and needs no ldmatrix. Chunks of x and w, and the scales of the groups in them, arrive by cp.async in a ring of
// Stages slots.
//
// Batch invariance: K is cut into ways (consecutive chunks, eight ways for each z of the grid, by K and N alone). The
// sum of a way is taken step by step, with the scales of quantized weights once for each group, and the sums of the
// eight ways are added in order. With few rows each warp takes a way, with many all warps of a block take one way after
// the other: the same operations in the same order, so the same bits.
#pragma once
#include "csrc/cuda/device.cuh"

constexpr int WAYS = 8;         // that one block sums
constexpr int STEPS = 4;        // of a chunk
constexpr int ROW_BYTES = 128;  // of a chunk of a row of x
constexpr int PANEL = 32;       // columns of y whose weights lie together
constexpr int NO_ZERO = 0, BYTE_ZERO = 1, FLOAT_ZERO = 2;

// ---- what is multiplied

template <class T>
struct Half16 {
  using Type = T;
  using Sum = float;
  static DEV void mma(float* c, const uint32_t* a, const uint32_t* b) { mma16816(T{}, c, a, b); }
  static DEV uint32_t ones() { return pack2(T{}, 1.0f, 1.0f); }
};

struct Signed8 {
  using Sum = int32_t;
  static DEV void mma(int32_t* c, const uint32_t* a, const uint32_t* b) { mma16832_s8(c, a, b); }
  static DEV uint32_t ones() { return 0x01010101u; }
};

struct Float8 {
  using Sum = float;
  template <class C>  // the instruction is declared only where the chip has it
  static DEV void mma(C* c, const uint32_t* a, const uint32_t* b) {
    mma16832_e4m3(c, a, b);
  }
  static DEV uint32_t ones() { return 0x38383838u; }
};

// ---- weights: WORDS of a lane for a step of a panel, and how they become the fragment b of 8-column tile j

// Bits of 16-bit numbers whose last bits count in ones from BASE: what a small integer is written into.
template <class T>
struct Magic;
template <>
struct Magic<BF16> {
  static constexpr uint32_t BITS = 0x43004300u;
  static constexpr float BASE = 128.0f;
};
template <>
struct Magic<F16> {
  static constexpr uint32_t BITS = 0x64006400u;
  static constexpr float BASE = 1024.0f;
};

template <class T>
DEV uint32_t twice(float f) {
  return pack2(T{}, f, f);
}

// 16-bit numbers as they are.
template <class T>
struct Plain16 {
  static constexpr int WORDS = 8, ZERO = NO_ZERO, MIDDLE = 0, TIMES = 1;
  static constexpr bool QUANTIZED = false, SHIFTED = false;
  using Scale = F32;
  using Shift = uint32_t;
  static DEV Shift shift(float) { return 0; }
  static DEV void decode(const uint32_t* words, int j, Shift, uint32_t* b) {
    b[0] = words[2 * j];
    b[1] = words[2 * j + 1];
  }
};

// 4-bit codes for 16-bit numbers: code - zero, exactly.
template <class T, int Zero, class S>
struct Int4 {
  static constexpr int WORDS = 2, ZERO = Zero, MIDDLE = 8, TIMES = 1;
  static constexpr bool QUANTIZED = true, SHIFTED = true;
  using Scale = S;
  using Shift = uint32_t;
  static DEV Shift shift(float zero) { return twice<T>(-(Magic<T>::BASE + zero)); }
  static DEV void decode(const uint32_t* words, int j, Shift shift, uint32_t* b) {
    UNROLL for (int half = 0; half < 2; ++half) {
      const uint32_t codes = lop3<0xea>(words[j >> 1] >> (8 * (j & 1) + 4 * half), 0x000f000fu, Magic<T>::BITS);
      b[half] = fma2(T{}, codes, twice<T>(1.0f), shift);
    }
  }
};

// 8-bit codes for 16-bit numbers.
template <class T, int Zero, class S>
struct Int8;
template <int Zero, class S>
struct Int8<F16, Zero, S> {
  static constexpr int WORDS = 4, ZERO = Zero, MIDDLE = 128, TIMES = 1;
  static constexpr bool QUANTIZED = true, SHIFTED = true;
  using Scale = S;
  using Shift = uint32_t;
  static DEV Shift shift(float zero) { return twice<F16>(-(1024.0f + zero)); }
  static DEV void decode(const uint32_t* words, int j, Shift shift, uint32_t* b) {
    b[0] = fma2(F16{}, prmt(words[j], 0x64646464u, 0x4140u), twice<F16>(1.0f), shift);
    b[1] = fma2(F16{}, prmt(words[j], 0x64646464u, 0x4342u), twice<F16>(1.0f), shift);
  }
};
template <int Zero, class S>
struct Int8<BF16, Zero, S> {  // bfloat16 has no room for the trick: through floats from 2**23 on
  static constexpr int WORDS = 4, ZERO = Zero, MIDDLE = 128, TIMES = 1;
  static constexpr bool QUANTIZED = true, SHIFTED = true;
  using Scale = S;
  using Shift = float;
  static DEV Shift shift(float zero) { return 8388608.0f + zero; }
  static DEV float number(uint32_t word, uint32_t selector, float shift) {
    return uint_as_float(prmt(word, 0x4b000000u, selector)) - shift;
  }
  static DEV void decode(const uint32_t* words, int j, Shift shift, uint32_t* b) {
    const uint32_t word = words[j];
    b[0] = pack2(BF16{}, number(word, 0x7650u, shift), number(word, 0x7651u, shift));
    b[1] = pack2(BF16{}, number(word, 0x7652u, shift), number(word, 0x7653u, shift));
  }
};

// E4M3 for 16-bit numbers: its exponent and fraction moved into place, then scaled by the difference of the biases.
template <class T, class S>
struct Fp8 {
  static constexpr int WORDS = 4, ZERO = NO_ZERO, MIDDLE = 0, TIMES = 1;
  static constexpr bool QUANTIZED = true, SHIFTED = false;
  using Scale = S;
  using Shift = uint32_t;
  static DEV Shift shift(float) { return 0; }
  static DEV uint32_t widen(BF16, uint32_t pair) {
    return fma2(BF16{}, (pair & 0x80008000u) | (pair >> 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
  }
  static DEV uint32_t widen(F16, uint32_t pair) {
    return fma2(F16{}, (pair & 0x80008000u) | (pair >> 1 & 0x3f803f80u), 0x5c005c00u, 0x80008000u);
  }
  static DEV void decode(const uint32_t* words, int j, Shift, uint32_t* b) {
    b[0] = widen(T{}, prmt(words[j], 0, 0x1404u));
    b[1] = widen(T{}, prmt(words[j], 0, 0x3424u));
  }
};

// 4-bit codes for int8: (code - 8) * 16, the sum is divided by 16.
template <int Zero, class S>
struct Int4Bytes {
  static constexpr int WORDS = 4, ZERO = Zero, MIDDLE = 8, TIMES = 16;
  static constexpr bool QUANTIZED = true, SHIFTED = false;
  using Scale = S;
  using Shift = uint32_t;
  static DEV Shift shift(float) { return 0; }
  static DEV void decode(const uint32_t* words, int j, Shift, uint32_t* b) {
    b[0] = lop3<0x6a>(words[j] << 4, 0xf0f0f0f0u, 0x80808080u);
    b[1] = lop3<0x6a>(words[j], 0xf0f0f0f0u, 0x80808080u);
  }
};

// Bytes as they are: code - 128, or E4M3.
template <int Zero, class S, int Middle>
struct Bytes {
  static constexpr int WORDS = 8, ZERO = Zero, MIDDLE = Middle, TIMES = 1;
  static constexpr bool QUANTIZED = true, SHIFTED = false;
  using Scale = S;
  using Shift = uint32_t;
  static DEV Shift shift(float) { return 0; }
  static DEV void decode(const uint32_t* words, int j, Shift, uint32_t* b) {
    b[0] = words[2 * j];
    b[1] = words[2 * j + 1];
  }
};

// ---- the kernel

// A warp has 16 * MTiles rows and 32 columns, a team of MWarps x NWarps shares a ring. MWarps * NWarps is 1, and each
// of eight teams takes a way, or all warps are one team. FoldSteps: scales change at most after so many steps.
template <class Math_, class Weight_, int MTiles, int MWarps, int NWarps, int Stages, int FoldSteps>
struct Gemm {
  using Math = Math_;
  using Weight = Weight_;
  using Sum = typename Math::Sum;
  static constexpr int MT = MTiles, MW = MWarps, NW = NWarps, STAGES = Stages, FOLD = FoldSteps;
  static constexpr int TEAM = MW * NW, TEAMS = TEAM == 1 ? WAYS : 1, WARPS = TEAM * TEAMS;
  static constexpr int ROWS = 16 * MT * MW;
  static constexpr int CHUNK = STEPS * Weight::WORDS * 128;  // bytes of a panel
  static constexpr int GROUPS = FOLD == STEPS ? 1 : STEPS;   // of a chunk, at most
  static constexpr int SCALE = Weight::QUANTIZED ? PANEL * static_cast<int>(sizeof(typename Weight::Scale)) : 0;
  static constexpr int ZEROS = Weight::ZERO == BYTE_ZERO ? PANEL : Weight::ZERO == FLOAT_ZERO ? PANEL * 4 : 0;
  static constexpr int A = 0, B = ROWS * ROW_BYTES, S = B + NW * CHUNK, Z = S + NW * GROUPS * SCALE;
  static constexpr int SLOT = (Z + NW * GROUPS * ZEROS + 127) / 128 * 128;
  static constexpr int HEAD = (2 * ROWS * 4 + 127) / 128 * 128;  // rows of x and of y
  static constexpr bool TOTALS =
      Weight::QUANTIZED && (Weight::ZERO == FLOAT_ZERO || (Weight::ZERO && !Weight::SHIFTED));
  static_assert(TEAM == 1 || TEAM == WAYS, "eight warps");
};

template <class G, class P>
struct GemmBlock {
  using Math = typename G::Math;
  using Weight = typename G::Weight;
  using Sum = typename G::Sum;
  static constexpr int MT = G::MT;

  const P& p;
  unsigned char* memory;
  int lane, member, team, wm, wn, panel;  // panel: of the whole team
  int64_t expert;
  float acc[MT][4][4];
  Sum part[MT][4][4];  // of a group, of quantized weights
  Sum totals[MT][4];   // sums of x over the same columns
  float factor[MT][2];

  DEV int32_t* sources() const { return reinterpret_cast<int32_t*>(memory); }
  DEV int32_t* targets() const { return sources() + G::ROWS; }
  DEV unsigned char* slot(int number) const { return memory + G::HEAD + (team * G::STAGES + number) * G::SLOT; }
  // Quotients of steps by numbers of steps: p.*_inverse is 2**32 divided by one, or 0 where there is one group.
  DEV int group_of(int step) const {
    const int group = static_cast<int>(static_cast<uint64_t>(step) * static_cast<uint64_t>(p.group_inverse) >> 32);
    return min(group, p.groups - 1);
  }
  DEV int block_of(int step) const {
    return static_cast<int>(static_cast<uint64_t>(step) * static_cast<uint64_t>(p.block_inverse) >> 32);
  }

  DEV void team_barrier() const {
    if constexpr (G::TEAM == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // The rows of x that this block multiplies, and those of y that it writes; -1: none. False: there are none at all.
  DEV bool find_rows() {
    const int row = threadIdx.x;
    int32_t source = -1, target = -1;
    if (p.tiles == nullptr) {
      const int m = blockIdx.y * G::ROWS + row;
      if (m < p.M) source = target = m;
    } else {
      const int32_t* tile = static_cast<const int32_t*>(p.tiles) + 3 * static_cast<int64_t>(blockIdx.y);
      const int32_t begin = tile[1], count = tile[2];
      if (count == 0) return false;
      expert = tile[0];
      if (row < count) {
        target = static_cast<const int32_t*>(p.rows)[begin + row];
        source = target / p.choices;
      }
    }
    if (row < G::ROWS) {
      sources()[row] = source;
      targets()[row] = target;
    }
    __syncthreads();
    return true;
  }

  DEV void load(int chunk, unsigned char* to) const {
    const int thread = member * 32 + lane;
    const char* a = static_cast<const char*>(p.a);
    for (int i = thread; i < G::ROWS * 8; i += G::TEAM * 32) {
      const int row = i >> 3, piece = i & 7, at = chunk * ROW_BYTES + piece * 16;
      const int32_t source = sources()[row];
      const bool ok = source >= 0 && at < p.a_bytes;
      cp_async16(to + G::A + row * ROW_BYTES + ((piece ^ (row & 7)) << 4), ok ? a + source * p.a_stride + at : a, ok);
    }
    const char* w = static_cast<const char*>(p.w) + expert * p.w_expert;
    constexpr int PIECES = G::CHUNK / 16;
    for (int i = thread; i < G::NW * PIECES; i += G::TEAM * 32) {
      const int which = panel + i / PIECES;
      const bool ok = which < p.panels;
      const int64_t from = (static_cast<int64_t>(ok ? which : 0) * p.chunks + chunk) * G::CHUNK + i % PIECES * 16;
      cp_async16(to + G::B + i * 16, w + from, ok);
    }
    if constexpr (G::SCALE > 0) load_groups<G::SCALE>(chunk, to + G::S, p.scale, p.scale_expert);
    if constexpr (G::ZEROS > 0) load_groups<G::ZEROS>(chunk, to + G::Z, p.zero, p.zero_expert);
  }

  // Bytes of each group of a chunk: what the panels of the team have for it.
  template <int Bytes>
  DEV void load_groups(int chunk, unsigned char* to, const void* from, int64_t of_expert) const {
    const int first = group_of(chunk * STEPS), count = group_of(chunk * STEPS + STEPS - 1) - first + 1;
    constexpr int PIECES = Bytes / 16;
    const char* start = static_cast<const char*>(from) + expert * of_expert;
    for (int i = member * 32 + lane; i < G::NW * count * PIECES; i += G::TEAM * 32) {
      const int which = i / PIECES / count, group = i / PIECES % count, piece = i % PIECES;
      const bool ok = panel + which < p.panels;
      const int64_t at = (static_cast<int64_t>(ok ? panel + which : 0) * p.groups + first + group) * Bytes + piece * 16;
      cp_async16(to + (which * G::GROUPS + group) * Bytes + piece * 16, start + at, ok);
    }
  }

  // What rounding x divided it by, for these columns.
  DEV void load_factors(int unit) {
    UNROLL for (int i = 0; i < MT; ++i) {
      UNROLL for (int half = 0; half < 2; ++half) {
        const int32_t source = sources()[(wm * MT + i) * 16 + half * 8 + (lane >> 2)];
        const float* from = static_cast<const float*>(p.factor);
        factor[i][half] = source < 0 ? 0.0f : from[static_cast<int64_t>(source) * p.units + unit];
      }
    }
  }

  DEV void clear_part() {
    UNROLL for (int i = 0; i < MT; ++i) {
      UNROLL for (int e = 0; e < 4; ++e) {
        totals[i][e] = 0;
        UNROLL for (int j = 0; j < 4; ++j) part[i][j][e] = 0;
      }
    }
  }

  DEV float zero_of(const unsigned char* zeros, int column) const {
    if constexpr (Weight::ZERO == BYTE_ZERO) return static_cast<float>(zeros[column]);
    if constexpr (Weight::ZERO == FLOAT_ZERO) return ld_vec<float>(zeros + 4 * column);
    return static_cast<float>(Weight::MIDDLE);
  }

  // acc += factor * scale * part, for the group `group` of this chunk.
  DEV void fold(const unsigned char* data, int group) {
    using S = typename Weight::Scale;
    const unsigned char* scales = data + G::S + (wn * G::GROUPS + group) * G::SCALE;
    const unsigned char* zeros = data + G::Z + (wn * G::GROUPS + group) * G::ZEROS;
    UNROLL for (int j = 0; j < 4; ++j) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const int column = j * 8 + (lane & 3) * 2 + e;
        const float scale = to_f(ld_vec<S>(scales + column * static_cast<int>(sizeof(S))));
        const float zero = zero_of(zeros, column);
        UNROLL for (int i = 0; i < MT; ++i) {
          UNROLL for (int half = 0; half < 2; ++half) {
            Sum sum = part[i][j][half * 2 + e];
            if constexpr (Weight::TIMES == 16) sum >>= 4;
            if constexpr (Weight::ZERO == BYTE_ZERO && !Weight::SHIFTED) {
              sum += (Weight::MIDDLE - static_cast<Sum>(zero)) * totals[i][half * 2];
            }
            float dot = static_cast<float>(sum);
            float& y = acc[i][j][half * 2 + e];
            if constexpr (Weight::ZERO == FLOAT_ZERO) {
              const float offset = fma_(static_cast<float>(Weight::MIDDLE), scale, zero);
              y = fma_(factor[i][half], fma_(scale, dot, offset * static_cast<float>(totals[i][half * 2])), y);
            } else {
              y = fma_(factor[i][half] * scale, dot, y);
            }
          }
        }
      }
    }
    clear_part();
  }

  // One step: every tile of the warp times every fragment of its panel.
  DEV void multiply(const unsigned char* data, int step, const typename Weight::Shift* shifts) {
    uint32_t a[MT][4], words[Weight::WORDS];
    UNROLL for (int i = 0; i < MT; ++i) {
      const int row = (wm * MT + i) * 16 + (lane & 15);
      ldmatrix4(a[i], data + G::A + row * ROW_BYTES + (((step * 2 + (lane >> 4)) ^ (row & 7)) << 4));
    }
    const unsigned char* from = data + G::B + wn * G::CHUNK + step * Weight::WORDS * 128;
    if constexpr (Weight::WORDS == 2) {
      const uint2 v = ld_vec<uint2>(from + lane * 8);
      words[0] = v.x, words[1] = v.y;
    } else {
      UNROLL for (int i = 0; i < Weight::WORDS / 4; ++i) {
        const uint4 v = ld_vec<uint4>(from + i * 512 + lane * 16);
        words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
      }
    }
    UNROLL for (int j = 0; j < 4; ++j) {
      uint32_t b[2];
      Weight::decode(words, j, shifts[j], b);
      UNROLL for (int i = 0; i < MT; ++i) {
        if constexpr (Weight::QUANTIZED) {
          Math::mma(part[i][j], a[i], b);
        } else {
          Math::mma(acc[i][j], a[i], b);
        }
      }
    }
    if constexpr (G::TOTALS) {
      const uint32_t b[2] = {Math::ones(), Math::ones()};
      UNROLL for (int i = 0; i < MT; ++i) Math::mma(totals[i], a[i], b);
    }
  }

  // A chunk; `last`: the way ends with it.
  DEV void multiply(const unsigned char* data, int chunk, bool last) {
    const int first = Weight::QUANTIZED ? group_of(chunk * STEPS) : 0;
    typename Weight::Shift shifts[4];
    UNROLL for (int j = 0; j < 4; ++j) shifts[j] = Weight::shift(0.0f);
    UNROLL for (int step = 0; step < STEPS; ++step) {
      const int at = chunk * STEPS + step;
      if constexpr (Weight::QUANTIZED) {
        if (step % G::FOLD == 0) {
          const unsigned char* zeros = data + G::Z + (wn * G::GROUPS + group_of(at) - first) * G::ZEROS;
          UNROLL for (int j = 0; j < 4; ++j) {
            const bool each = Weight::ZERO == BYTE_ZERO && G::ZEROS > 0;
            shifts[j] = Weight::shift(each ? zero_of(zeros, j * 8 + (lane >> 2)) : static_cast<float>(Weight::MIDDLE));
          }
        }
      }
      multiply(data, step, shifts);
      if constexpr (Weight::QUANTIZED) {
        if (step % G::FOLD == G::FOLD - 1) {
          const int number = block_of(at);
          if (block_of(at + 1) != number || (last && step == STEPS - 1)) {
            if (p.units > 1) load_factors(min(number, p.units - 1));
            fold(data, group_of(at) - first);
          }
        }
      }
    }
  }

  DEV void store(int row, int column, float v0, float v1) const {
    const int32_t target = targets()[row];
    if (target < 0 || column >= p.N) return;
    if (p.bias != nullptr) {
      const float* bias = static_cast<const float*>(p.bias) + expert * p.N + column;
      v0 += bias[0];
      if (column + 1 < p.N) v1 += bias[1];
    }
    const int64_t at = target * p.y_stride + column + blockIdx.z * p.y_split;
    if (p.y_type == 0) {
      float* y = static_cast<float*>(p.y) + at;
      if (p.pairs) {
        st_vec<float2>(y, float2{v0, v1});
        return;
      }
      y[0] = v0;
      if (column + 1 < p.N) y[1] = v1;
      return;
    }
    const uint32_t both = p.y_type == 1 ? pack2(BF16{}, v0, v1) : pack2(F16{}, v0, v1);
    uint16_t* y = static_cast<uint16_t*>(p.y) + at;
    if (p.pairs) {
      st_vec<uint32_t>(y, both);
      return;
    }
    y[0] = static_cast<uint16_t>(both);
    if (column + 1 < p.N) y[1] = static_cast<uint16_t>(both >> 16);
  }

  // Way after way, from `first` to `last`, into `total` or, of a team that has one way, into acc.
  DEV void run(float (*total)[4][4]) {
    const int way = static_cast<int>(blockIdx.z) * WAYS + team, ways = G::TEAM == 1 ? 1 : WAYS;
    const int begin = min(way * p.way_chunks, p.chunks), end = min((way + ways) * p.way_chunks, p.chunks);
    int left = p.way_chunks, now = 0, next = 0;  // slots of the chunk that is multiplied, and of the one that is loaded
    for (int loaded = begin; loaded < end + G::STAGES - 1; ++loaded) {
      const int chunk = loaded - (G::STAGES - 1);
      if (chunk >= begin) {
        cp_wait<G::STAGES - 2>();
        team_barrier();
      }
      if (loaded < end) load(loaded, slot(next));
      cp_commit();
      next = next + 1 == G::STAGES ? 0 : next + 1;
      if (chunk < begin || chunk >= end) continue;
      const bool last = --left == 0 || chunk + 1 == end;
      multiply(slot(now), chunk, last);
      now = now + 1 == G::STAGES ? 0 : now + 1;
      if (G::TEAM > 1 && last) {
        left = p.way_chunks;
        UNROLL for (int i = 0; i < MT; ++i) {
          UNROLL for (int j = 0; j < 4; ++j) {
            UNROLL for (int e = 0; e < 4; ++e) {
              total[i][j][e] += acc[i][j][e];
              acc[i][j][e] = 0.0f;
            }
          }
        }
      }
    }
    cp_wait<0>();
  }

  // Adds the ways of the eight warps in order: each warp leaves its sums in the ring.
  DEV void reduce() {
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory + G::HEAD);
    UNROLL for (int i = 0; i < MT; ++i) {
      UNROLL for (int j = 0; j < 4; ++j) {
        UNROLL for (int e = 0; e < 4; ++e) sums[((team * MT + i) * 16 + j * 4 + e) * 32 + lane] = acc[i][j][e];
      }
    }
    __syncthreads();
    UNROLL for (int i = 0; i < MT; ++i) {  // the eight pairs of a tile, one for each warp
      float v[2] = {0.0f, 0.0f};
      for (int w = 0; w < WAYS; ++w) {
        UNROLL for (int e = 0; e < 2; ++e) v[e] += sums[((w * MT + i) * 16 + team * 2 + e) * 32 + lane];
      }
      store(i * 16 + (team & 1) * 8 + (lane >> 2), panel * PANEL + (team >> 1) * 8 + (lane & 3) * 2, v[0], v[1]);
    }
  }
};

template <class G, class P>
DEV void gemm(const P& p) {
  DYN_SMEM(memory);
  const int warp = threadIdx.x >> 5, member = warp % G::TEAM;
  GemmBlock<G, P> block{p, memory};
  block.lane = threadIdx.x & 31;
  block.member = member;
  block.team = warp / G::TEAM;
  block.wm = member / G::NW;
  block.wn = member % G::NW;
  block.panel = blockIdx.x * G::NW;
  block.expert = 0;
  if (!block.find_rows()) return;
  float total[G::MT][4][4];
  UNROLL for (int i = 0; i < G::MT; ++i) {
    UNROLL for (int j = 0; j < 4; ++j) {
      UNROLL for (int e = 0; e < 4; ++e) total[i][j][e] = block.acc[i][j][e] = 0.0f;
    }
    block.factor[i][0] = block.factor[i][1] = 1.0f;
  }
  block.clear_part();
  if (p.units == 1) block.load_factors(0);
  block.run(total);
  if constexpr (G::TEAM == 1) {
    block.reduce();
  } else {
    UNROLL for (int i = 0; i < G::MT; ++i) {
      UNROLL for (int j = 0; j < 4; ++j) {
        UNROLL for (int half = 0; half < 2; ++half) {
          block.store((block.wm * G::MT + i) * 16 + half * 8 + (block.lane >> 2),
                      (block.panel + block.wn) * PANEL + j * 8 + (block.lane & 3) * 2, total[i][j][half * 2],
                      total[i][j][half * 2 + 1]);
        }
      }
    }
  }
}
