// Devices, contexts and the table of functions.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace fake {

State& state() {
  static State s;
  return s;
}

bool& context_is_current() {
  thread_local bool current;
  thread_local uint64_t process;
  if (process != state().process) current = false;
  process = state().process;
  return current;
}

int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

size_t device_memory() {
  const char* text = getenv("SIMT_MEMORY");
  return text && *text ? strtoull(text, nullptr, 10) : size_t{1} << 30;
}

static int shared_limit() {
  switch (capability()) {
    case 80:
    case 87:
      return 163 * 1024;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 * 1024;
    default:
      return 227 * 1024;
  }
}

// The numbers are those of CUdevice_attribute.
int attribute(int which) {
  static const std::map<int, int> fixed = {{1, 1024},     {2, 1024},  {3, 1024},      {4, 64},    {5, 0x7fffffff},
                                           {6, 65535},    {7, 65535}, {8, 48 * 1024}, {10, 32},   {12, 65536},
                                           {13, 1980000}, {16, 132},  {36, 2619000},  {37, 5120}, {38, 50 << 20},
                                           {39, 2048},    {41, 1}};
  if (which == 75) return capability() / 10;
  if (which == 76) return capability() % 10;
  if (which == 97) return shared_limit();
  auto found = fixed.find(which);
  return found == fixed.end() ? 0 : found->second;
}

static int init(unsigned flags) {
  FAKE_LOCK;
  if (flags) return kInvalidValue;
  if (setting("SIMT_DEVICES", 1) == 0) return kNoDevice;
  // Kernels find the emulator among the global symbols.
  if (!dlopen("libsimt.so", RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD)) return kNotFound;
  state().initialized = true;
  return kSuccess;
}

static int driver_version(int* version) {
  *version = setting("SIMT_DRIVER", 13000);
  return kSuccess;
}

static int device_count(int* count) {
  *count = setting("SIMT_DEVICES", 1);
  return kSuccess;
}

static int device_get(int* device, int ordinal) {
  if (!state().initialized) return kNotInitialized;
  *device = ordinal;
  return ordinal >= 0 && ordinal < setting("SIMT_DEVICES", 1) ? kSuccess : kInvalidDevice;
}

static int device_name(char* name, int size, int) {
  snprintf(name, static_cast<size_t>(size), "SIMT emulator sm_%d", capability());
  return kSuccess;
}

static int device_total(size_t* bytes, int) {
  *bytes = device_memory();
  return kSuccess;
}

static int device_attribute(int* value, int which, int) {
  *value = attribute(which);
  return kSuccess;
}

static int device_uuid(char* uuid, int) {
  memset(uuid, 7, 16);
  return kSuccess;
}

static int context_retain(void** context, int) {
  if (!state().initialized) return kNotInitialized;
  *context = reinterpret_cast<void*>(state().process);
  ++state().retained;
  return kSuccess;
}

static int context_release(int) {
  --state().retained;
  return kSuccess;
}

// A context of before fake_reset is none: whoever holds one gives nothing back that others have by now.
static int context_set(void* context) {
  bool known = context == reinterpret_cast<void*>(state().process);
  context_is_current() = known;
  return known || !context ? kSuccess : kInvalidContext;
}

static int context_get(void** context) {
  *context = context_is_current() ? reinterpret_cast<void*>(state().process) : nullptr;
  return kSuccess;
}

static int context_synchronize() {
  FAKE_CALL;
  if (capturing()) return kCaptureUnsupported;
  drain(&state().null_stream);
  for (Stream* stream : state().streams) drain(stream);
  return state().sticky;
}

static int error_name(int error, const char** name) {
  static const std::map<int, const char*> names = {{0, "CUDA_SUCCESS"},
                                                   {1, "CUDA_ERROR_INVALID_VALUE"},
                                                   {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {3, "CUDA_ERROR_NOT_INITIALIZED"},
                                                   {100, "CUDA_ERROR_NO_DEVICE"},
                                                   {101, "CUDA_ERROR_INVALID_DEVICE"},
                                                   {200, "CUDA_ERROR_INVALID_IMAGE"},
                                                   {201, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                                   {500, "CUDA_ERROR_NOT_FOUND"},
                                                   {600, "CUDA_ERROR_NOT_READY"},
                                                   {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                   {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                                   {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                                                   {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"}};
  auto found = names.find(error);
  *name = found == names.end() ? "CUDA_ERROR_UNKNOWN" : found->second;
  return kSuccess;
}

void add_device(Table& t) {
  t["cuInit"] = reinterpret_cast<void*>(init);
  t["cuDriverGetVersion"] = reinterpret_cast<void*>(driver_version);
  t["cuDeviceGetCount"] = reinterpret_cast<void*>(device_count);
  t["cuDeviceGet"] = reinterpret_cast<void*>(device_get);
  t["cuDeviceGetName"] = reinterpret_cast<void*>(device_name);
  t["cuDeviceTotalMem"] = reinterpret_cast<void*>(device_total);
  t["cuDeviceGetAttribute"] = reinterpret_cast<void*>(device_attribute);
  t["cuDeviceGetUuid"] = reinterpret_cast<void*>(device_uuid);
  t["cuDevicePrimaryCtxRetain"] = reinterpret_cast<void*>(context_retain);
  t["cuDevicePrimaryCtxRelease"] = reinterpret_cast<void*>(context_release);
  t["cuCtxSetCurrent"] = reinterpret_cast<void*>(context_set);
  t["cuCtxGetCurrent"] = reinterpret_cast<void*>(context_get);
  t["cuCtxSynchronize"] = reinterpret_cast<void*>(context_synchronize);
  t["cuGetErrorName"] = reinterpret_cast<void*>(error_name);
  t["cuGetErrorString"] = reinterpret_cast<void*>(error_name);
}

static Table make_table() {
  Table table;
  add_device(table);
  add_memory(table);
  add_modules(table);
  add_streams(table);
  return table;
}

}  // namespace fake

extern "C" __attribute__((visibility("default"))) int cuGetProcAddress_v2(const char* name, void** function, int,
                                                                          uint64_t, int* status) {
  static const fake::Table table = fake::make_table();
  auto found = table.find(name);
  bool itself = strcmp(name, "cuGetProcAddress") == 0;
  *function = itself ? reinterpret_cast<void*>(cuGetProcAddress_v2) : found == table.end() ? nullptr : found->second;
  if (status) *status = *function ? 0 : 1;
  return *function ? fake::kSuccess : fake::kNotFound;
}

// What is held now, and what was done since fake_reset; in the order of the names in driver.py.
extern "C" __attribute__((visibility("default"))) void fake_counts(uint64_t* counts) {
  auto& s = fake::state();
  std::lock_guard guard(s.mutex);
  const uint64_t all[] = {s.allocations.size(), s.used,     s.pinned,   s.modules, s.graphs,
                          s.streams.size(),     s.retained, s.launches, s.waits,   s.copies};
  memcpy(counts, all, sizeof all);
}

// As a new process would find it, for tests in one process; memory is freed, other handles are not to be used again.
extern "C" __attribute__((visibility("default"))) void fake_reset() {
  auto& s = fake::state();
  std::lock_guard guard(s.mutex);
  s.sticky = fake::kSuccess;
  s.null_stream = {};
  for (fake::Stream* stream : s.streams) delete stream;
  s.streams.clear();
  for (const auto& [address, bytes] : s.allocations) {
    simt_unregister(reinterpret_cast<void*>(address));
    free(reinterpret_cast<void*>(address));
  }
  s.allocations.clear();
  s.used = s.pinned = s.modules = s.graphs = s.retained = s.launches = s.waits = s.copies = 0;
  s.initialized = false;
  ++s.process;
}
