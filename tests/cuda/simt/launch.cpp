// Runs the blocks of a launch: makes a fiber of each thread and schedules them.
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <thread>

#include "runtime.h"

namespace simt {

thread_local Worker* worker __attribute__((tls_model("initial-exec"))) = nullptr;
static std::atomic<uint64_t> launches{0}, totals[kCounters];
static std::mutex launch_mutex;

constexpr size_t kSharedLimit = 227 * 1024;  // what a block may have on sm_90
constexpr size_t kGuard = 1024;              // bytes around shared memory that belong to nobody

Index thread_index() { return worker->fiber->thread; }
Index block_index() { return worker->block_index; }
Index block_size() { return {worker->launch->block.x, worker->launch->block.y, worker->launch->block.z}; }
Index grid_size() { return {worker->launch->grid.x, worker->launch->grid.y, worker->launch->grid.z}; }
int lane() { return worker->fiber->lane; }
unsigned char* dynamic_shared() { return worker->shared; }

Worker::~Worker() {
  if (stacks) munmap(stacks, stack_count * kStackBytes);
}

uint64_t Worker::next_random() {
  random ^= random << 13;
  random ^= random >> 7;
  random ^= random << 17;
  return random;
}

void yield() {
  ++worker->counters[kSwitches];
  switch_context(worker->fiber->context, worker->main);
}

void kill_block() {
  worker->dead = true;
  for (;;) switch_context(worker->fiber->context, worker->main);
}

void make_ready(Fiber& fiber) {
  fiber.state = State::ready;
  worker->ready.push_back(fiber.linear);
}

static void thread_entry() {
  Worker& w = *worker;
  w.launch->kernel->body(w.launch->params);
  Fiber& self = *w.fiber;
  bool in_flight = !self.open.empty();
  for (const auto& group : self.groups) in_flight = in_flight || !group.empty();
  if (in_flight) report("cp.async", "a thread ends with copies in flight");
  self.state = State::done;
  --w.live;
  w.warps[self.warp].live &= ~(1u << self.lane);
  for (;;) switch_context(self.context, w.main);
}

static int threads_of(const Launch& launch) {
  return static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
}

static void make_room(Worker& w) {
  auto threads = static_cast<size_t>(threads_of(*w.launch));
  if (w.stack_count < threads) {
    if (w.stacks) munmap(w.stacks, w.stack_count * kStackBytes);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    w.stacks = static_cast<char*>(mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE, flags, -1, 0));
    for (size_t i = 0; i < threads; ++i) mprotect(w.stacks + i * kStackBytes, kPageBytes, PROT_NONE);
    w.stack_count = threads;
  }
  w.fibers.resize(threads);
  // What is remembered of blocks before is told apart by Worker::where.
  if (w.shadow.size() < w.launch->shared) w.shadow.resize(w.launch->shared);
  w.arena.resize(w.launch->shared + 4 * kGuard);
  auto start = reinterpret_cast<uintptr_t>(w.arena.data()) + kGuard;
  w.shared = reinterpret_cast<unsigned char*>((start + kGuard - 1) & ~(kGuard - 1));
}

static void start_block(Worker& w, uint32_t block) {
  const Launch& launch = *w.launch;
  int threads = threads_of(launch);
  w.block = block;
  w.block_index = {block % launch.grid.x, block / launch.grid.x % launch.grid.y,
                   block / (launch.grid.x * launch.grid.y)};
  w.last = nullptr;
  w.epoch = 0;
  w.waiting = 0;
  w.live = threads;
  w.ready.clear();
  w.mbarriers.clear();
  w.bulk.clear();
  w.warps.assign(static_cast<size_t>((threads + kWarp - 1) / kWarp), Warp());
  std::fill(w.arena.begin(), w.arena.end(), static_cast<unsigned char>(0xff));  // as floats: no numbers
  for (int i = 0; i < threads; ++i) {
    Fiber& f = w.fibers[i];
    auto n = static_cast<unsigned>(i);
    f.linear = i;
    f.lane = i % kWarp;
    f.warp = i / kWarp;
    f.thread = {n % launch.block.x, n / launch.block.x % launch.block.y, n / (launch.block.x * launch.block.y)};
    f.groups.clear();
    f.open.clear();
    w.warps[f.warp].live |= 1u << f.lane;
    make_context(f.context, w.stacks + static_cast<size_t>(i) * kStackBytes + kPageBytes, kStackBytes - kPageBytes,
                 thread_entry);
    make_ready(f);
  }
}

// All live threads have arrived at a barrier: lets them go on.
static void release_barrier(Worker& w) {
  const Fiber* first = nullptr;
  int sum = 0;
  for (const Fiber& f : w.fibers) {
    if (f.state != State::at_barrier) continue;
    sum += f.predicate;
    if (!first) first = &f;
    if (f.place.line() != first->place.line() || strcmp(f.place.file_name(), first->place.file_name()) != 0) {
      w.fiber = &w.fibers[f.linear];
      report("sync", "the barrier of thread %d at %s:%u meets that of thread %d at line %u", f.linear,
             f.place.file_name(), f.place.line(), first->linear, first->place.line());
      break;
    }
  }
  for (Fiber& f : w.fibers) {
    if (f.state != State::at_barrier) continue;
    f.barrier_result = sum;
    make_ready(f);
  }
  w.waiting = 0;
  ++w.epoch;
  ++w.counters[kBarriers];
}

static void report_deadlock(Worker& w) {
  int at_barrier = 0, at_warp = 0, at_mbarrier = 0;
  for (Fiber& f : w.fibers) {
    at_barrier += f.state == State::at_barrier;
    at_warp += f.state == State::at_warp_operation;
    at_mbarrier += f.state == State::at_mbarrier;
    if (f.state != State::done && f.state != State::ready) w.fiber = &f;
  }
  report("deadlock",
         "%d threads wait at a barrier, %d at one that counts bytes, %d in warp operations, %d have exited; this one "
         "at %s:%u",
         at_barrier, at_mbarrier, at_warp, static_cast<int>(w.fibers.size()) - at_barrier - at_warp - at_mbarrier,
         w.fiber->place.file_name(), w.fiber->place.line());
}

static void run_block(Worker& w, uint32_t block) {
  start_block(w, block);
  int order = w.launch->options.order, threads = threads_of(*w.launch);
  size_t head = 0;
  if (order == 1) std::reverse(w.ready.begin(), w.ready.end());
  while (w.live > 0 && !w.dead) {
    if (head == w.ready.size()) {
      w.ready.clear();
      head = 0;
      if (land_copy()) continue;
      if (w.waiting != w.live) {
        report_deadlock(w);
        break;
      }
      if (w.live < threads && w.launch->options.check) {
        w.fiber = nullptr;
        report("sync", "a barrier is reached by %d threads, after %d have exited", w.live, threads - w.live);
      }
      release_barrier(w);
      if (order == 1) std::reverse(w.ready.begin(), w.ready.end());
    }
    if (order == 2) std::swap(w.ready[head], w.ready[head + w.next_random() % (w.ready.size() - head)]);
    Fiber& f = w.fibers[w.ready[head++]];
    w.fiber = &f;
    w.accesses_at_resume = w.counters[kAccesses];
    switch_context(w.main, f.context);
  }
  w.fiber = nullptr;
  if (!w.dead && w.live == 0) check_background();
}

static void work(Launch& launch, uint64_t number) {
  static thread_local Worker own;
  worker = &own;
  own.launch = &launch;
  own.dead = false;
  own.random = launch.options.seed * 0x9E3779B97F4A7C15ull + number + 1;
  for (int i = 0; i < 8; ++i) own.next_random();
  make_room(own);
  for (size_t i; !own.dead && (i = launch.next++) < launch.blocks.size();) run_block(own, launch.blocks[i]);
  for (int i = 0; i < kCounters; ++i) {
    totals[i] += own.counters[i];
    own.counters[i] = 0;
  }
  worker = nullptr;
}

static void order_blocks(Launch& launch) {
  for (size_t i = 0; i < launch.blocks.size(); ++i) launch.blocks[i] = static_cast<uint32_t>(i);
  if (launch.options.order == 1) std::reverse(launch.blocks.begin(), launch.blocks.end());
  if (launch.options.order != 2) return;
  uint64_t state = launch.options.seed * 6364136223846793005ull + 1;
  for (size_t i = launch.blocks.size(); i > 1; --i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(launch.blocks[i - 1], launch.blocks[(state >> 33) % i]);
  }
}

// Checks run on one thread: what is remembered of a byte is not guarded.
void run_launch(Launch& launch) {
  order_blocks(launch);
  int workers = launch.options.check ? 1 : std::max(1, launch.options.workers);
  std::vector<std::thread> threads;
  for (int i = 1; i < workers; ++i) threads.emplace_back(work, std::ref(launch), i);
  work(launch, 0);
  for (auto& thread : threads) thread.join();
}

}  // namespace simt

extern "C" {

void simt_register(void* p, size_t bytes, int writable, int needs_values, const char* name, int track) {
  simt::add_region(p, bytes, writable != 0, needs_values != 0, name, track != 0);
}
void simt_unregister(const void* p) { simt::remove_region(p); }
void simt_set_known(const void* p, size_t bytes) { simt::set_known(p, bytes); }

void simt_stats(uint64_t* counters) {
  for (int i = 0; i < simt::kCounters; ++i) counters[i] = simt::totals[i];
}

size_t simt_kernel_params(const simt::Kernel* kernel) { return kernel->params; }

// nullptr: the launch ran; otherwise what is wrong with it. "": the reports say what.
const char* simt_launch(const simt::Kernel* kernel, const unsigned* grid, const unsigned* block, size_t shared,
                        const void* params, const simt::Options* options) {
  std::lock_guard guard(simt::launch_mutex);
  simt::Launch launch;
  launch.kernel = kernel;
  launch.params = params;
  launch.grid = {grid[0], grid[1], grid[2]};
  launch.block = {block[0], block[1], block[2]};
  launch.shared = shared;
  launch.options = *options;
  launch.options.check = kernel->checked;
  launch.id = ++simt::launches;
  auto blocks = static_cast<uint64_t>(grid[0]) * grid[1] * grid[2];
  if (!blocks || grid[1] > 65535 || grid[2] > 65535) return "the grid is empty, or more than 65535 in y or z";
  if (blocks >= 1u << 24) return "the grid has more blocks than the emulator counts";
  if (static_cast<uint64_t>(block[0]) * block[1] * block[2] != static_cast<uint64_t>(kernel->threads)) {
    return "the block has not the size that the kernel was compiled for";
  }
  if (shared > simt::kSharedLimit) return "more shared memory than a block can have";
  launch.blocks.resize(blocks);
  simt::add_region(const_cast<void*>(params), kernel->params, false, false, "params", false);
  simt::run_launch(launch);
  simt::remove_region(params);
  return launch.failed ? "" : nullptr;
}
}
