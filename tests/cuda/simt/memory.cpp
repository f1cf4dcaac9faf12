// What kernels may not do with memory: step over bounds, write what is read-only, read what nobody has written, race.
// The hooks of -fsanitize=thread bring every load and store here.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>

#include "runtime.h"

namespace simt {

static std::mutex mutex;
static std::vector<std::string> reports;
static std::map<std::string, int> report_counts;
static std::vector<Region> regions;

constexpr int kReportsOfAKind = 8;
constexpr uint64_t kSpin = 20'000'000;  // accesses of a thread that waits for nobody

void report(const char* kind, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::lock_guard guard(mutex);
  worker->launch->failed = true;
  if (++report_counts[kind] > kReportsOfAKind) return;
  Index block = worker->block_index;
  char head[200];
  snprintf(head, sizeof head, "[%s] %s, block (%u,%u,%u) thread %d: ", kind, worker->launch->kernel->name, block.x,
           block.y, block.z, worker->fiber ? worker->fiber->linear : -1);
  reports.push_back(std::string(head) + text);
}

// " at FILE+0xOFFSET", which emulator.py turns into a line of the source.
static std::string at(const void* pc) {
  Dl_info info;
  if (!pc || !dladdr(pc, &info)) return "";
  char text[512];
  auto offset = static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase);
  snprintf(text, sizeof text, " at %s+0x%tx", info.dli_fname, offset - 1);
  return text;
}

static Access access_of(const Worker& w) {
  const Fiber& f = *w.fiber;
  return {w.where(), w.epoch, w.warps[f.warp].epoch, static_cast<uint16_t>(f.linear), static_cast<uint16_t>(f.warp)};
}

// Whether the warp of `now` has waited for the end of a phase (hopper.cpp) that says that `past` has happened.
static bool known_from_barriers(const Access& past, const Access& now) {
  const Clock& clock = worker->warps[now.warp].clock;
  size_t entry = past.warp == kBulk ? past.thread : past.warp;
  return entry < clock.size() && clock[entry] > past.warp_epoch;
}

// Whether nothing orders `past` before `now`, both of this block: no barrier between them, nor one of their warp.
static bool unordered(const Access& past, const Access& now) {
  if (past.warp == kBulk) return !known_from_barriers(past, now);
  if (past.epoch != now.epoch || past.thread == now.thread) return false;
  if (past.warp != now.warp && known_from_barriers(past, now)) return false;
  return past.warp != now.warp || past.warp_epoch >= now.warp_epoch;
}

// A read that comes after the ones before by a barrier stands for them: what comes after it comes after all.
static void note_read(Access& read, const Access& now) {
  if (read.where == now.where && unordered(read, now)) {
    read.thread = kMany;
    if (read.warp != now.warp) read.warp = kMany;
    read.warp_epoch = now.warp_epoch;
  } else {
    read = now;
  }
}

static void note(Shadow& s, const Access& now, bool write, bool atomic) {
  if (!write) return note_read(s.read, now);
  s.write = now;
  s.atomic = atomic;
  s.known = true;
}

static void shared_access(size_t offset, int bytes, bool write, bool atomic, const void* pc) {
  Worker& w = *worker;
  Access now = access_of(w);
  for (int i = 0; i < bytes; ++i) {
    Shadow& s = w.shadow[offset + i];
    const char* verb = write ? "write" : "read";
    bool ours = s.write.where == now.where;
    if (!ours) s.in_flight = false, s.readers = 0;  // of a block that ended early
    if (write && s.readers) {
      return report("wgmma", "write of shared[%zu], which a product in flight reads%s", offset + i, at(pc).c_str());
    }
    if (s.in_flight) {
      return report("cp.async", "%s of shared[%zu] while a cp.async to it is in flight%s", verb, offset + i,
                    at(pc).c_str());
    }
    if (!write && !ours) {
      report("uninitialised", "read of shared[%zu] (%d bytes), which nobody has written%s", offset + i, bytes,
             at(pc).c_str());
      s.write = now;
      return;
    }
    if (ours && unordered(s.write, now) && !(atomic && s.atomic)) {
      return report("race", "%s of shared[%zu], unordered with a write by thread %d%s", verb, offset + i,
                    s.write.thread, at(pc).c_str());
    }
    if (write && s.read.where == now.where && unordered(s.read, now) && !(atomic && s.atomic)) {
      return report("race", "write of shared[%zu], unordered with a read by thread %d%s", offset + i,
                    s.read.thread == kMany ? -1 : s.read.thread, at(pc).c_str());
    }
    note(s, now, write, atomic);
  }
}

// Whether `past` of the same launch is unordered with `now`; blocks are, always.
static bool conflicts(const Access& past, const Access& now, bool strict_blocks) {
  if (past.where >> 24 != now.where >> 24) return false;
  return past.where != now.where ? strict_blocks : unordered(past, now);
}

static void global_access(Region& r, uintptr_t address, int bytes, bool write, bool atomic, const void* pc) {
  if (write && !r.writable) {
    return report("bounds", "write of %d bytes to read-only '%s'+%zu%s", bytes, r.name.c_str(), address - r.low,
                  at(pc).c_str());
  }
  if (!r.shadow) return;
  Worker& w = *worker;
  Access now = access_of(w);
  bool strict = w.launch->options.strict_blocks != 0;
  for (int i = 0; i < bytes; ++i) {
    size_t offset = address - r.low + i;
    Shadow& s = r.shadow[offset];
    const char* verb = write ? "write" : "read";
    if (!write && r.needs_values && !s.known) {
      s.known = true;
      return report("uninitialised", "read of '%s'+%zu, which nobody has written%s", r.name.c_str(), offset,
                    at(pc).c_str());
    }
    bool exempt = atomic && s.atomic;
    if (!exempt && conflicts(s.write, now, strict)) {
      return report("race", "%s of '%s'+%zu, unordered with a write by block %u thread %d%s", verb, r.name.c_str(),
                    offset, static_cast<unsigned>(s.write.where & 0xffffff), s.write.thread, at(pc).c_str());
    }
    if (write && !exempt && conflicts(s.read, now, strict)) {
      return report("race", "write of '%s'+%zu, unordered with a read by block %u%s", r.name.c_str(), offset,
                    static_cast<unsigned>(s.read.where & 0xffffff), at(pc).c_str());
    }
    note(s, now, write, atomic);
  }
}

static Region* find_region(uintptr_t address) {
  for (Region& r : regions) {
    if (address >= r.low && address < r.high) return &r;
  }
  return nullptr;
}

static std::string nearest(uintptr_t address) {
  const uintptr_t near = 4096;
  for (const Region& r : regions) {
    if (address + near >= r.low && address < r.high + near) return " (near '" + r.name + "')";
  }
  return "";
}

static void check_shared(const char* p, int bytes, bool write, bool atomic, const void* pc) {
  Worker& w = *worker;
  auto* shared = reinterpret_cast<char*>(w.shared);
  if (p < shared || p + bytes > shared + w.launch->shared) {
    report("bounds", "%s of %d bytes at shared[%td], outside of the %zu bytes of this launch%s",
           write ? "write" : "read", bytes, p - shared, w.launch->shared, at(pc).c_str());
    kill_block();
  }
  shared_access(static_cast<size_t>(p - shared), bytes, write, atomic, pc);
}

void access(const void* p, int bytes, bool write, bool atomic, const void* pc, int alignment) {
  Worker* w = worker;
  if (!w || !w->fiber || !w->launch->options.check) return;
  if (++w->counters[kAccesses] - w->accesses_at_resume > kSpin) {
    report("livelock", "%llu accesses without a synchronisation: a wait for another thread?%s",
           static_cast<unsigned long long>(kSpin), at(pc).c_str());
    kill_block();
  }
  auto address = reinterpret_cast<uintptr_t>(p);
  auto stack = reinterpret_cast<uintptr_t>(w->stacks) + static_cast<size_t>(w->fiber->linear) * kStackBytes;
  if (address >= stack && address < stack + kStackBytes) return;
  if (alignment && address % static_cast<uintptr_t>(alignment)) {
    report("alignment", "misaligned %s of %d bytes at an address that ends in 0x%zx%s", write ? "write" : "read", bytes,
           address & 0xff, at(pc).c_str());
    kill_block();
  }
  auto arena = reinterpret_cast<uintptr_t>(w->arena.data());
  if (address >= arena && address < arena + w->arena.size()) {
    return check_shared(static_cast<const char*>(p), bytes, write, atomic, pc);
  }
  Region* r = w->last;
  if (!r || address < r->low || address + bytes > r->high) r = find_region(address);
  if (!r || address + bytes > r->high) {
    report("bounds", "%s of %d bytes outside of every buffer%s%s", write ? "write" : "read", bytes,
           nearest(address).c_str(), at(pc).c_str());
    kill_block();
  }
  w->last = r;
  global_access(*r, address, bytes, write, atomic, pc);
}

// What a product reads: it has arrived, and the warp has waited for it.
void check_operand(const void* p, int bytes, Place place) {
  Worker& w = *worker;
  Access now = access_of(w);
  size_t offset = static_cast<size_t>(static_cast<const unsigned char*>(p) - w.shared);
  for (int i = 0; i < bytes; ++i) {
    const Shadow& s = w.shadow[offset + i];
    bool ours = s.write.where == now.where;
    if (ours && !s.in_flight && !unordered(s.write, now)) continue;
    return report("wgmma", "a product reads shared[%zu], which %s, %s:%u", offset + i,
                  !ours         ? "nobody has written"
                  : s.in_flight ? "a copy is still to write"
                                : "the warp has not waited for",
                  place.file_name(), place.line());
  }
}

void check_vector(const void* p, int bytes, bool write, Place place) {
  if (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0) return;
  report("alignment", "misaligned %s of %d bytes at %s:%u", write ? "store" : "load", bytes, place.file_name(),
         place.line());
  kill_block();
}

void check_atomic(const void* p, int bytes) { access(p, bytes, true, true, __builtin_return_address(0), bytes); }

void mark_in_flight(const void* p, int bytes, bool on) {
  size_t offset = static_cast<const unsigned char*>(p) - worker->shared;
  for (int i = 0; i < bytes; ++i) worker->shadow[offset + i].in_flight = on;
}

void add_region(void* p, size_t bytes, bool writable, bool needs_values, const char* name, bool track) {
  auto low = reinterpret_cast<uintptr_t>(p);
  // Zeros that take no memory until they are touched.
  void* shadow = nullptr;
  if (track && bytes) {
    shadow = mmap(nullptr, bytes * sizeof(Shadow), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                  -1, 0);
  }
  regions.push_back({low, low + bytes, writable, needs_values, name, static_cast<Shadow*>(shadow)});
}

void remove_region(const void* p) {
  for (size_t i = 0; i < regions.size(); ++i) {
    if (regions[i].low != reinterpret_cast<uintptr_t>(p)) continue;
    if (regions[i].shadow) munmap(regions[i].shadow, (regions[i].high - regions[i].low) * sizeof(Shadow));
    regions.erase(regions.begin() + static_cast<std::ptrdiff_t>(i));
    return;
  }
}

void set_known(const void* p, size_t bytes) {
  auto address = reinterpret_cast<uintptr_t>(p);
  Region* r = find_region(address);
  if (!r || !r->shadow) return;
  for (size_t i = 0; i < bytes; ++i) r->shadow[address - r->low + i].known = true;
}

}  // namespace simt

extern "C" {

// The reports since the last call, one a line.
void simt_take_reports(char* text, size_t size) {
  std::string all;
  for (const auto& line : simt::reports) all += line + "\n";
  for (const auto& [kind, count] : simt::report_counts) {
    if (count > simt::kReportsOfAKind) all += std::to_string(count) + " reports of kind " + kind + " in all\n";
  }
  snprintf(text, size, "%s", all.c_str());
  simt::reports.clear();
  simt::report_counts.clear();
}

#define SIMT_PC __builtin_return_address(0)
#define SIMT_HOOK(kind, bytes, alignment)                                                                \
  void __tsan_##kind##read##bytes(void* p) { simt::access(p, bytes, false, false, SIMT_PC, alignment); } \
  void __tsan_##kind##write##bytes(void* p) { simt::access(p, bytes, true, false, SIMT_PC, alignment); }
#define SIMT_HOOKS(bytes)            \
  SIMT_HOOK(, bytes, bytes)          \
  SIMT_HOOK(volatile_, bytes, bytes) \
  SIMT_HOOK(unaligned_, bytes, 0)
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
void __tsan_read_range(void* p, size_t n) { simt::access(p, static_cast<int>(n), false, false, SIMT_PC, 0); }
void __tsan_write_range(void* p, size_t n) { simt::access(p, static_cast<int>(n), true, false, SIMT_PC, 0); }
void __tsan_init() {}

// Of -fsanitize=bounds: an index of an array that is no memory of the device, but registers of a thread.
struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
void __ubsan_handle_out_of_bounds(const SourcePlace* place, uintptr_t index) {
  simt::report("bounds", "index %ld of an array at %s:%u", static_cast<long>(index), place->file, place->line);
  simt::kill_block();
}
}
