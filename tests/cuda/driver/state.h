// A libcuda.so.1 for machines without a GPU: the part of the driver API that the runtime uses. Kernels are looked up in
// the real cubin and run by the emulator. Environment, read at each call:
//   SIMT_KERNELS     folder with NAME.so for each kernel
//   SIMT_CAPABILITY  of the device, such as 90 (default)
//   SIMT_DRIVER      version, such as 13000 (default); SIMT_DEVICES: how many (default 1); SIMT_MEMORY: bytes of each
//
// Work on a stream is put off until something waits for it, so that a forgotten wait shows as stale data. An upload by
// cuMemcpyHtoD is staged and then put off on the default stream, as a driver may do with pageable memory, and a
// non-blocking stream does not wait for that one. An asynchronous upload reads its source when it runs, so a source
// that is freed or changed too early shows as well.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../simt/simt.h"

namespace fake {

enum Status {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureImplicit = 906,
};

using Address = uintptr_t;
using Work = std::function<int()>;

struct Graph {
  std::vector<Work> works;
};

struct Stream {
  std::vector<Work> queue;
  bool blocking = true;
  Graph* capture = nullptr;
};

struct Event {
  bool done = true;
};

struct Function {
  std::string name;
  const simt::Kernel* kernel = nullptr;
  int dynamic_shared = 48 * 1024;
};

struct Module {
  std::string image;
  std::map<std::string, Function> functions;
};

// Everything that the driver knows. One lock guards it: see FAKE_CALL.
struct State {
  std::recursive_mutex mutex;
  bool initialized = false;
  uint64_t process = 1;   // fake_reset begins the next
  int sticky = kSuccess;  // after a kernel fault every call fails, as on a GPU
  Stream null_stream;
  std::vector<Stream*> streams;
  std::map<Address, size_t> allocations;
  size_t used = 0;
  uint64_t pinned = 0, modules = 0, graphs = 0, retained = 0;  // held now
  uint64_t launches = 0, waits = 0, copies = 0;                // so far; copies between host and device
};
State& state();
bool& context_is_current();  // in this thread

int setting(const char* name, int otherwise);
inline int capability() { return setting("SIMT_CAPABILITY", 90); }
size_t device_memory();
int attribute(int which);

Stream* stream_of(void* handle);
bool capturing();
int enqueue(void* stream, Work work);
int drain(Stream* stream);
int drain_blocking();
bool inside(Address address, size_t bytes);

using Table = std::map<std::string, void*>;
void add_device(Table& table);
void add_memory(Table& table);
void add_modules(Table& table);
void add_streams(Table& table);

#define FAKE_LOCK std::lock_guard fake_guard(fake::state().mutex)
#define FAKE_CALL                                                \
  FAKE_LOCK;                                                     \
  if (!fake::state().initialized) return fake::kNotInitialized;  \
  if (!fake::context_is_current()) return fake::kInvalidContext; \
  if (fake::state().sticky != fake::kSuccess) return fake::state().sticky

}  // namespace fake

extern "C" {
void simt_register(void* p, size_t bytes, int writable, int needs_values, const char* name, int track);
void simt_unregister(const void* p);
size_t simt_kernel_params(const simt::Kernel* kernel);
void simt_take_reports(char* text, size_t size);
struct SimtOptions {
  uint64_t seed;
  int order, workers, check, strict_blocks;
};
const char* simt_launch(const simt::Kernel* kernel, const unsigned* grid, const unsigned* block, size_t shared,
                        const void* params, const SimtOptions* options);
}
