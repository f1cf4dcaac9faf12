// Where threads meet: operations of a warp, barriers of a block, and cp.async, which arrives as late as it may.
#include "runtime.h"

namespace simt {

static bool same_place(const Place& a, const Place& b) {
  return a.line() == b.line() && strcmp(a.file_name(), b.file_name()) == 0;
}

// The lanes of `mask`, after a check that all of them call the same operation; otherwise the block ends.
static void gather_lanes(Fiber& self, Fiber** lanes) {
  Fiber* base = &worker->fibers[self.warp * kWarp];
  for (int i = 0; i < kWarp; ++i) {
    lanes[i] = self.mask >> i & 1 ? &base[i] : nullptr;
    if (!lanes[i]) continue;
    const Fiber& other = *lanes[i];
    if (other.op != self.op || other.mask != self.mask || !same_place(other.place, self.place)) {
      report("sync", "lanes of one warp meet in different operations: lane %d at %s:%u, lane %d at line %u", self.lane,
             self.place.file_name(), self.place.line(), i, other.place.line());
      kill_block();
    }
  }
}

static void shuffle(Fiber** lanes, Place place) {
  uint64_t values[kWarp];
  for (int i = 0; i < kWarp; ++i) values[i] = lanes[i] ? lanes[i]->args->value : 0;
  for (int i = 0; i < kWarp; ++i) {
    if (!lanes[i]) continue;
    int source = lanes[i]->args->source;
    if (!lanes[source]) {
      report("sync", "a shuffle reads lane %d, which is not in its mask, %s:%u", source, place.file_name(),
             place.line());
      kill_block();
    }
    lanes[i]->args->value = values[source];
  }
}

static void ballot(Fiber** lanes) {
  uint64_t bits = 0;
  for (int i = 0; i < kWarp; ++i) {
    if (lanes[i] && lanes[i]->args->value) bits |= 1ull << i;
  }
  for (int i = 0; i < kWarp; ++i) {
    if (lanes[i]) lanes[i]->args->value = bits;
  }
}

static void perform(Fiber& self, Fiber** lanes) {
  Warp& warp = worker->warps[self.warp];
  switch (self.op) {
    case Op::syncwarp:
      if (self.mask == warp.live) ++warp.epoch;
      return;
    case Op::shuffle:
      return shuffle(lanes, self.place);
    case Op::ballot:
      return ballot(lanes);
    case Op::ldmatrix:
    case Op::ldmatrix_trans:
      return load_matrices(lanes, self.op == Op::ldmatrix_trans);
    default:
      if (!warpgroup_operation(self, lanes)) multiply(lanes, self.op);
  }
}

void collective(Op op, unsigned mask, Args& args, Place place) {
  Worker& w = *worker;
  Fiber& self = *w.fiber;
  Warp& warp = w.warps[self.warp];
  self.args = &args;
  self.op = op;
  self.mask = mask;
  self.place = place;
  if (!(mask >> self.lane & 1)) {
    report("sync", "lane %d calls a warp operation whose mask %08x leaves it out, %s:%u", self.lane, mask,
           place.file_name(), place.line());
    kill_block();
  }
  if (op >= Op::ldmatrix && mask != 0xffffffffu) {
    report("sync", "a tensor-core instruction needs the whole warp, %s:%u", place.file_name(), place.line());
    kill_block();
  }
  if (mask & ~warp.live) {
    report("sync", "a warp operation waits for lanes %08x, which exited or do not exist, %s:%u", mask & ~warp.live,
           place.file_name(), place.line());
    kill_block();
  }
  warp.arrived |= 1u << self.lane;
  if ((warp.arrived & mask) != mask) {
    self.state = State::at_warp_operation;
    yield();
    return;
  }
  Fiber* lanes[kWarp];
  gather_lanes(self, lanes);
  warp.arrived &= ~mask;
  perform(self, lanes);
  for (Fiber* lane : lanes) {
    if (lane && lane != &self) make_ready(*lane);
  }
}

int block_barrier(int predicate, bool count, Place place) {
  Worker& w = *worker;
  Fiber& self = *w.fiber;
  self.place = place;
  self.predicate = count ? (predicate != 0) : (predicate != 0) << 16;
  self.state = State::at_barrier;
  ++w.waiting;
  yield();
  return count ? self.barrier_result : self.barrier_result != 0;
}

void cp_async(void* to, const void* from, int bytes, int source_bytes, Place place) {
  Worker& w = *worker;
  ++w.counters[kCopies];
  auto* target = static_cast<unsigned char*>(to);
  if (target < w.shared || target + bytes > w.shared + w.launch->shared) {
    report("bounds", "cp.async to shared[%td], outside of the %zu bytes of this launch, %s:%u", target - w.shared,
           w.launch->shared, place.file_name(), place.line());
    kill_block();
  }
  uintptr_t low = reinterpret_cast<uintptr_t>(to) | (source_bytes ? reinterpret_cast<uintptr_t>(from) : 0);
  if (low % static_cast<uintptr_t>(bytes)) {
    report("alignment", "misaligned cp.async of %d bytes, %s:%u", bytes, place.file_name(), place.line());
    kill_block();
  }
  if (w.launch->options.check) {
    const void* pc = __builtin_return_address(0);
    access(to, bytes, true, false, pc, 0);
    if (source_bytes) access(from, source_bytes, false, false, pc, 0);
    mark_in_flight(to, bytes, true);
  } else {
    memset(to, 0xff, static_cast<size_t>(bytes));
  }
  w.fiber->open.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, source_bytes});
}

void cp_commit() {
  Fiber& self = *worker->fiber;
  self.groups.push_back(std::move(self.open));
  self.open.clear();
}

void cp_wait(int pending) {
  Worker& w = *worker;
  auto& groups = w.fiber->groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : groups.front()) {
      if (w.launch->options.check) {
        mark_in_flight(copy.to, copy.bytes, false);
        access(copy.to, copy.bytes, true, false, __builtin_return_address(0), 0);
      }
      memcpy(copy.to, copy.from, static_cast<size_t>(copy.source_bytes));
      memset(copy.to + copy.source_bytes, 0, static_cast<size_t>(copy.bytes - copy.source_bytes));
    }
    groups.erase(groups.begin());
  }
}

}  // namespace simt
