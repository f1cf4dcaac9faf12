// What sm_90a does in the background: barriers that count bytes, bulk copies that arrive as late as they may, and
// products of warpgroups, which read shared memory and write registers only when they are waited for.
#define DEV inline
#include <algorithm>

#include "numbers.h"
#include "runtime.h"
#include "simt_hopper.h"

namespace simt {

uint32_t shared_offset(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - worker->shared);
}

// ---- barriers

static void wrong(const char* kind, const char* what, Place place) {
  report(kind, "%s, %s:%u", what, place.file_name(), place.line());
  kill_block();
}

static Mbarrier& barrier_at(void* bar, Place place) {
  access(bar, 8, false, false, __builtin_return_address(0), 8);
  auto found = worker->mbarriers.find(shared_offset(bar));
  if (found == worker->mbarriers.end()) wrong("mbarrier", "there is no barrier here", place);
  return found->second;
}

void mbar_init(void* bar, int count, Place place) {
  Worker& w = *worker;
  access(bar, 8, true, false, __builtin_return_address(0), 8);
  if (shared_offset(bar) % 8 || count < 1) wrong("mbarrier", "a barrier is misaligned, or nobody arrives", place);
  if (w.mbarriers.count(shared_offset(bar))) wrong("mbarrier", "a barrier is initialised twice", place);
  Mbarrier made;
  made.number = w.warps.size() + w.mbarriers.size();
  made.count = made.left = count;
  w.mbarriers[shared_offset(bar)] = made;
}

static void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

static void set(Clock& clock, size_t i, uint32_t value) {
  if (clock.size() <= i) clock.resize(i + 1);
  clock[i] = std::max(clock[i], value);
}

static void end_phase(Mbarrier& bar) {
  if (bar.left || bar.bytes) return;
  bar.left = bar.count;
  ++bar.phase;
  bar.ended = bar.arrived;
  set(bar.ended, bar.number, bar.phase);
  for (Fiber& f : worker->fibers) {
    if (f.state == State::at_mbarrier && f.mbarrier == &bar) make_ready(f);
  }
}

void mbar_arrive(void* bar, int bytes, Place place) {
  Mbarrier& to = barrier_at(bar, place);
  Warp& warp = worker->warps[worker->fiber->warp];
  join(to.arrived, warp.clock);
  set(to.arrived, worker->fiber->warp, warp.epoch);  // what the warp did before its last __syncwarp
  if (!to.left) wrong("mbarrier", "more arrivals than the barrier counts", place);
  --to.left;
  to.bytes += bytes;
  end_phase(to);
}

void mbar_wait(void* bar, int parity, Place place) {
  Worker& w = *worker;
  Mbarrier& on = barrier_at(bar, place);
  Fiber& self = *w.fiber;
  self.place = place;
  while (static_cast<int>(on.phase & 1) == parity) {
    self.state = State::at_mbarrier;
    self.mbarrier = &on;
    yield();
  }
  join(w.warps[self.warp].clock, on.ended);
}

// ---- copies

void bulk_copy(void* to, const void* from, int bytes, void* bar, Place place) {
  Worker& w = *worker;
  Mbarrier& counts = barrier_at(bar, place);
  auto* target = static_cast<unsigned char*>(to);
  if (target < w.shared || target + bytes > w.shared + w.launch->shared) {
    wrong("bounds", "a bulk copy ends outside of the shared memory of this launch", place);
  }
  if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
    wrong("alignment", "a misaligned bulk copy", place);
  }
  if (w.launch->options.check) {
    const void* pc = __builtin_return_address(0);
    access(to, bytes, true, false, pc, 0);
    access(from, bytes, false, false, pc, 0);
    mark_in_flight(to, bytes, true);
  } else {
    memset(to, 0xff, static_cast<size_t>(bytes));
  }
  ++w.counters[kCopies];
  w.bulk.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, &counts});
}

// One copy that is under way arrives; false: there is none.
bool land_copy() {
  Worker& w = *worker;
  if (w.bulk.empty()) return false;
  size_t which = w.launch->options.order == 0   ? 0
                 : w.launch->options.order == 1 ? w.bulk.size() - 1
                                                : w.next_random() % w.bulk.size();
  Bulk copy = w.bulk[which];
  w.bulk.erase(w.bulk.begin() + static_cast<std::ptrdiff_t>(which));
  memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  Mbarrier& bar = *copy.bar;
  for (int i = 0; i < copy.bytes && w.launch->options.check; ++i) {
    Shadow& s = w.shadow[shared_offset(copy.to) + i];
    s.in_flight = false;
    s.write = {w.where(), w.epoch, bar.phase, static_cast<uint16_t>(bar.number), kBulk};
  }
  bar.bytes -= copy.bytes;
  end_phase(bar);
  return true;
}

// ---- products

constexpr int kRegisters = 64;  // of a lane, at most

struct Wgmma {
  uint64_t operand;
  int columns;
  Product type;
  bool add;
  uint32_t a[kWarp][4], before[kWarp][kRegisters];
  const uint32_t* a_at[kWarp];
  uint32_t* c_at[kWarp];
};

// Where 16 bytes of row `row` of an operand begin: what the unit makes of a descriptor, addresses swizzled by 128
// bytes.
static uint32_t piece_at(uint64_t operand, int row, int piece) {
  uint32_t start = static_cast<uint32_t>(operand & 0x3fff) << 4;
  uint32_t stride = static_cast<uint32_t>(operand >> 32 & 0x3fff) << 4;
  uint32_t at = start + static_cast<uint32_t>(row / 8) * stride + static_cast<uint32_t>(row % 8) * 128 +
                static_cast<uint32_t>(piece) * 16;
  return at ^ (at >> 7 & 7) << 4;
}

// Reading begins (readers 1) or ends (-1) for all of b.
static void mark_readers(const Wgmma& one, int by, Place place) {
  Worker& w = *worker;
  for (int row = 0; row < one.columns; ++row) {
    for (int piece = 0; piece < 2; ++piece) {
      uint32_t at = piece_at(one.operand, row, piece);
      if (at + 16 > w.launch->shared) wrong("bounds", "a product reads outside of shared memory", place);
      if (!w.launch->options.check) continue;
      for (int i = 0; i < 16; ++i) w.shadow[at + i].readers += by;
      if (by > 0) check_operand(w.shared + at, 16, place);
    }
  }
}

static void start_product(Warp& warp, Fiber* const* lanes, Place place) {
  const Args& first = *lanes[0]->args;
  auto made = std::make_unique<Wgmma>();
  made->operand = first.value;
  made->columns = first.source >> 8;
  made->type = static_cast<Product>(first.source >> 1 & 3);
  made->add = first.source & 1;
  if (!warp.fenced) wrong("wgmma", "a product without a wgmma_fence before it", place);
  if (first.value >> 62 != 1) wrong("wgmma", "an operand that is not swizzled by 128 bytes", place);
  size_t size = static_cast<size_t>(made->columns / 2) * 4;
  for (int i = 0; i < kWarp; ++i) {
    const Args& args = *lanes[i]->args;
    if (args.value != first.value || args.source != first.source) wrong("wgmma", "lanes differ in an operand", place);
    made->a_at[i] = static_cast<const uint32_t*>(args.a);
    made->c_at[i] = static_cast<uint32_t*>(args.out);
    memcpy(made->a[i], args.a, 16);
    memcpy(made->before[i], args.out, size);
    memset(args.out, 0xff, size);  // no numbers, until the product is waited for
  }
  mark_readers(*made, 1, place);
  ++worker->counters[kMma];
  ++warp.products;
  warp.open.push_back(std::move(made));
}

template <class Raw, class Number, class Convert>
static void multiply_as(const Wgmma& one, Number (*c)[kRegisters], Convert convert) {
  constexpr int per = 4 / sizeof(Raw), K = 8 * per;
  std::vector<Number> a(16 * K), b(static_cast<size_t>(one.columns) * K);
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto* from = reinterpret_cast<const Raw*>(one.a[lane]);
    for (int j = 0; j < 4 * per; ++j) {
      int row = lane / 4 + j / per % 2 * 8, k = lane % 4 * per + j % per + j / per / 2 * (K / 2);
      a[row * K + k] = convert(from[j]);
    }
  }
  for (int row = 0; row < one.columns; ++row) {
    for (int k = 0; k < K; ++k) {
      uint32_t at = piece_at(one.operand, row, k / (K / 2));
      b[row * K + k] = convert(reinterpret_cast<const Raw*>(worker->shared + at)[k % (K / 2)]);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < one.columns / 2; ++i) {
      int row = lane / 4 + (i >> 1 & 1) * 8, column = (i >> 2) * 8 + lane % 4 * 2 + (i & 1);
      for (int k = 0; k < K; ++k) c[lane][i] += a[row * K + k] * b[column * K + k];
    }
  }
}

template <class Number>
static void finish(const Wgmma& one, bool chained) {
  Number c[kWarp][kRegisters];
  size_t size = static_cast<size_t>(one.columns / 2) * 4;
  for (int i = 0; i < kWarp; ++i) {
    // In a chain the sums stand where the product before has left them.
    memcpy(c[i], chained ? reinterpret_cast<const uint32_t*>(one.c_at[i]) : one.before[i], size);
    if (!one.add) memset(c[i], 0, size);
  }
  switch (one.type) {
    case Product::bf16:
      multiply_as<uint16_t>(one, c, [](uint16_t x) { return static_cast<Number>(bf16_to_float(x)); });
      break;
    case Product::f16:
      multiply_as<uint16_t>(one, c, [](uint16_t x) { return static_cast<Number>(f16_to_float(x)); });
      break;
    case Product::e4m3:
      multiply_as<uint8_t>(one, c, [](uint8_t x) { return static_cast<Number>(e4m3_to_float(x)); });
      break;
    case Product::s8:
      multiply_as<int8_t>(one, c, [](int8_t x) { return static_cast<Number>(x); });
      break;
  }
  for (int i = 0; i < kWarp; ++i) memcpy(one.c_at[i], c[i], size);
}

static void finish_products(Warp& warp, Place place) {
  if (!warp.open.empty()) wrong("wgmma", "products are waited for that no group holds", place);
  for (size_t n = 0; n < warp.committed.size(); ++n) {
    const Wgmma& one = *warp.committed[n];
    bool chained = false;
    for (size_t earlier = 0; earlier < n; ++earlier) chained |= warp.committed[earlier]->c_at[0] == one.c_at[0];
    for (int lane = 0; lane < kWarp; ++lane) {
      if (memcmp(one.a[lane], one.a_at[lane], 16) != 0)
        wrong("wgmma", "an operand in registers was overwritten", place);
      for (int i = 0; i < one.columns / 2 && !chained; ++i) {
        if (one.c_at[lane][i] != 0xffffffffu) wrong("wgmma", "sums were written before they were waited for", place);
      }
    }
    if (one.type == Product::s8) {
      finish<int32_t>(one, chained);
    } else {
      finish<float>(one, chained);
    }
    mark_readers(one, -1, place);
  }
  warp.committed.clear();
  warp.fenced = false;
}

bool warpgroup_operation(Fiber& self, Fiber* const* lanes) {
  Warp& warp = worker->warps[self.warp];
  if (self.op == kWgmma) {
    start_product(warp, lanes, self.place);
  } else if (self.op == kWgmmaFence) {
    warp.fenced = true;
  } else if (self.op == kWgmmaCommit) {
    for (auto& one : warp.open) warp.committed.push_back(std::move(one));
    warp.open.clear();
  } else if (self.op == kWgmmaWait) {
    finish_products(warp, self.place);
  } else {
    return false;
  }
  return true;
}

// At the end of a block: nothing is under way, and the four warps of a warpgroup have done the same.
void check_background() {
  Worker& w = *worker;
  if (!w.bulk.empty()) report("bulk", "a block ends with copies in flight");
  for (size_t i = 0; i < w.warps.size(); ++i) {
    Warp& warp = w.warps[i];
    if (!warp.open.empty() || !warp.committed.empty()) report("wgmma", "a warp ends with products in flight");
    if (warp.products != w.warps[std::min(i / 4 * 4, w.warps.size() - 1)].products) {
      report("wgmma", "warp %zu of a warpgroup takes part in %u products, its first in %u", i, warp.products,
             w.warps[i / 4 * 4].products);
    }
  }
}

}  // namespace simt
