// Cubins: which chip one is for and which kernels it has is read from its ELF file; the emulator runs them.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace fake {

constexpr int kMaxDynamicShared = 8;  // of CUfunction_attribute
constexpr uint16_t kCudaMachine = 190;

template <class T>
static T field(const unsigned char* image, size_t offset) {
  T value;
  memcpy(&value, image + offset, sizeof value);
  return value;
}

// The capability that a cubin is for. Its place in the header's flags changed with version 8 of the ABI.
static int target_of(const unsigned char* image) {
  auto flags = field<uint32_t>(image, 48);
  return image[8] < 8 ? flags & 0xff : flags >> 8 & 0xff;
}

static int module_load(void** module, const void* data) {
  FAKE_CALL;
  if (capturing()) return kCaptureUnsupported;
  const auto* image = static_cast<const unsigned char*>(data);
  if (memcmp(image, "\177ELF", 4) != 0 || field<uint16_t>(image, 18) != kCudaMachine) return kInvalidImage;
  int target = target_of(image);
  if (target / 10 != capability() / 10 || target % 10 > capability() % 10) {
    fprintf(stderr, "fake driver: a cubin for sm_%d does not run on sm_%d\n", target, capability());
    return kNoBinaryForGpu;
  }
  auto sections = field<uint64_t>(image, 40);
  size_t size = sections + static_cast<size_t>(field<uint16_t>(image, 58)) * field<uint16_t>(image, 60);
  ++state().modules;
  *module = new Module{std::string(static_cast<const char*>(data), size), {}};
  return kSuccess;
}

static int module_unload(void* module) {
  FAKE_LOCK;
  --state().modules;
  delete static_cast<Module*>(module);
  return kSuccess;
}

static const simt::Kernel* find_kernel(const std::string& name) {
  const char* folder = getenv("SIMT_KERNELS");
  std::string path = std::string(folder ? folder : ".") + "/" + name + ".so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* kernel = library ? dlsym(library, name.c_str()) : nullptr;
  if (!kernel) fprintf(stderr, "fake driver: no build of %s for the emulator: %s\n", name.c_str(), dlerror());
  return static_cast<const simt::Kernel*>(kernel);
}

static int module_function(void** function, void* module, const char* name) {
  FAKE_CALL;
  auto* m = static_cast<Module*>(module);
  std::string section = std::string(".text.") + name + '\0';
  if (m->image.find(section) == std::string::npos) return kNotFound;
  Function& f = m->functions[name];
  f.name = name;
  if (!f.kernel) f.kernel = find_kernel(name);
  *function = &f;
  return f.kernel ? kSuccess : kNotFound;
}

static int function_set(void* function, int which, int value) {
  FAKE_CALL;
  if (which != kMaxDynamicShared) return kSuccess;  // hints
  if (value > attribute(97)) return kInvalidValue;
  static_cast<Function*>(function)->dynamic_shared = value;
  return kSuccess;
}

static int function_get(int* value, int which, void* function) {
  FAKE_CALL;
  *value = which == kMaxDynamicShared ? static_cast<Function*>(function)->dynamic_shared : 0;
  return kSuccess;
}

static int launch_failed(const std::string& name, const char* error) {
  static char reports[1 << 16];
  simt_take_reports(reports, sizeof reports);
  fprintf(stderr, "fake driver: %s failed: %s\n%s", name.c_str(), error, reports);
  return kIllegalAddress;
}

// The parameters are copied now, as a driver does; the kernel runs later.
static int launch(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void* stream, void** params, void**) {
  FAKE_CALL;
  auto* f = static_cast<Function*>(function);
  if (static_cast<int>(shared) > f->dynamic_shared) return kInvalidValue;
  unsigned threads = bx * by * bz;
  if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || threads == 0 || threads > 1024) return kInvalidValue;
  std::string copy(static_cast<const char*>(params[0]), simt_kernel_params(f->kernel));
  return enqueue(stream, [=] {
    unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    SimtOptions options{++state().launches, setting("SIMT_ORDER", 2), 2, 0, 1};
    const char* error = simt_launch(f->kernel, grid, block, shared, copy.data(), &options);
    return error ? launch_failed(f->name, error) : kSuccess;
  });
}

void add_modules(Table& t) {
  t["cuModuleLoadData"] = reinterpret_cast<void*>(module_load);
  t["cuModuleUnload"] = reinterpret_cast<void*>(module_unload);
  t["cuModuleGetFunction"] = reinterpret_cast<void*>(module_function);
  t["cuFuncSetAttribute"] = reinterpret_cast<void*>(function_set);
  t["cuFuncGetAttribute"] = reinterpret_cast<void*>(function_get);
  t["cuLaunchKernel"] = reinterpret_cast<void*>(launch);
}

}  // namespace fake
