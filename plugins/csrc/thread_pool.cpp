#include "thread_pool.h"

#include <utility>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

namespace llmc {
namespace {

// About 10 to 30 microseconds: longer than the gaps between the parallel parts of a step.
constexpr int kSpins = 400;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Pins the threads only where somebody has set exactly this many processors of a larger machine aside for the process;
// elsewhere two processes would pin themselves to the same ones.
void pin(std::vector<std::thread>& workers) {
#ifdef __linux__
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  const int count = CPU_COUNT(&allowed);
  if (count != static_cast<int>(workers.size()) + 1 || count >= sysconf(_SC_NPROCESSORS_ONLN)) return;
  int cpu = -1;
  const auto next = [&] {
    do {
      ++cpu;
    } while (!CPU_ISSET(cpu, &allowed));
  };
  next();  // the first is left to the caller, which is not ours to pin
  for (std::thread& worker : workers) {
    next();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(worker.native_handle(), sizeof(one), &one);  // best effort
  }
#else
  (void)workers;
#endif
}

}  // namespace

WorkerPool::WorkerPool(int threads) {
  require(threads >= 1 && threads <= 1024, "threads must be 1 to 1024");
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  pin(workers_);
}

WorkerPool::~WorkerPool() {
  awake_.store(2);
  awake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::begin() {
  awake_.store(1, std::memory_order_release);
  awake_.notify_all();
}

void WorkerPool::end() { awake_.store(0, std::memory_order_release); }

void WorkerPool::run(void (*body)(void* data, int thread), void* data) {
  if (workers_.empty()) return body(data, 0);
  body_ = body;
  data_ = data;
  pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  call(0);
  for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (failed_.load(std::memory_order_relaxed)) {
    failed_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void WorkerPool::call(int thread) noexcept {
  try {
    body_(data_, thread);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

void WorkerPool::work(int thread) {
  std::uint32_t seen = 0;
  for (int spins = 0;; ++spins) {
    const std::uint32_t generation = generation_.load(std::memory_order_acquire);
    if (generation != seen) {
      seen = generation;
      call(thread);
      pending_.fetch_sub(1, std::memory_order_release);
      spins = 0;
    } else if (spins < kSpins) {
      pause();
    } else if (const std::uint32_t state = awake_.load(std::memory_order_acquire); state == 2) {
      return;
    } else if (state == 0) {
      awake_.wait(0, std::memory_order_acquire);
      spins = 0;
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace llmc
