// The threads of an executor.
#pragma once
#include <exception>
#include <thread>

#include "kernel.h"

namespace llmc {

// size() - 1 threads that wait for work. Between begin() and end() they spin (and give the processor away after a short
// while, so that more threads than processors only cost time); otherwise they sleep. run() is only called between the
// two.
class WorkerPool final : public ThreadPool {
 public:
  explicit WorkerPool(int threads);
  ~WorkerPool() override;
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int size() const override { return size_; }
  // An exception of any part is thrown here after all parts are done.
  void run(void (*body)(void* data, int thread), void* data) override;
  void begin();
  void end();

 private:
  void work();
  // Does one part that nobody has claimed; false if there is none.
  bool take() noexcept;
  void stop();

  const int size_;
  std::vector<std::thread> workers_;
  void (*body_)(void*, int) = nullptr;
  void* data_ = nullptr;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<int> next_;                // the next part to claim; size() or more: none is left
  alignas(64) std::atomic<int> done_{0};             // parts that are finished
  alignas(64) std::atomic<std::uint32_t> awake_{0};  // 0 asleep, 1 between begin() and end(), 2 stop
};

// Awake for the length of a scope.
class Awake {
 public:
  explicit Awake(WorkerPool& pool) : pool_(pool) { pool_.begin(); }
  ~Awake() { pool_.end(); }
  Awake(const Awake&) = delete;
  Awake& operator=(const Awake&) = delete;

 private:
  WorkerPool& pool_;
};

}  // namespace llmc
