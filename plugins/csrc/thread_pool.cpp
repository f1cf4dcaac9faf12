#include "thread_pool.h"

#include <string>
#include <system_error>
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

WorkerPool::WorkerPool(int threads) : size_(threads), next_(threads) {
  require(threads >= 1 && threads <= 1024, "threads must be 1 to 1024");
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    stop();
    fail("the system lets this process have " + std::to_string(workers_.size() + 1) + " threads, not " +
         std::to_string(threads) + " (" + error.what() + ")");
  }
  pin(workers_);
}

WorkerPool::~WorkerPool() { stop(); }

void WorkerPool::stop() {
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
  done_.store(0, std::memory_order_relaxed);
  next_.store(0, std::memory_order_release);
  while (take()) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != size(); ++spins) {
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

// A claim that comes late finds no part left, or belongs to the next run(): body_ and data_ are written before next_,
// and stay until every claimed part is done.
bool WorkerPool::take() noexcept {
  if (next_.load(std::memory_order_relaxed) >= size()) return false;
  const int part = next_.fetch_add(1, std::memory_order_acquire);
  if (part >= size()) return false;
  try {
    body_(data_, part);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void WorkerPool::work() {
  for (int spins = 0;; ++spins) {
    if (take()) {
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
