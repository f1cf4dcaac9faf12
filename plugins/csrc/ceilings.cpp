#include "ceilings.h"

#include <chrono>
#include <vector>

#include "cpu_features.h"
#include "memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // the rest of the core is compiled for size
#endif

namespace llmc {
namespace {

constexpr int kRounds = 7;                // the fastest counts
constexpr std::int64_t kLoops = 1 << 20;  // of a block of independent instructions, some milliseconds

// Keeps a result that nobody reads from being optimised away.
template <class T>
void keep(const T& value) {
  __asm__ volatile("" : : "m"(value) : "memory");
}

template <class F>
double fastest(WorkerPool& pool, F&& body) {
  double best = 1e30;
  const Awake awake(pool);
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    pool.on_all(body);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::min(best, seconds.count());
  }
  return best;
}

#if defined(__x86_64__)

// Only a sum of the sums is kept: the address of what is loaded could be theirs, so they would stay in memory.
__attribute__((target("avx512f"))) void read_avx512(const std::byte* data, std::size_t bytes) {
  __m512i sums[8] = {};
  for (std::size_t i = 0; i + 512 <= bytes; i += 512) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sums[j] = _mm512_add_epi64(sums[j], _mm512_load_si512(data + i + 64 * j));
  }
  for (int j = 1; j < 8; ++j) sums[0] = _mm512_add_epi64(sums[0], sums[j]);
  keep(__m512i{sums[0]});
}

__attribute__((target("avx2"))) void read_avx2(const std::byte* data, std::size_t bytes) {
  __m256i sums[8] = {};
  for (std::size_t i = 0; i + 256 <= bytes; i += 256) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      sums[j] = _mm256_add_epi64(sums[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i + 32 * j)));
    }
  }
  for (int j = 1; j < 8; ++j) sums[0] = _mm256_add_epi64(sums[0], sums[j]);
  keep(__m256i{sums[0]});
}

// 20 sums: more than latency times throughput of any processor, and they fit the registers of AVX-512.
__attribute__((target("avx512f"))) void fma_avx512(std::int64_t loops) {
  __m512 sums[20];
  for (int j = 0; j < 20; ++j) sums[j] = _mm512_set1_ps(static_cast<float>(j));  // equal ones would be computed once
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 20
    for (int j = 0; j < 20; ++j) sums[j] = _mm512_fmadd_ps(sums[j], a, b);
  }
  keep(sums);
}

__attribute__((target("avx2,fma"))) void fma_avx2(std::int64_t loops) {
  __m256 sums[12];
  for (int j = 0; j < 12; ++j) sums[j] = _mm256_set1_ps(static_cast<float>(j));  // equal ones would be computed once
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) sums[j] = _mm256_fmadd_ps(sums[j], a, b);
  }
  keep(sums);
}

__attribute__((target("avx512f,avx512bf16"))) void dot_bf16(std::int64_t loops) {
  __m512 sums[20];
  for (int j = 0; j < 20; ++j) sums[j] = _mm512_set1_ps(static_cast<float>(j));  // equal ones would be computed once
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3e80);
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 20
    for (int j = 0; j < 20; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], a, b);
  }
  keep(sums);
}

// Ints, not __m512i: GCC copies sums that change between the two types, and keeps the copies in memory.
typedef std::int32_t ints __attribute__((vector_size(64)));

__attribute__((target("avx512f,avx512vnni"))) void dot_int8(std::int64_t loops) {
  ints sums[20];
#pragma GCC unroll 20
  for (int j = 0; j < 20; ++j) sums[j] = (ints)_mm512_set1_epi32(j);  // equal ones would be computed once
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 20
    for (int j = 0; j < 20; ++j) sums[j] = (ints)_mm512_dpbusd_epi32((__m512i)sums[j], a, b);
  }
  keep(sums);
}

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define LLMC_AMX_CEILING 1
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Four tiles of sums from two pairs of tiles, the usual shape of a matrix product.
#define LLMC_TILES(name, isa, multiply)                                        \
  __attribute__((target("amx-tile," isa))) void name(std::int64_t loops) {     \
    TileConfig config;                                                         \
    keep(config); /* all of it: the next line tells the compiler of 8 bytes */ \
    _tile_loadconfig(&config);                                                 \
    _tile_zero(0);                                                             \
    _tile_zero(1);                                                             \
    _tile_zero(2);                                                             \
    _tile_zero(3);                                                             \
    _tile_zero(4);                                                             \
    _tile_zero(5);                                                             \
    _tile_zero(6);                                                             \
    _tile_zero(7);                                                             \
    for (std::int64_t i = 0; i < loops; ++i) {                                 \
      multiply(0, 4, 6);                                                       \
      multiply(1, 4, 7);                                                       \
      multiply(2, 5, 6);                                                       \
      multiply(3, 5, 7);                                                       \
    }                                                                          \
    _tile_release();                                                           \
  }
LLMC_TILES(tiles_bf16, "amx-bf16", _tile_dpbf16ps)
LLMC_TILES(tiles_int8, "amx-int8", _tile_dpbusd)
#endif

#endif  // x86-64

void read_plain(const std::byte* data, std::size_t bytes) {
  std::uint64_t sums[8] = {};
  const auto* words = reinterpret_cast<const std::uint64_t*>(data);
  for (std::size_t i = 0; i + 8 <= bytes / 8; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  keep(sums);
}

// Four floats are a register of every processor.
typedef float floats __attribute__((vector_size(16)));

void fma_plain(std::int64_t loops) {
  floats sums[12];
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sums[j] = floats{} + static_cast<float>(j);
  const floats a = floats{} + 0.5f, b = floats{} + 0.25f;
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
#if defined(__aarch64__)
      sums[j] = (floats)vfmaq_f32((float32x4_t)b, (float32x4_t)sums[j], (float32x4_t)a);
#else
      sums[j] = sums[j] * a + b;
#endif
    }
  }
  keep(sums);
}

bool has(const std::string& level) {
  const auto& levels = supported_isas();
  return std::find(levels.begin(), levels.end(), level) != levels.end();
}

}  // namespace

std::map<std::string, double> measure_ceilings(WorkerPool& pool, std::size_t bytes) {
  std::map<std::string, double> results;
  const auto threads = static_cast<std::size_t>(pool.size());
  const std::size_t part = std::max<std::size_t>(4096, bytes / threads / 4096 * 4096);
  Pages pages(part * threads);
  auto* read = &read_plain;
  auto* fma = &fma_plain;
  double fma_operations = 2 * 4 * 12;
#if defined(__x86_64__)
  if (has("avx512")) {
    read = &read_avx512, fma = &fma_avx512, fma_operations = 2 * 16 * 20;
  } else if (has("avx2")) {
    read = &read_avx2, fma = &fma_avx2, fma_operations = 2 * 8 * 12;
  }
#endif
  const auto rate = [&](double operations, void (*body)(std::int64_t), std::int64_t loops) {
    const double seconds = fastest(pool, [&](int) { body(loops); });
    return operations * static_cast<double>(loops) * static_cast<double>(threads) / seconds / 1e9;
  };
  {
    const Awake awake(pool);
    pool.on_all([&](int thread) {  // the first touch decides where the memory is
      std::byte* mine = pages.data() + static_cast<std::size_t>(thread) * part;
      std::fill(mine, mine + part, std::byte{1});
    });
  }
  const double seconds =
      fastest(pool, [&](int thread) { read(pages.data() + static_cast<std::size_t>(thread) * part, part); });
  results["read_bandwidth"] = static_cast<double>(part * threads) / seconds / 1e9;
  results["fp32"] = rate(fma_operations, fma, kLoops);
#if defined(__x86_64__)
  if (has("avx512bf16")) results["bf16"] = rate(2 * 32 * 20, &dot_bf16, kLoops);
  if (has("avx512") && __builtin_cpu_supports("avx512vnni")) results["int8"] = rate(2 * 64 * 20, &dot_int8, kLoops);
#if defined(LLMC_AMX_CEILING)
  if (has("amx")) results["amx_bf16"] = rate(4 * 2.0 * 16 * 16 * 32, &tiles_bf16, kLoops / 4);
  if (has("amx")) results["amx_int8"] = rate(4 * 2.0 * 16 * 16 * 64, &tiles_int8, kLoops / 4);
#endif
#endif
  return results;
}

}  // namespace llmc
