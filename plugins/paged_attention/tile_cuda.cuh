// Tiles of keys and values in shared memory, and what a warp's 16 rows make of one.
//
// Rows of a tile are 16 bytes longer than their numbers, an odd number of 16-byte pieces, so that the eight rows that
// ldmatrix reads at once lie in different banks.
#pragma once

struct I8 {
  uint8_t x;
};
DEV float to_f(I8 v) { return static_cast<float>(static_cast<int8_t>(v.x)); }
DEV uint8_t from_f(I8, float f) { return static_cast<uint8_t>(float_as_uint(f + 12582912.0f)); }  // 1.5 * 2**23

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

// Types with a scale for each position.
template <class KV>
constexpr bool SCALED = sizeof(KV) == 1;

// T: what is multiplied; KV: what the cache holds, dims padded to DK and DV. The launcher has the same sums.
template <class T, class KV, int DK, int DV>
struct Tile {
  static constexpr bool WIDENED = !SAME<T, KV>;
  static constexpr int KEYS = DK > 128 || DV > 128 ? 32 : 64;
  static constexpr int KEY_ROW = DK * 2 + 16, VALUE_ROW = DV * 2 + 16;
  // Offsets behind the queries.
  static constexpr int VALUES = KEYS * KEY_ROW, KEY_CODES = VALUES + KEYS * VALUE_ROW;
  static constexpr int VALUE_CODES = KEY_CODES + (WIDENED ? KEYS * DK * static_cast<int>(sizeof(KV)) : 0);
  static constexpr int SCALES = VALUE_CODES + (WIDENED ? KEYS * DV * static_cast<int>(sizeof(KV)) : 0);
  static constexpr int FLAGS = SCALES + (SCALED<KV> ? KEYS * 8 : 0);  // a word of each warp: values that are not finite
  static constexpr int BYTES = FLAGS + 16;
  // Warps that share 16 rows: all of them multiply the keys, and each adds up its part of the values, since one lane
  // has no registers for the sums of more than 128 dims.
  static constexpr int SHARE = DV > 128 ? 2 : 1, PART = DV / SHARE;
  static_assert(PART % 16 == 0);
};

// A barrier of all who share a tile: a block, or a block of one warp.
template <int THREADS>
DEV void tile_barrier() {
  if constexpr (THREADS == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Where position j of a kv head stands in the pool, counted in positions.
DEV int64_t place_of(const AttentionParams& p, const Sequence& sequence, int kv_head, int j) {
  int page = j / 16, pages = p.block_size / 16, within = j % 16, block = page;
  if (pages > 1) {
    block = page / pages;
    within += page % pages * 16;
  }
  return (static_cast<int64_t>(sequence.table[block]) * p.kv_heads + kv_head) * p.block_size + within;
}

// Starts to copy rows of ROW_BYTES of positions low .. end - 1 of a tile; zeros for the others.
template <int KEYS, int ROW_BYTES, int STRIDE, int THREADS>
DEV void copy_rows(const AttentionParams& p, const Sequence& sequence, int kv_head, const void* pool, unsigned char* to,
                   int start, int low, int end) {
  constexpr int PIECES = ROW_BYTES / 16;
  _Pragma("unroll 4") for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
    int row = i / PIECES, piece = i % PIECES, j = start + row;
    bool ok = j >= low && j < end;
    int64_t place = ok ? place_of(p, sequence, kv_head, j) : 0;
    cp_async16(to + row * STRIDE + piece * 16, static_cast<const unsigned char*>(pool) + place * ROW_BYTES + piece * 16,
               ok);
  }
}

// The same for scales, four at a time; pages begin at multiples of 16.
template <int KEYS, int THREADS>
DEV void copy_scales(const AttentionParams& p, const Sequence& sequence, int kv_head, const void* pool,
                     unsigned char* to, int start, int low, int end) {
  for (int i = threadIdx.x; i < KEYS / 4; i += THREADS) {
    int j = start + 4 * i;
    bool ok = j + 3 >= low && j < end;
    int64_t place = ok ? place_of(p, sequence, kv_head, j) : 0;
    cp_async16(to + i * 16, static_cast<const float*>(pool) + place, ok);
  }
}

// A masked key has the weight 0, but 0 times infinity is no number: a value that is not finite would reach rows that do
// not see it. So each tile of values is looked through. `odd` begins as 0 and stays 0 if all words hold finite numbers.
template <class T>
DEV void look(uint4 words, uint32_t& odd) {
  odd = fma2(T{}, words.x, 0u, odd);
  odd = fma2(T{}, words.y, 0u, odd);
  odd = fma2(T{}, words.z, 0u, odd);
  odd = fma2(T{}, words.w, 0u, odd);
}

// The same for the pieces that this thread has copied.
template <class T, int KEYS, int DV, int THREADS>
DEV uint32_t look_at_rows(const unsigned char* values) {
  constexpr int PIECES = DV / 8, STRIDE = DV * 2 + 16;
  uint32_t odd = 0;
  _Pragma("unroll 4") for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
    look<T>(ld_vec<uint4>(values + i / PIECES * STRIDE + i % PIECES * 16), odd);
  }
  return odd;
}

// Tells the other warps, behind the next barrier.
DEV void report(uint32_t odd, unsigned char* flags) {
  uint32_t lanes = __ballot_sync(FULL_WARP, odd != 0);
  if (threadIdx.x % 32 == 0) st_vec<uint32_t>(flags + threadIdx.x / 32 * 4, lanes);
}

template <int THREADS>
DEV bool any_odd(const unsigned char* flags) {
  uint32_t lanes = 0;
  UNROLL for (int warp = 0; warp < THREADS / 32; ++warp) lanes |= ld_vec<uint32_t>(flags + warp * 4);
  return lanes != 0;
}

// Makes a tile of numbers of one of codes.
template <class T, class KV, int KEYS, int D, int THREADS>
DEV uint32_t widen(unsigned char* to, const unsigned char* codes, const unsigned char* scales, int start, int low,
                   int end) {
  uint32_t odd = 0;
  for (int i = threadIdx.x; i < KEYS * (D / 16); i += THREADS) {
    int row = i / (D / 16), piece = i % (D / 16);
    float scale = 1.0f;
    if constexpr (SCALED<KV>) {
      bool ok = start + row >= low && start + row < end;
      scale = ok ? ld_vec<float>(scales + row * 4) : 0.0f;
    }
    const unsigned char* from = codes + (row * D + piece * 16) * static_cast<int>(sizeof(KV));
    uint32_t word[8];
    UNROLL for (int part = 0; part < static_cast<int>(sizeof(KV)); ++part) {
      uint4 v = ld_vec<uint4>(from + 16 * part);
      uint32_t given[4] = {v.x, v.y, v.z, v.w};
      if constexpr (sizeof(KV) == 1) {
        UNROLL for (int k = 0; k < 8; ++k) {
          uint32_t two = given[k / 2] >> k % 2 * 16;
          KV first{static_cast<uint8_t>(two & 0xffu)}, second{static_cast<uint8_t>(two >> 8 & 0xffu)};
          word[k] = pack2(T{}, to_f(first) * scale, to_f(second) * scale);
        }
      } else {
        UNROLL for (int k = 0; k < 4; ++k) {
          KV first{static_cast<uint16_t>(given[k] & 0xffffu)}, second{static_cast<uint16_t>(given[k] >> 16)};
          word[part * 4 + k] = pack2(T{}, to_f(first), to_f(second));
        }
      }
    }
    unsigned char* place = to + row * (D * 2 + 16) + piece * 32;
    uint4 first = {word[0], word[1], word[2], word[3]}, second = {word[4], word[5], word[6], word[7]};
    st_vec<uint4>(place, first);
    st_vec<uint4>(place + 16, second);
    look<T>(first, odd);
    look<T>(second, odd);
  }
  return odd;
}

// What the two rows of a lane have seen of a unit: sums of values, of weights, and the largest logits. Logits are in
// units of log(2). Weights are added up by the tensor cores too, as the product with a column of ones.
template <int DV>
struct Seen {
  float values[DV / 8][4];
  float sum[4];
  float top[2];

  DEV void clear() {
    UNROLL for (int i = 0; i < DV / 8; ++i) { UNROLL for (int e = 0; e < 4; ++e) values[i][e] = 0.0f; }
    UNROLL for (int e = 0; e < 4; ++e) sum[e] = 0.0f;
    top[0] = top[1] = NEG_INF;
  }
};

template <class T, int DK, int KEYS>
DEV void multiply_keys(const unsigned char* queries, const unsigned char* keys, float (*scores)[4]) {
  constexpr int ROW = DK * 2 + 16;
  int lane = threadIdx.x % 32;
  UNROLL for (int n = 0; n < KEYS / 8; ++n) { UNROLL for (int e = 0; e < 4; ++e) scores[n][e] = 0.0f; }
  UNROLL for (int k = 0; k < DK / 16; ++k) {
    uint32_t a[4];
    ldmatrix4(a, queries + lane % 16 * ROW + k * 32 + lane / 16 * 16);
    UNROLL for (int n = 0; n < KEYS / 8; n += 2) {
      uint32_t b[4];
      ldmatrix4(b, keys + (n * 8 + lane % 8 + lane / 16 * 8) * ROW + k * 32 + lane / 8 % 2 * 16);
      mma16816(T{}, scores[n], a, b);
      mma16816(T{}, scores[n + 1], a, b + 2);
    }
  }
}

constexpr float LOG2_E = 1.44269504f;

// Within 2e-7 of the hyperbolic tangent.
DEV float tanh_(float x) { return 1.0f - 2.0f / (1.0f + exp2_(2.0f * LOG2_E * x)); }

// Scores to logits, -inf where a row does not see a key. BIASED: with slopes, shifts or a softcap.
template <int KEYS, bool BIASED>
DEV void make_logits(const AttentionParams& p, const Sequence& sequence, const LaneRows& rows, int start,
                     float (*scores)[4]) {
  int column = start + static_cast<int>(threadIdx.x) % 4 * 2;
  bool whole = start >= rows.low_most && start + KEYS - 1 <= rows.high_least;
  UNROLL for (int n = 0; n < KEYS / 8; ++n) {
    UNROLL for (int e = 0; e < 4; ++e) {
      int j = column + n * 8 + e % 2, half = e / 2;
      float x = scores[n][e] * p.scale;
      if constexpr (BIASED) {
        int distance = position_of_key(p, sequence, j) - rows.position[half];
        x = fma_(rows.slope[half], static_cast<float>(distance), x) + rows.shift[half];
        if (p.softcap > 0.0f) x = p.softcap * tanh_(x / p.softcap);
        x *= LOG2_E;
      }
      if (!whole && !is_visible(p, sequence, rows, half, j)) x = NEG_INF;
      scores[n][e] = x;
    }
  }
}

// Logits to weights relative to the largest logit so far, to which the sums are brought.
template <int KEYS, int DV>
DEV void make_weights(float (*logits)[4], Seen<DV>& seen) {
  float factor[2];
  UNROLL for (int half = 0; half < 2; ++half) {
    float top = seen.top[half];
    UNROLL for (int n = 0; n < KEYS / 8; ++n) top = max(top, max(logits[n][2 * half], logits[n][2 * half + 1]));
    top = max(top, __shfl_xor_sync(FULL_WARP, top, 1));
    top = max(top, __shfl_xor_sync(FULL_WARP, top, 2));
    float base = top == NEG_INF ? 0.0f : top;
    factor[half] = exp2_(seen.top[half] - base);
    seen.top[half] = top;
    UNROLL for (int n = 0; n < KEYS / 8; ++n) {
      UNROLL for (int e = 0; e < 2; ++e) logits[n][2 * half + e] = exp2_(logits[n][2 * half + e] - base);
    }
  }
  UNROLL for (int i = 0; i < DV / 8; ++i) { UNROLL for (int e = 0; e < 4; ++e) seen.values[i][e] *= factor[e / 2]; }
  UNROLL for (int e = 0; e < 4; ++e) seen.sum[e] *= factor[e / 2];
}

// A number is not finite if all these bits of it are set.
template <class T>
constexpr uint32_t INFINITE = SAME<T, BF16> ? 0x7f80u : 0x7c00u;

// Adds values that are not finite to the rows that see them, one by one: there are next to none. A key that is seen has
// a weight that is not 0. `own_values`: those of the dims of this warp.
template <class T, int KEYS, int DV, int PART>
DEV void add_odd_values(const unsigned char* own_values, const float (*weights)[4], Seen<PART>& seen) {
  constexpr int ROW = DV * 2 + 16;
  int lane = threadIdx.x % 32;
  // Of 8 n keys, bit 8 n + 4 e + t says that the row sees key 8 n + 2 t + e, whose weight is in the lane t of four.
  uint64_t visible[2] = {0, 0};
  UNROLL for (int half = 0; half < 2; ++half) {
    UNROLL for (int i = 0; i < KEYS / 4; ++i) {
      uint64_t lanes = __ballot_sync(FULL_WARP, weights[i / 2][2 * half + i % 2] != 0.0f) >> (lane & 28) & 0xfu;
      visible[half] |= lanes << 4 * i;
    }
  }
  _Pragma("unroll 1") for (int k = 0; k < KEYS; ++k) {
    const unsigned char* row = own_values + (k / 8 * 8 + k % 4 * 2 + k / 4 % 2) * ROW + lane % 4 * 4;
    UNROLL for (int d = 0; d < PART / 8; ++d) {
      uint32_t pair = ld_vec<uint32_t>(row + d * 16);
      UNROLL for (int e = 0; e < 2; ++e) {
        uint32_t bits = pair >> 16 * e & 0xffffu;
        if ((bits & INFINITE<T>) != INFINITE<T>) continue;
        float value = to_f(T{static_cast<uint16_t>(bits)});
        if (visible[0] >> k & 1) seen.values[d][e] += value;
        if (visible[1] >> k & 1) seen.values[d][2 + e] += value;
      }
    }
  }
}

// Makes zeros of values that are not finite.
template <class T, int KEYS, int DV, int THREADS>
DEV void clear_odd_values(unsigned char* values) {
  constexpr int WORDS = DV / 2, ROW = DV * 2 + 16;
  _Pragma("unroll 1") for (int i = threadIdx.x; i < KEYS * WORDS; i += THREADS) {
    unsigned char* place = values + i / WORDS * ROW + i % WORDS * 4;
    uint32_t pair = ld_vec<uint32_t>(place);
    if ((pair & INFINITE<T>) == INFINITE<T>) pair &= 0xffff0000u;
    if ((pair >> 16 & INFINITE<T>) == INFINITE<T>) pair &= 0xffffu;
    st_vec<uint32_t>(place, pair);
  }
}

// PART: of the DV dims, those that this warp adds up, the first at `own_values`.
template <class T, int KEYS, int DV, int PART>
DEV void add_values(const unsigned char* own_values, const float (*weights)[4], Seen<PART>& seen) {
  constexpr int ROW = DV * 2 + 16;
  int lane = threadIdx.x % 32;
  uint32_t ones[2] = {pack2(T{}, 1.0f, 1.0f), pack2(T{}, 1.0f, 1.0f)};
  UNROLL for (int k = 0; k < KEYS / 16; ++k) {
    const float *left = weights[2 * k], *right = weights[2 * k + 1];
    uint32_t a[4] = {pack2(T{}, left[0], left[1]), pack2(T{}, left[2], left[3]), pack2(T{}, right[0], right[1]),
                     pack2(T{}, right[2], right[3])};
    mma16816(T{}, seen.sum, a, ones);
    UNROLL for (int d = 0; d < PART / 8; d += 2) {
      uint32_t b[4];
      ldmatrix4_t(b, own_values + (k * 16 + lane % 16) * ROW + d * 16 + lane / 16 * 16);
      mma16816(T{}, seen.values[d], a, b);
      mma16816(T{}, seen.values[d + 1], a, b + 2);
    }
  }
}

// Lets the warps of a block, 16 rows each or each few of them, see the tiles from `start` to `end` (not included) of a
// sequence, of which the keys low .. end - 1 exist for some row. At the end of each unit, at_unit(unit, whether it is
// the last one).
template <class T, class KV, int DK, int DV, int THREADS, bool BIASED, class AtUnit>
DEV void walk(const AttentionParams& p, const Sequence& sequence, const LaneRows& rows, int kv_head,
              const unsigned char* queries, unsigned char* tiles, int low, int end,
              Seen<Tile<T, KV, DK, DV>::PART>& seen, AtUnit at_unit) {
  using Sizes = Tile<T, KV, DK, DV>;
  constexpr int KEYS = Sizes::KEYS, PART = Sizes::PART;
  unsigned char *values = tiles + Sizes::VALUES, *flags = tiles + Sizes::FLAGS;
  const unsigned char* own_values = values + threadIdx.x / 32 % Sizes::SHARE * PART * 2;
  auto copy_keys = [&](int start) {
    if constexpr (Sizes::WIDENED) {
      constexpr int KEY_BYTES = DK * static_cast<int>(sizeof(KV)), VALUE_BYTES = DV * static_cast<int>(sizeof(KV));
      copy_rows<KEYS, KEY_BYTES, KEY_BYTES, THREADS>(p, sequence, kv_head, p.keys, tiles + Sizes::KEY_CODES, start, low,
                                                     end);
      copy_rows<KEYS, VALUE_BYTES, VALUE_BYTES, THREADS>(p, sequence, kv_head, p.values, tiles + Sizes::VALUE_CODES,
                                                         start, low, end);
      if constexpr (SCALED<KV>) {
        unsigned char* scales = tiles + Sizes::SCALES;
        copy_scales<KEYS, THREADS>(p, sequence, kv_head, p.key_scales, scales, start, low, end);
        copy_scales<KEYS, THREADS>(p, sequence, kv_head, p.value_scales, scales + KEYS * 4, start, low, end);
      }
    } else {
      copy_rows<KEYS, DK * 2, Sizes::KEY_ROW, THREADS>(p, sequence, kv_head, p.keys, tiles, start, low, end);
    }
    cp_commit();
  };
  int start = low / KEYS * KEYS;
  copy_keys(start);
  seen.clear();
  for (; start < end; start += KEYS) {
    int next = start + KEYS;
    float scores[KEYS / 8][4];
    cp_wait<0>();
    tile_barrier<THREADS>();  // keys, or codes of both, have arrived; nobody reads the tile of before
    if constexpr (Sizes::WIDENED) {
      const unsigned char* scales = tiles + Sizes::SCALES;
      widen<T, KV, KEYS, DK, THREADS>(tiles, tiles + Sizes::KEY_CODES, scales, start, low, end);
      report(widen<T, KV, KEYS, DV, THREADS>(values, tiles + Sizes::VALUE_CODES, scales + KEYS * 4, start, low, end),
             flags);
    } else {
      copy_rows<KEYS, DV * 2, Sizes::VALUE_ROW, THREADS>(p, sequence, kv_head, p.values, values, start, low, end);
      cp_commit();
      multiply_keys<T, DK, KEYS>(queries, tiles, scores);
    }
    tile_barrier<THREADS>();  // keys or codes may be overwritten
    if (next < end) copy_keys(next);
    if constexpr (Sizes::WIDENED) multiply_keys<T, DK, KEYS>(queries, tiles, scores);
    make_logits<KEYS, BIASED>(p, sequence, rows, start, scores);
    make_weights<KEYS>(scores, seen);
    if constexpr (!Sizes::WIDENED) {
      if (next < end) {
        cp_wait<1>();
      } else {
        cp_wait<0>();
      }
      report(look_at_rows<T, KEYS, DV, THREADS>(values), flags);
      tile_barrier<THREADS>();  // values have arrived
    }
    if (any_odd<THREADS>(flags)) {
      add_odd_values<T, KEYS, DV, PART>(own_values, scores, seen);
      tile_barrier<THREADS>();  // all have seen them
      clear_odd_values<T, KEYS, DV, THREADS>(values);
      tile_barrier<THREADS>();  // all are zeros
    }
    add_values<T, KEYS, DV, PART>(own_values, scores, seen);
    int unit = unit_of(start);
    if (next >= end || unit_of(next) != unit) at_unit(unit, next >= end);
  }
}
