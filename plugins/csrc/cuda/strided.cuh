// Elements of strided views: what the small ops share. Numbers are computed as float, int64_t or bool, whatever they
// are stored as; see plugins/cuda_views.py for the sizes and strides.
#pragma once
#include "csrc/cuda/device.cuh"

struct Bool {
  uint8_t x;
};

DEV float number(F32 v) { return v.x; }
DEV float number(BF16 v) { return to_f(v); }
DEV float number(F16 v) { return to_f(v); }
DEV int64_t number(int32_t v) { return v; }
DEV int64_t number(int64_t v) { return v; }
DEV bool number(Bool v) { return v.x != 0; }

// What numbers of a stored type are computed as.
template <class T>
using Number = decltype(number(T{}));

template <class T>
struct Store {  // floats
  template <class V>
  static DEV T from(V v) {
    return round_to<T>(static_cast<float>(v));
  }
};
template <>
struct Store<int32_t> {
  template <class V>
  static DEV int32_t from(V v) {
    return static_cast<int32_t>(static_cast<int64_t>(v));
  }
};
template <>
struct Store<int64_t> {
  template <class V>
  static DEV int64_t from(V v) {
    return static_cast<int64_t>(v);
  }
};
template <>
struct Store<Bool> {
  template <class V>
  static DEV Bool from(V v) {
    return Bool{static_cast<uint8_t>(v != V{})};
  }
};

template <class T>
DEV Number<T> get(const void* data, int64_t i) {
  return number(static_cast<const T*>(data)[i]);
}

template <class T, class V>
DEV void put(void* data, int64_t i, V v) {
  static_cast<T*>(data)[i] = Store<T>::from(v);
}

// Number of the thread in its grid, which has one axis.
DEV int64_t thread_number() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// A position of up to four axes, the last one innermost.
struct Position {
  int64_t i0, i1, i2, i3;
};

// Position number `i` of axes of these sizes; the first has what is left.
DEV Position position(int64_t i, int64_t n1, int64_t n2, int64_t n3) {
  Position at;
  if (n1 == 1 && n2 == 1) {  // most views have one axis or two
    at.i1 = at.i2 = 0;
    at.i0 = n3 == 1 ? i : i / n3;
    at.i3 = i - at.i0 * n3;
    return at;
  }
  at.i3 = i % n3;
  i /= n3;
  at.i2 = i % n2;
  i /= n2;
  at.i1 = i % n1;
  at.i0 = i / n1;
  return at;
}

DEV int64_t offset(const Position& at, int64_t s0, int64_t s1, int64_t s2, int64_t s3) {
  return at.i0 * s0 + at.i1 * s1 + at.i2 * s2 + at.i3 * s3;
}
