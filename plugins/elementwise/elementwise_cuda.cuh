// llmc::elementwise: one thread an element.
#pragma once
#include "csrc/cuda/activations.cuh"
#include "csrc/cuda/strided.cuh"

// Unary functions that are not for floats alone.
struct G_copy {
  template <class T>
  static DEV T apply(T x) {
    return x;
  }
};
struct G_neg {
  static DEV int64_t apply(int64_t x) { return -x; }
};
struct G_abs {
  static DEV int64_t apply(int64_t x) { return x < 0 ? -x : x; }
};
struct G_sign {
  static DEV int64_t apply(int64_t x) { return (x > 0) - (x < 0); }
};
struct G_relu {
  static DEV int64_t apply(int64_t x) { return x > 0 ? x : 0; }
};
struct G_not {
  template <class T>
  static DEV bool apply(T x) {
    return x == T{};
  }
};
struct G_isnan {
  static DEV bool apply(float x) { return x != x; }
};

#define LLMC_BINARY(name, result)     \
  struct F_##name {                   \
    template <class T>                \
    static DEV auto apply(T a, T b) { \
      return result;                  \
    }                                 \
  };

LLMC_BINARY(add, a + b)
LLMC_BINARY(sub, a - b)
LLMC_BINARY(mul, a* b)
LLMC_BINARY(equal, a == b)
LLMC_BINARY(not_equal, a != b)
LLMC_BINARY(less, a < b)
LLMC_BINARY(less_equal, a <= b)
LLMC_BINARY(greater, a > b)
LLMC_BINARY(greater_equal, a >= b)
LLMC_BINARY(and, a != T{} && b != T{})
LLMC_BINARY(or, a != T{} || b != T{})
LLMC_BINARY(xor, (a != T{}) != (b != T{}))
LLMC_BINARY(max, a > b || a != a ? a : b)  // a number that is none stays
LLMC_BINARY(min, a < b || a != a ? a : b)

struct F_div {
  static DEV float apply(float a, float b) { return a / b; }
  static DEV int64_t apply(int64_t a, int64_t b) { return b == 0 ? 0 : a / b; }
};
struct F_fmod {
  static DEV float apply(float a, float b) { return fmodf(a, b); }
  static DEV int64_t apply(int64_t a, int64_t b) { return b == 0 ? 0 : a % b; }
};
struct F_mod {
  static DEV float apply(float a, float b) {
    float rest = fmodf(a, b);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
  }
  static DEV int64_t apply(int64_t a, int64_t b) {
    if (b == 0) return 0;
    int64_t rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  }
};
struct F_pow {
  static DEV float apply(float a, float b) { return powf(a, b); }
};

template <class F, class A, class Y, class P>
DEV void elementwise1(const P& p) {
  const int64_t i = thread_number();
  if (i >= p.count) return;
  const Position at = position(i, p.n1, p.n2, p.n3);
  put<Y>(p.y, offset(at, p.y0, p.y1, p.y2, p.y3), F::apply(get<A>(p.a, offset(at, p.a0, p.a1, p.a2, p.a3))));
}

template <class F, class A, class B, class Y, class P>
DEV void elementwise2(const P& p) {
  const int64_t i = thread_number();
  if (i >= p.count) return;
  const Position at = position(i, p.n1, p.n2, p.n3);
  const Number<A> a = get<A>(p.a, offset(at, p.a0, p.a1, p.a2, p.a3));
  const Number<B> b = get<B>(p.b, offset(at, p.b0, p.b1, p.b2, p.b3));
  put<Y>(p.y, offset(at, p.y0, p.y1, p.y2, p.y3), F::apply(a, b));
}

template <class B, class C, class Y, class P>
DEV void where(const P& p) {
  const int64_t i = thread_number();
  if (i >= p.count) return;
  const Position at = position(i, p.n1, p.n2, p.n3);
  const bool first = get<Bool>(p.a, offset(at, p.a0, p.a1, p.a2, p.a3));
  const int64_t to = offset(at, p.y0, p.y1, p.y2, p.y3);
  if (first) {
    put<Y>(p.y, to, get<B>(p.b, offset(at, p.b0, p.b1, p.b2, p.b3)));
  } else {
    put<Y>(p.y, to, get<C>(p.c, offset(at, p.c0, p.c1, p.c2, p.c3)));
  }
}
