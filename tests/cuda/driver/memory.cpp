// Memory of the device and pinned memory, and copies.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace fake {

constexpr size_t kAlignment = 512;

bool inside(Address address, size_t bytes) {
  const auto& all = state().allocations;
  auto next = all.upper_bound(address);
  if (next == all.begin()) return false;
  --next;
  return address + bytes <= next->first + next->second;
}

static int memory_alloc(Address* address, size_t bytes) {
  FAKE_CALL;
  if (capturing()) return kCaptureUnsupported;
  if (!bytes) return kInvalidValue;
  State& s = state();
  if (s.used + bytes > device_memory()) return kOutOfMemory;
  size_t room = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* p = aligned_alloc(kAlignment, room);
  memset(p, 0xff, room);  // as floats: no numbers
  char name[40];
  snprintf(name, sizeof name, "allocation of %zu bytes", bytes);
  simt_register(p, bytes, 1, 0, name, 1);
  *address = reinterpret_cast<Address>(p);
  s.allocations[*address] = bytes;
  s.used += bytes;
  return kSuccess;
}

static int memory_free(Address address) {
  FAKE_LOCK;
  State& s = state();
  if (!address) return kSuccess;
  auto found = s.allocations.find(address);
  if (found == s.allocations.end()) return kInvalidValue;
  drain(&s.null_stream);
  for (Stream* stream : s.streams) drain(stream);
  s.used -= found->second;
  s.allocations.erase(found);
  simt_unregister(reinterpret_cast<void*>(address));
  free(reinterpret_cast<void*>(address));
  return s.sticky;
}

static int memory_info(size_t* free_bytes, size_t* total) {
  FAKE_CALL;
  *total = device_memory();
  *free_bytes = *total - state().used;
  return kSuccess;
}

static int host_alloc(void** p, size_t bytes, unsigned) {
  FAKE_CALL;
  *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!*p) return kOutOfMemory;
  ++state().pinned;
  return kSuccess;
}

static int host_free(void* p) {
  FAKE_LOCK;
  --state().pinned;
  free(p);
  return kSuccess;
}

static int upload(Address to, const void* from, size_t bytes) {
  FAKE_CALL;
  if (capturing()) return kCaptureImplicit;
  if (!inside(to, bytes)) return kInvalidValue;
  drain_blocking();
  std::string staged(static_cast<const char*>(from), bytes);
  return enqueue(nullptr, [to, staged] {
    memcpy(reinterpret_cast<void*>(to), staged.data(), staged.size());
    return kSuccess;
  });
}

static int download(void* to, Address from, size_t bytes) {
  FAKE_CALL;
  if (capturing()) return kCaptureImplicit;
  if (!inside(from, bytes)) return kInvalidValue;
  if (int status = drain_blocking()) return status;
  memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}

static int upload_async(Address to, const void* from, size_t bytes, void* stream) {
  FAKE_CALL;
  ++state().copies;
  if (!inside(to, bytes)) return kInvalidValue;
  return enqueue(stream, [=] {
    memcpy(reinterpret_cast<void*>(to), from, bytes);
    return kSuccess;
  });
}

static int download_async(void* to, Address from, size_t bytes, void* stream) {
  FAKE_CALL;
  ++state().copies;
  if (!inside(from, bytes)) return kInvalidValue;
  return enqueue(stream, [=] {
    memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return kSuccess;
  });
}

static int copy_async(Address to, Address from, size_t bytes, void* stream) {
  FAKE_CALL;
  if (!inside(from, bytes) || !inside(to, bytes)) return kInvalidValue;
  return enqueue(stream, [=] {
    memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return kSuccess;
  });
}

static int set_async(Address to, unsigned char value, size_t bytes, void* stream) {
  FAKE_CALL;
  if (!inside(to, bytes)) return kInvalidValue;
  return enqueue(stream, [=] {
    memset(reinterpret_cast<void*>(to), value, bytes);
    return kSuccess;
  });
}

void add_memory(Table& t) {
  t["cuMemAlloc"] = reinterpret_cast<void*>(memory_alloc);
  t["cuMemFree"] = reinterpret_cast<void*>(memory_free);
  t["cuMemGetInfo"] = reinterpret_cast<void*>(memory_info);
  t["cuMemHostAlloc"] = reinterpret_cast<void*>(host_alloc);
  t["cuMemFreeHost"] = reinterpret_cast<void*>(host_free);
  t["cuMemcpyHtoD"] = reinterpret_cast<void*>(upload);
  t["cuMemcpyDtoH"] = reinterpret_cast<void*>(download);
  t["cuMemcpyHtoDAsync"] = reinterpret_cast<void*>(upload_async);
  t["cuMemcpyDtoHAsync"] = reinterpret_cast<void*>(download_async);
  t["cuMemcpyDtoDAsync"] = reinterpret_cast<void*>(copy_async);
  t["cuMemsetD8Async"] = reinterpret_cast<void*>(set_async);
}

}  // namespace fake
