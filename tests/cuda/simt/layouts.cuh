// One instruction each, with its registers in memory: c [32][4] += a [32][4] b [32][2], words of a lane.
#pragma once

DEV void layout_mma(BF16, float* c, const uint32_t* a, const uint32_t* b) { mma16816(BF16{}, c, a, b); }
DEV void layout_mma(F16, float* c, const uint32_t* a, const uint32_t* b) { mma16816(F16{}, c, a, b); }
DEV void layout_mma(int8_t, int32_t* c, const uint32_t* a, const uint32_t* b) { mma16832_s8(c, a, b); }
template <int = 0>
DEV void layout_mma(E4M3, float* c, const uint32_t* a, const uint32_t* b) {
  mma16832_e4m3(c, a, b);
}

template <class T, class Number = float>
DEV void layout(const LayoutParams& p) {
  int lane = threadIdx.x;
  const auto* from_a = static_cast<const uint32_t*>(p.a) + lane * 4;
  const auto* from_b = static_cast<const uint32_t*>(p.b) + lane * 2;
  auto* to = static_cast<Number*>(p.c) + lane * 4;
  uint32_t a[4], b[2];
  Number c[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = from_a[i];
    c[i] = to[i];
  }
  for (int i = 0; i < 2; ++i) b[i] = from_b[i];
  layout_mma(T{}, c, a, b);
  for (int i = 0; i < 4; ++i) to[i] = c[i];
}

// a: 32 rows of 8 halves; c [32][8]: the registers of a plain ldmatrix4, then of a transposing one.
template <int = 0>
DEV void layout_ldmatrix(const LayoutParams& p) {
  DYN_SMEM(shared);
  int lane = threadIdx.x;
  st_vec(shared + lane * 16, ld_vec<uint4>(static_cast<const uint4*>(p.a) + lane));
  __syncwarp();
  auto* to = static_cast<uint32_t*>(p.c) + lane * 8;
  uint32_t r[4];
  ldmatrix4(r, shared + lane * 16);
  for (int i = 0; i < 4; ++i) to[i] = r[i];
  ldmatrix4_t(r, shared + lane * 16);
  for (int i = 0; i < 4; ++i) to[4 + i] = r[i];
}

// The functions of the device layer on all pairs of words, to be compared bit by bit.
template <class T>
DEV void layout_words(const LayoutParams& p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t a = static_cast<const uint32_t*>(p.a)[i], b = static_cast<const uint32_t*>(p.b)[i];
  float x = uint_as_float(a), y = uint_as_float(b);
  auto* to = static_cast<uint32_t*>(p.c) + i * 8;
  to[0] = pack2(T{}, x, y);
  to[1] = fma2(T{}, a, b, a ^ b);
  to[2] = lop3<0xe8>(a, b, a << 16 | b >> 16) ^ lop3<0x1b>(b, a, 0x00ff00ffu);
  to[3] = prmt(a, b, b & 0x7777u);
  to[4] = float_as_uint(fma_(x, y, x));
  to[5] = float_as_uint(to_f(T{static_cast<uint16_t>(a)}));
  to[6] = float_as_uint(to_f(E4M3{static_cast<uint8_t>(a)}));
  to[7] = from_f(E4M3{}, x);
}

// Copies of 16 bytes, every other one of zeros; c [32][4] as they have arrived.
template <int = 0>
DEV void layout_copy(const LayoutParams& p) {
  DYN_SMEM(shared);
  int lane = threadIdx.x;
  cp_async16(shared + lane * 16, static_cast<const uint4*>(p.a) + lane, lane % 2 == 0);
  cp_commit();
  cp_wait<0>();
  __syncwarp();
  st_vec(static_cast<uint4*>(p.c) + lane, ld_vec<uint4>(shared + (lane ^ 1) * 16));
}
