// Logits to tokens, as runtime/sampling.py means it; see plugins/cuda_sampling.py.
//
// Probabilities relative to the largest are added up as integers, in units of 2**-40: sums are exact, so that the
// order of threads can't matter, and small probabilities are not lost beside large ones.
// The params are templates: a kernel knows its own ones only.
#pragma once

constexpr int SAMPLE_THREADS = 512, SAMPLE_WARPS = SAMPLE_THREADS / 32;

// Integers in the order of floats; -0 is 0, and NaN, of either sign, is above all as for numpy's argmax.
DEV uint32_t key_of(float x) {
  if (x != x) return 0xffffffffu;
  uint32_t bits = float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEV uint64_t max_of(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The largest number in the high half, in the low one that of its first place, counted from the end.
template <class V>
DEV uint64_t find_highest(const V* row, int count, uint64_t* shared) {
  uint64_t best = 0;
  for (int i = threadIdx.x; i < count; i += SAMPLE_THREADS) {
    best = max_of(best, static_cast<uint64_t>(key_of(row[i])) << 32 | (0xffffffffu - static_cast<uint32_t>(i)));
  }
  UNROLL for (int offset = 16; offset > 0; offset /= 2) best = max_of(best, __shfl_xor_sync(FULL_WARP, best, offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  UNROLL for (int i = 0; i < SAMPLE_WARPS; ++i) best = max_of(best, shared[i]);
  __syncthreads();
  return best;
}

// A row's scores over the temperature, relative to the largest.
struct Scaled {
  const float* row;
  int count;
  float highest, temperature;

  DEV float at(int i) const { return (row[i] - highest) / temperature; }
  DEV static float probability(float x) { return exp2_(x * 1.44269504f); }
  DEV static uint64_t weight(float x) { return static_cast<uint64_t>(probability(x) * 1099511627776.0f); }
};

// Those that are left: above the lowest key, and of it the first ones, `ties` many.
struct Left {
  uint32_t lowest;
  uint32_t ties;
};

// The key at which the numbers from the largest down, each by its worth, come to `wanted`, and what is above it.
// By weight: of those that are `left` so far. By count: of all.
template <bool WEIGHT>
DEV uint32_t select(const Scaled& scores, Left left, uint64_t wanted, uint64_t tie_worth, uint64_t* bins,
                    uint64_t& above) {
  uint32_t prefix = 0;
  above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += SAMPLE_THREADS) bins[i] = 0;
    __syncthreads();
    uint32_t known = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
    for (int i = threadIdx.x; i < scores.count; i += SAMPLE_THREADS) {
      float x = scores.at(i);
      uint32_t key = key_of(x);
      if ((key & known) != prefix || (WEIGHT && key <= left.lowest)) continue;
      atomicAdd(reinterpret_cast<unsigned long long*>(bins + (key >> shift & 255u)),
                static_cast<unsigned long long>(WEIGHT ? Scaled::weight(x) : 1));
    }
    __syncthreads();
    if (WEIGHT && threadIdx.x == 0 && (left.lowest & known) == prefix) bins[left.lowest >> shift & 255u] += tie_worth;
    __syncthreads();
    int digit = 255;  // everyone looks for it
    while (digit > 0 && above + bins[digit] < wanted) above += bins[digit--];
    prefix |= static_cast<uint32_t>(digit) << shift;
    __syncthreads();
  }
  return prefix;
}

// Sum over a block, of integers.
DEV uint64_t block_total(uint64_t v, uint64_t* shared) {
  UNROLL for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL_WARP, v, offset);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  UNROLL for (int i = 0; i < SAMPLE_WARPS; ++i) v += shared[i];
  __syncthreads();
  return v;
}

DEV uint64_t weight_of_key(uint32_t key) {
  return Scaled::weight(uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key));
}

// The smallest integer that is not less than a share of a total.
DEV uint64_t share_of(double share, uint64_t total) {
  double exact = share * static_cast<double>(total);
  uint64_t whole = static_cast<uint64_t>(exact);
  return static_cast<double>(whole) < exact ? whole + 1 : whole;
}

// The token at which the cumulative weight, in the order of ids, exceeds the draw. Each warp has a part of the ids.
template <class Params>
DEV void draw_token(const Params& p, const Scaled& scores, Left left, uint64_t* shared, int row) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int part = (scores.count + SAMPLE_THREADS - 1) / SAMPLE_THREADS * 32;
  int begin = min(warp * part, scores.count), end = min(begin + part, scores.count);
  float least = static_cast<const float*>(p.min_p)[row];
  uint64_t tie = weight_of_key(left.lowest), above = 0, ties = 0;
  float tie_score = uint_as_float(left.lowest & 0x80000000u ? left.lowest & 0x7fffffffu : ~left.lowest);
  if (Scaled::probability(tie_score) < least) tie = 0;
  auto worth = [&](float x) { return Scaled::probability(x) < least ? 0 : Scaled::weight(x); };
  for (int i = begin + lane; i < end; i += 32) {
    float x = scores.at(i);
    uint32_t key = key_of(x);
    if (key > left.lowest) above += worth(x);
    if (key == left.lowest) ++ties;
  }
  UNROLL for (int offset = 16; offset > 0; offset /= 2) {
    above += __shfl_xor_sync(FULL_WARP, above, offset);
    ties += __shfl_xor_sync(FULL_WARP, ties, offset);
  }
  if (lane == 0) {
    shared[warp] = above;
    shared[SAMPLE_WARPS + warp] = ties;
  }
  __syncthreads();
  uint64_t total = 0, ties_left = left.ties, before[SAMPLE_WARPS], ties_of[SAMPLE_WARPS];
  UNROLL for (int i = 0; i < SAMPLE_WARPS; ++i) {
    uint64_t counted = min(ties_left, shared[SAMPLE_WARPS + i]);
    before[i] = total;
    ties_of[i] = ties_left;
    total += shared[i] + counted * tie;
    ties_left -= counted;
  }
  uint64_t target = static_cast<uint64_t>(static_cast<const double*>(p.draws)[row] * static_cast<double>(total));
  if (target >= total) target = total - 1;  // the product was rounded up
  uint64_t sum = 0, mine = 0, next = total;
  UNROLL for (int i = 0; i < SAMPLE_WARPS; ++i) {
    if (i == warp) {
      sum = before[i];
      mine = ties_of[i];
      next = i + 1 < SAMPLE_WARPS ? before[i + 1] : total;
    }
  }
  if (target < sum || target >= next) return;
  for (int base = begin; base < end; base += 32) {
    bool exists = base + lane < end;
    float x = exists ? scores.at(base + lane) : 0.0f;
    uint32_t key = key_of(x), tied = __ballot_sync(FULL_WARP, exists && key == left.lowest);
    uint32_t rank = __popc(tied & ((1u << lane) - 1));
    uint64_t own = 0;
    if (exists && key > left.lowest) own = worth(x);
    if (exists && key == left.lowest && rank < mine) own = tie;
    uint64_t upto = own;
    UNROLL for (int offset = 1; offset < 32; offset *= 2) {
      uint64_t less = __shfl_up_sync(FULL_WARP, upto, offset);
      if (lane >= offset) upto += less;
    }
    uint32_t beyond = __ballot_sync(FULL_WARP, sum + upto > target);
    if (beyond != 0) {
      int token = base + __popc((beyond & (0u - beyond)) - 1);
      if (lane == 0) {
        static_cast<int32_t*>(p.tokens)[row] = token;
        static_cast<float*>(p.scores)[row] = scores.row[token];
      }
      return;
    }
    sum += __shfl_sync(FULL_WARP, upto, 31);
    mine -= min(mine, static_cast<uint64_t>(__popc(tied)));
  }
}

// A block for each row.
template <class Params>
DEV void sample_rows(const Params& p) {
  DYN_SMEM(memory);
  uint64_t* shared = reinterpret_cast<uint64_t*>(memory);
  int row = blockIdx.x;
  const float* logits = static_cast<const float*>(p.logits) + row * p.stride;
  uint64_t best = find_highest(logits, p.count, shared);
  int first = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
  float highest = logits[first], temperature = static_cast<const float*>(p.temperature)[row];
  if (temperature == 0.0f || highest - highest != 0.0f) {
    if (threadIdx.x == 0) {
      static_cast<int32_t*>(p.tokens)[row] = first;
      static_cast<float*>(p.scores)[row] = highest;
    }
    return;
  }
  Scaled scores{logits, p.count, highest, max(temperature, 1e-30f)};
  Left left{0x007fffffu, 0};  // above -inf
  int top_k = static_cast<const int32_t*>(p.top_k)[row];
  float top_p = static_cast<const float*>(p.top_p)[row];
  uint64_t above;
  if (top_k > 0 && top_k < p.count) {
    left.lowest = select<false>(scores, left, top_k, 0, shared, above);
    left.ties = top_k - static_cast<uint32_t>(above);
  }
  if (top_p < 1.0f) {
    uint64_t tie = left.ties * weight_of_key(left.lowest), sum = 0;
    for (int i = threadIdx.x; i < p.count; i += SAMPLE_THREADS) {
      float x = scores.at(i);
      if (key_of(x) > left.lowest) sum += Scaled::weight(x);
    }
    uint64_t wanted = max_of(1, share_of(static_cast<double>(top_p), block_total(sum, shared) + tie));
    uint32_t lowest = select<true>(scores, left, wanted, tie, shared, above);
    uint64_t each = max_of(1, weight_of_key(lowest)), ties = (wanted - above + each - 1) / each;
    left.ties = static_cast<uint32_t>(lowest == left.lowest ? min(static_cast<uint64_t>(left.ties), ties) : ties);
    left.lowest = lowest;
  }
  draw_token(p, scores, left, shared, row);
}

// Penalties, biases and masks, in place: entries of a row first, then its mask, which hides no fault of the model.
// A block for each row.
template <class Params>
DEV void adjust_rows(const Params& p) {
  int row = blockIdx.x;
  float* logits = static_cast<float*>(p.logits) + row * p.stride;
  const int32_t* bounds = static_cast<const int32_t*>(p.bounds);
  for (int i = bounds[row] + threadIdx.x; i < bounds[row + 1]; i += SAMPLE_THREADS) {
    float* place = logits + static_cast<const int32_t*>(p.ids)[i];
    float x = *place, factor = static_cast<const float*>(p.factors)[i];
    if (factor != 1.0f && x - x == 0.0f) {
      x = x > 0.0f ? x / factor : x * factor;
      x = min(max(x, -3.40282347e38f), 3.40282347e38f);
    }
    x = static_cast<float>(static_cast<double>(x) - static_cast<const double*>(p.penalties)[i]);
    *place = x + static_cast<const float*>(p.biases)[i];
  }
  __syncthreads();
  int mask = static_cast<const int32_t*>(p.mask_of)[row];
  if (mask < 0) return;
  const uint32_t* words = static_cast<const uint32_t*>(p.masks) + static_cast<int64_t>(mask) * p.words;
  for (int i = threadIdx.x; i < p.count; i += SAMPLE_THREADS) {
    if (!(words[i / 32] >> i % 32 & 1u) && logits[i] - logits[i] == 0.0f) logits[i] = NEG_INF;
  }
}
