#include "logits.h"

#include <algorithm>
#include <bit>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // the rest of the core is compiled for size
#endif

namespace llmc {
namespace {

constexpr std::int64_t kBlock = 1024;
constexpr float kLeastExponent = -87.0f;  // exp of less is taken for 0

struct Weighting {
  float highest, temperature, least;
};

// exp(x) for x <= 0, within 2 units of the last place.
inline __attribute__((always_inline)) float exp_of(float x) {
  const float clamped = x > kLeastExponent ? x : kLeastExponent;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
  const float shifted = clamped * 1.44269504f + kRound, n = shifted - kRound;
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const std::int32_t exponent = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound);
  return x > kLeastExponent ? p * std::bit_cast<float>((exponent + 127) << 23) : 0.0f;
}

inline __attribute__((always_inline)) void fill(const float* scores, std::int64_t count, const Weighting& by,
                                                float* weights) {
  const float highest = by.highest, temperature = by.temperature, least = by.least;
  for (std::int64_t i = 0; i < count; ++i) {
    const float weight = exp_of((scores[i] - highest) / temperature);
    weights[i] = weight < least ? 0.0f : weight;
  }
}

// The same lines for several instruction sets. Multiplications and additions are not fused, so the bits are the same.
void fill_plain(const float* scores, std::int64_t count, const Weighting& by, float* weights) {
  fill(scores, count, by, weights);
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) void fill_avx2(const float* scores, std::int64_t count, const Weighting& by,
                                               float* weights) {
  fill(scores, count, by, weights);
}
__attribute__((target("avx512f"))) void fill_avx512(const float* scores, std::int64_t count, const Weighting& by,
                                                    float* weights) {
  fill(scores, count, by, weights);
}
#endif

// A whole number for each, in the same order; equal ones, such as 0 and -0, have the same.
inline __attribute__((always_inline)) std::int32_t key_of(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x + 0.0f);
  const std::int32_t magnitude = bits & 0x7fffffff, key = bits < 0 ? -magnitude : magnitude;
  return magnitude > 0x7f800000 ? 0x7fffffff : key;
}

inline __attribute__((always_inline)) std::int32_t most(const float* scores, std::int64_t count) {
  std::int32_t key = key_of(scores[0]);
  for (std::int64_t i = 1; i < count; ++i) key = std::max(key, key_of(scores[i]));
  return key;
}
std::int32_t most_plain(const float* scores, std::int64_t count) { return most(scores, count); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) std::int32_t most_avx2(const float* scores, std::int64_t count) {
  return most(scores, count);
}
__attribute__((target("avx512f"))) std::int32_t most_avx512(const float* scores, std::int64_t count) {
  return most(scores, count);
}
#endif

auto* best_most() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return &most_avx512;
  if (__builtin_cpu_supports("avx2")) return &most_avx2;
#endif
  return &most_plain;
}

auto* best_fill() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return &fill_avx512;
  if (__builtin_cpu_supports("avx2")) return &fill_avx2;
#endif
  return &fill_plain;
}

// Halves are added to halves.
double sum_of(float* weights) {
  for (std::int64_t half = kBlock / 2; half > 0; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) weights[i] += weights[i + half];
  }
  return static_cast<double>(weights[0]);
}

}  // namespace

std::int64_t draw_token(const float* scores, std::int64_t count, float highest, float temperature, float least,
                        double draw) {
  const Weighting by{highest, temperature, least};
  auto* const fill_in = best_fill();
  alignas(64) float weights[kBlock];
  std::vector<double> sums;
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t size = std::min(kBlock, count - begin);
    fill_in(scores + begin, size, by, weights);
    std::fill(weights + size, weights + kBlock, 0.0f);
    total += sums.emplace_back(sum_of(weights));
  }
  const double target = draw * total;
  double before = 0;
  std::size_t chosen = 0;
  for (std::size_t block = 0; block < sums.size(); ++block) {
    if (sums[block] == 0) continue;
    chosen = block;  // the last one that counts, if rounding leaves nothing for it
    if (before + sums[block] > target) break;
    before += block + 1 < sums.size() ? sums[block] : 0;
  }
  const std::int64_t begin = static_cast<std::int64_t>(chosen) * kBlock, size = std::min(kBlock, count - begin);
  fill_in(scores + begin, size, by, weights);
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    if (weights[i] == 0) continue;
    last = i;
    if ((before += static_cast<double>(weights[i])) > target) break;
  }
  return begin + last;
}

Largest largest(const float* scores, std::int64_t count) {
  auto* const most_of = best_most();
  std::int64_t place = 0;
  std::int32_t key = most_of(scores, std::min(kBlock, count));
  for (std::int64_t begin = kBlock; begin < count; begin += kBlock) {
    const std::int32_t other = most_of(scores + begin, std::min(kBlock, count - begin));
    if (other > key) key = other, place = begin;
  }
  while (key_of(scores[place]) != key) ++place;
  return {key, static_cast<std::int32_t>(place)};
}

}  // namespace llmc
