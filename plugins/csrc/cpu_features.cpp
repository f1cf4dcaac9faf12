#include "cpu_features.h"

#include <set>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace llmc {
namespace {

// Ascending on either machine; each level has all instructions of those before it, but avx512, which has every op,
// does not have those of avxvnni.
constexpr const char* kLevels[] = {"scalar",     "avx2", "avxvnni", "avx512",  "avx512vnni",
                                   "avx512bf16", "amx",  "neon",    "dotprod", "i8mm"};

// AMX: tile, bf16 and int8 instructions in cpuid, tile state enabled by the system (xgetbv bits 17 and 18), and granted
// to this process, which has to ask once before it makes threads.
bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 0b1101) != 0b1101) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool runs_here(const std::string& level) {
  if (level == "scalar") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (level == "avx2") return avx2;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (level == "avxvnni") return avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1) != 0;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (level == "avx512") return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (level == "avx512vnni") return vnni;
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (level == "avx512bf16") return bf16;
  if (level == "amx") return bf16 && __builtin_cpu_supports("avx512vbmi") && has_amx();
#elif defined(__aarch64__)
  if (level == "neon") return true;
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20, kInt8Matrices = 1ul << 13, kBf16 = 1ul << 14;  // HWCAP_ASIMDDP ..
  const bool dotprod = (getauxval(AT_HWCAP) & kDotProducts) != 0;
  if (level == "dotprod") return dotprod;
  if (level == "i8mm") return dotprod && (~getauxval(AT_HWCAP2) & (kInt8Matrices | kBf16)) == 0;
#endif
#endif
  return false;
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

const std::vector<std::string>& supported_isas() {
  static const std::vector<std::string> levels = [] {
    std::vector<std::string> found;
    for (const char* level : kLevels) {
      if (kernel_table().contains(level) && runs_here(level)) found.push_back(level);
    }
    return found;
  }();
  return levels;
}

std::unique_ptr<Kernel> make_kernel(const std::string& op, const std::string& isa, const Attributes& attributes) {
  const auto& levels = supported_isas();
  auto level = std::find(levels.rbegin(), levels.rend(), isa);
  if (level == levels.rend()) {
    fail("instruction set '" + isa + "' is not available here; choose one of " + join(levels));
  }
  for (; level != levels.rend(); ++level) {
    const auto& ops = kernel_table().at(*level);
    const auto found = ops.find(op);
    if (found == ops.end()) continue;
    auto kernel = found->second(attributes);
    const auto unread = attributes.unread();
    if (!unread.empty()) fail("unknown attributes: " + join(unread));
    return kernel;
  }
  fail("there is no such op; known: " + join(known_ops()));
}

std::vector<std::string> known_ops() {
  std::set<std::string> names;
  for (const auto& [level, ops] : kernel_table()) {
    for (const auto& [op, maker] : ops) names.insert(op);
  }
  return {names.begin(), names.end()};
}

}  // namespace llmc
