// What stands around csrc/cuda/gemm.cuh: rows of x made ready for it, its partial sums added up, products in float32,
// and single codes of packed weights. See plugins/cuda_gemm.py.
#pragma once
#include "csrc/cuda/activations.cuh"
#include "csrc/cuda/device.cuh"

constexpr int ROW_THREADS = 256;

DEV void put_float(void* y, int type, int64_t at, float v) {
  if (type == 0) {
    static_cast<float*>(y)[at] = v;
  } else {
    static_cast<uint16_t*>(y)[at] = type == 1 ? from_f(BF16{}, v) : from_f(F16{}, v);
  }
}

// ---- rows of x: what they become, and the largest number that they are scaled to (0: they are not)

template <class T>
struct Round16 {
  using Out = T;
  static constexpr float LARGEST = 0.0f;
  static DEV T from(float v, float) { return round_to<T>(v); }
};
struct RoundInt8 {
  using Out = int8_t;
  static constexpr float LARGEST = 127.0f;
  static DEV int8_t from(float v, float least) {
    const float whole = min(max(v, least), 127.0f) + 12582912.0f;  // 1.5 * 2**23: the sum is rounded to whole numbers
    return static_cast<int8_t>(static_cast<int>(whole - 12582912.0f));
  }
};
struct RoundFp8 {
  using Out = uint8_t;
  static constexpr float LARGEST = 448.0f;
  static DEV uint8_t from(float v, float) { return from_f(E4M3{}, min(max(v, -448.0f), 448.0f)); }
};
template <class T>  // for chips that multiply it as 16-bit numbers
struct RoundFp8As {
  using Out = T;
  static constexpr float LARGEST = 448.0f;
  static DEV T from(float v, float) { return round_to<T>(to_f(E4M3{RoundFp8::from(v, 0.0f)})); }
};

// Where the rows go: one behind the other, or 128 bytes of each beside those of other rows, as csrc/cuda/hopper.cuh
// multiplies them: [chunk][eight rows][row][128], 16-byte pieces swizzled. `rows` is a multiple of eight.
struct InRows {
  static DEV int64_t at(int64_t row, int column, int size, int columns, int) { return (row * columns + column) * size; }
};
struct InTiles {
  static DEV int64_t at(int64_t row, int column, int size, int, int rows) {
    const int byte = column * size, turn = static_cast<int>(row & 7) << 4;
    return (static_cast<int64_t>(byte >> 7) * rows + row) * 128 + ((byte & 127) ^ turn);
  }
};

// A block for each row and unit: the columns that share a scale of x. Columns go where their group begins in packed
// weights, what lies between is zero, and so are rows from M on.
template <class X, class How, class Place = InRows, class P>
DEV void prepare_rows(const P& p) {
  using Out = typename How::Out;
  DYN_SMEM(memory);
  const int64_t row = blockIdx.x;
  const int unit = blockIdx.y;
  const bool there_is = row < p.M;
  const X* x = static_cast<const X*>(p.x) + (there_is ? row : 0) * p.x_stride;
  const auto put = [&](int column, Out v) {
    char* out = static_cast<char*>(p.out);
    const int64_t at = Place::at(row, column, static_cast<int>(sizeof(Out)), p.columns, static_cast<int>(gridDim.x));
    *reinterpret_cast<Out*>(out + at) = v;
  };
  float factor = 1.0f, inverse = 1.0f, shift = 0.0f, least = -How::LARGEST;
  bool finite = true;
  if constexpr (How::LARGEST > 0.0f) {
    const int begin = unit * p.unit, end = min(p.K, begin + p.unit);
    float most = 0.0f;
    for (int k = begin + static_cast<int>(threadIdx.x); k < end; k += ROW_THREADS) {
      const float v = fabsf(to_f(x[k]));
      most = max(most, v < INF ? v : INF);  // what is no number counts as infinite
    }
    most = block_max<ROW_THREADS / 32>(most, reinterpret_cast<float*>(memory));
    finite = most < INF;
    if (p.x_scale != nullptr) {
      factor = static_cast<const float*>(p.x_scale)[0];
      if (p.x_scales > 1) shift = static_cast<const float*>(p.x_scale)[1];
      if (How::LARGEST == 127.0f) least = -128.0f;
    } else {
      factor = most * (1.0f / How::LARGEST);
      inverse = How::LARGEST / most;
      if (!(inverse < INF)) inverse = 0.0f;
    }
    if (threadIdx.x == 0 && there_is) {
      static_cast<float*>(p.factor)[row * p.units + unit] = finite ? factor : uint_as_float(0x7fc00000u);
    }
  }
  const int begin = unit * p.unit_columns;
  const int end = unit + 1 == p.units ? p.columns : begin + p.unit_columns;
  for (int at = begin + static_cast<int>(threadIdx.x); at < end; at += ROW_THREADS) {
    const int group = at / p.group_columns, within = at - group * p.group_columns;
    const int k = group * p.group + within;
    const bool there = there_is && within < p.group && k < p.K && finite;
    float v = there ? to_f(x[k]) : 0.0f;
    if constexpr (How::LARGEST > 0.0f) v = p.x_scale != nullptr ? v / factor + (there ? shift : 0.0f) : v * inverse;
    put(at, How::from(v, least));
  }
}

// ---- partial sums, a bias, and a gated unit

struct Ungated {};

template <class F, class P>
DEV float partial_sum(const P& p, int64_t row, int column) {
  const float* from = static_cast<const float*>(p.part) + row * p.N + column;
  float sum = from[0];
  for (int split = 1; split < p.splits; ++split) sum += from[split * p.split];
  if (p.bias != nullptr) sum += static_cast<const float*>(p.bias)[column];
  return sum;
}

template <class F>
struct Gated {
  template <class P>
  static DEV float value(const P& p, int64_t row, int column) {
    return F::apply(partial_sum<F>(p, row, column)) * partial_sum<F>(p, row, column + p.N / 2);
  }
};
template <>
struct Gated<Ungated> {
  template <class P>
  static DEV float value(const P& p, int64_t row, int column) {
    return partial_sum<Ungated>(p, row, column);
  }
};

template <class F, class P>
DEV void combine(const P& p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * ROW_THREADS + threadIdx.x;
  const int64_t row = i / p.columns;
  const int column = static_cast<int>(i - row * p.columns);
  if (row < p.M) put_float(p.y, p.y_type, row * p.y_stride + column, Gated<F>::value(p, row, column));
}

// ---- single numbers of packed weights

// The code of column k (of the padded ones) of row n; Step: columns of a step, which the layout depends on.
template <int Bits, int Step>
DEV uint32_t packed_code(const void* w, int chunks, int64_t n, int k) {
  constexpr int WORDS = Bits * Step / 32;
  const int within = k % Step, g = static_cast<int>(n % 8), j = static_cast<int>(n % 32) / 8;
  const int64_t step = n / 32 * chunks * 4 + k / Step;
  const int half = within / (Step / 2), t = within % (Step / 2) / (Step / 8), e = within % (Step / 8);
  const int lane = g * 4 + t;
  const unsigned char* from = static_cast<const unsigned char*>(w) + step * WORDS * 128;
  if constexpr (WORDS == 2) {
    const uint32_t word = ld_vec<uint32_t>(from + lane * 8 + (j >> 1) * 4);
    return word >> (4 * ((j & 1) * 2 + half) + 16 * e) & 15u;
  } else if constexpr (WORDS == 4 && Step == 16) {
    return from[lane * 16 + j * 4 + half * 2 + e];
  } else if constexpr (WORDS == 4) {
    return from[lane * 16 + j * 4 + e] >> 4 * half & 15u;
  } else {
    const unsigned char* at = from + (j >> 1) * 512 + lane * 16 + ((j & 1) * 2 + half) * 4;
    if constexpr (Bits == 16) {
      return ld_vec<uint16_t>(at + 2 * e);
    } else {
      return at[e];
    }
  }
}

// Numbers of weights by row and column, as float32 has them. Params: see rows_params of plugins/cuda_gemm.py.
template <class T>
struct RowsPlain {
  template <class P>
  static DEV float number(const P& p, int64_t expert, int64_t n, int k) {
    return to_f(static_cast<const T*>(p.w)[(expert * p.N + n) * p.K + k]);
  }
};
template <class T>
struct RowsPacked {
  template <class P>
  static DEV float number(const P& p, int64_t expert, int64_t n, int k) {
    const char* w = static_cast<const char*>(p.w) + expert * p.w_expert;
    return to_f(T{static_cast<uint16_t>(packed_code<16, 16>(w, p.chunks, n, k))});
  }
};
// Zero: as in gemm.cuh. Flip: what is stored of an 8-bit code in steps of 32 is code - 128.
template <int Bits, int Step, bool Fp8, int Zero, class S>
struct RowsQuantized {
  template <class P>
  static DEV float number(const P& p, int64_t expert, int64_t n, int k) {
    const char* w = static_cast<const char*>(p.w) + expert * p.w_expert;
    const int group = k / p.group;
    const int at = group * p.group_columns + k % p.group;
    uint32_t code = packed_code<Bits, Step>(w, p.chunks, n, at);
    const int64_t block = (n / 32 * p.groups + group) * 32 + n % 32;
    const char* scales = static_cast<const char*>(p.scale) + expert * p.scale_expert;
    const float scale = to_f(reinterpret_cast<const S*>(scales)[block]);
    if constexpr (Fp8) return to_f(E4M3{static_cast<uint8_t>(code)}) * scale;
    if constexpr (Bits == 8 && Step == 32) code ^= 0x80u;
    const char* zeros = static_cast<const char*>(p.zero) + expert * p.zero_expert;
    const float c = static_cast<float>(code);
    if constexpr (Zero == 1) return (c - static_cast<float>(reinterpret_cast<const uint8_t*>(zeros)[block])) * scale;
    if constexpr (Zero == 2) return c * scale + reinterpret_cast<const float*>(zeros)[block];
    return (c - (Bits == 4 ? 8.0f : 128.0f)) * scale;
  }
};

// ---- products in float32: a warp for each column of a tile of eight rows

constexpr int EXACT_ROWS = 8;

template <class X, class W, class P>
DEV void exact(const P& p) {
  const int lane = threadIdx.x % 32;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * (ROW_THREADS / 32) + threadIdx.x / 32;
  if (n >= p.N) return;
  int64_t expert = 0;
  int begin = static_cast<int>(blockIdx.y) * EXACT_ROWS, count = min(EXACT_ROWS, p.M - begin);
  const int32_t* rows = static_cast<const int32_t*>(p.rows);
  if (p.tiles != nullptr) {
    const int32_t* tile = static_cast<const int32_t*>(p.tiles) + 3 * static_cast<int64_t>(blockIdx.y);
    expert = tile[0], begin = tile[1], count = tile[2];
  }
  float sums[EXACT_ROWS];
  int64_t targets[EXACT_ROWS];
  const X* sources[EXACT_ROWS];
  UNROLL for (int i = 0; i < EXACT_ROWS; ++i) {
    const int row = begin + min(i, max(count, 1) - 1);
    targets[i] = count == 0 ? 0 : p.tiles != nullptr ? rows[row] : row;
    const int64_t source = p.tiles != nullptr ? targets[i] / p.choices : targets[i];
    sources[i] = static_cast<const X*>(p.x) + source * p.x_stride;
    sums[i] = 0.0f;
  }
  if (count == 0) return;
  for (int k = lane; k < p.K; k += 32) {
    const float w = W::number(p, expert, n, k);
    UNROLL for (int i = 0; i < EXACT_ROWS; ++i) sums[i] = fma_(to_f(sources[i][k]), w, sums[i]);
  }
  UNROLL for (int i = 0; i < EXACT_ROWS; ++i) {
    float sum = warp_sum(sums[i]);
    if (p.bias != nullptr) sum += static_cast<const float*>(p.bias)[expert * p.N + n];
    if (lane == 0 && i < count) put_float(p.y, p.y_type, targets[i] * p.y_stride + n, sum);
  }
}
