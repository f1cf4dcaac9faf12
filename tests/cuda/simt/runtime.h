// The inside of the emulator: fibers, the state of a block, and what is remembered of every byte.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "simt.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace simt {

// ---- fibers (fiber.cpp)

struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};
void switch_context(Context& from, Context& to);
void make_context(Context& context, char* stack, size_t size, void (*entry)());

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kPageBytes = 4096;
constexpr int kWarp = 32;

// ---- threads of a block

enum class State : uint8_t { ready, at_warp_operation, at_barrier, at_mbarrier, done };

struct Copy {
  char* to;
  const char* from;
  int bytes, source_bytes;
};

// What a warp knows to have happened: of each warp the epochs, then of each barrier of hopper.cpp the phases.
using Clock = std::vector<uint32_t>;

struct Mbarrier {
  size_t number = 0;  // in a Clock
  int count = 0, left = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  Clock arrived, ended;
};

struct Bulk {
  char* to;
  const char* from;
  int bytes;
  Mbarrier* bar;
};

struct Wgmma;  // a product of a warp of a warpgroup

struct Fiber {
  Context context;
  State state;
  Index thread;
  int linear, lane, warp;
  Args* args;
  Op op;
  unsigned mask;
  Place place;
  int predicate, barrier_result;
  Mbarrier* mbarrier;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

struct Warp {
  unsigned arrived = 0, live = 0;
  uint32_t epoch = 0;  // grows at each synchronisation of the whole warp
  Clock clock;
  bool fenced = false;
  uint32_t products = 0;
  std::vector<std::shared_ptr<Wgmma>> open, committed;
};

// Who last read and wrote a byte; `epoch` and `warp_epoch` say between which barriers.
struct Access {
  uint64_t where = 0;  // launch and block
  uint32_t epoch = 0, warp_epoch = 0;
  uint16_t thread = 0;
  uint16_t warp = 0;
};
constexpr uint16_t kMany = 0xffff;  // as a thread or a warp: several
constexpr uint16_t kBulk = 0xfffe;  // as a warp: a bulk copy; `thread` is its barrier, `warp_epoch` the phase

struct Shadow {
  Access write, read;
  bool atomic = false, in_flight = false, known = false;
  int16_t readers = 0;  // products that run
};

struct Region {
  uintptr_t low, high;
  bool writable;
  bool needs_values;  // reading what nobody has written is reported
  std::string name;
  Shadow* shadow;
};

// order: of threads and blocks, 0 in order, 1 reversed, 2 random.
struct Options {
  uint64_t seed;
  int order, workers, check, strict_blocks;
};

struct Launch {
  const Kernel* kernel;
  const void* params;
  dim3 grid, block;
  size_t shared;
  Options options;
  uint64_t id;
  std::vector<uint32_t> blocks;
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
};

// In the order of Emulator.stats() in emulator.py.
enum Counter { kSwitches, kMma, kLdmatrix, kConflicts, kCopies, kAccesses, kBarriers, kCounters };

// Runs blocks, one after another, on a thread of the host.
struct Worker {
  Launch* launch = nullptr;
  Context main;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<int> ready;
  char* stacks = nullptr;
  size_t stack_count = 0;
  std::vector<unsigned char> arena;
  unsigned char* shared = nullptr;
  std::vector<Shadow> shadow;
  uint32_t epoch = 0;
  int waiting = 0, live = 0;
  bool dead = false;
  uint32_t block = 0;
  Index block_index{};
  Fiber* fiber = nullptr;
  Region* last = nullptr;
  uint64_t random = 1;
  uint64_t accesses_at_resume = 0;
  uint64_t counters[kCounters] = {};
  std::map<uint32_t, Mbarrier> mbarriers;  // by their place in shared memory
  std::vector<Bulk> bulk;

  ~Worker();
  uint64_t next_random();
  uint64_t where() const { return launch->id << 24 | block; }
};

extern thread_local Worker* worker __attribute__((tls_model("initial-exec")));

void yield();                    // to the scheduler
[[noreturn]] void kill_block();  // after a report that leaves no way to go on
void make_ready(Fiber& fiber);
void run_launch(Launch& launch);  // launch.cpp

// ---- reports and checks (memory.cpp)

void report(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
void access(const void* p, int bytes, bool write, bool atomic, const void* pc, int alignment);
void mark_in_flight(const void* p, int bytes, bool on);
void add_region(void* p, size_t bytes, bool writable, bool needs_values, const char* name, bool track);
void remove_region(const void* p);
void set_known(const void* p, size_t bytes);

void check_operand(const void* p, int bytes, Place place);

// ---- the background of sm_90a (hopper.cpp)

bool land_copy();
bool warpgroup_operation(Fiber& self, Fiber* const* lanes);
void check_background();

// ---- tensor cores (mma.cpp); `lanes` are the 32 of a warp

void multiply(Fiber* const* lanes, Op op);
void load_matrices(Fiber* const* lanes, bool transposed);

}  // namespace simt
