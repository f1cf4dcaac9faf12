"""A CUDA device by the driver API of `cuda.bindings`: nothing else of CUDA is needed to run an engine."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError, KernelError, ResourceError
from llmc.plugins.cuda import Launch

INSTALL = "pip install 'llmc-engine[cuda]'"
DRIVER = 13000
"""The least CUDA version that the driver has to know: cubins are those of CUDA 13."""

SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel has without asking."""

OUT_OF_MEMORY, NO_DEVICE = 2, 100


@dataclass
class _Owned:
    """What a device object has taken from the driver."""

    stream: Any = None
    memory: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    modules: list[Any] = field(default_factory=list)
    graphs: list[Any] = field(default_factory=list)


class CudaDevice:
    """One GPU, with a stream of its own. Implements ``device.Device``.

    Each executor has its own object. What it has taken goes back to the driver at `close`, or with the object.

    Raises:
        EngineError: there is no driver or no device, the driver is too old, or cuda-bindings is not installed.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self._cuda = cuda = _bindings()
        status, *_ = _started(cuda)
        if int(status) == NO_DEVICE:
            raise EngineError("the engine is built for CUDA, but this machine has no NVIDIA GPU that can be used")
        self._check("cuInit", (status,))
        version = self._call("cuDriverGetVersion")
        if version < DRIVER:
            raise EngineError(
                f"the NVIDIA driver knows CUDA {version // 1000}.{version % 1000 // 10}; install one that knows "
                f"{DRIVER // 1000}.0 or later (580 or later)"
            )
        if ordinal >= self._call("cuDeviceGetCount"):
            raise EngineError("the engine is built for CUDA, but this machine has no NVIDIA GPU that can be used")
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._owned = _Owned()
        self._release = weakref.finalize(self, _give_back, cuda, self._device, self._context, self._owned)
        self._release.atexit = False  # then the driver gives everything back
        self._enter()
        kinds = cuda.CUdevice_attribute
        major, minor = (
            self._call("cuDeviceGetAttribute", kind, self._device)
            for kind in (
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.capability = 10 * int(major) + int(minor)
        name = self._call("cuDeviceGetName", 128, self._device)
        self.name = name.split(b"\0")[0].decode()
        self._owned.stream = self._stream = self._call("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}

    def memory(self) -> tuple[int, int]:
        """Free bytes, and all of them."""
        self._enter()
        free, total = self._check("cuMemGetInfo", self._cuda.cuMemGetInfo())
        return int(free), int(total)

    def alloc(self, size: int, what: str) -> int:
        """The address of so many bytes.

        Raises:
            ResourceError: there is no room.
        """
        self._enter()
        status, *values = self._cuda.cuMemAlloc(size)
        if int(status) == OUT_OF_MEMORY:
            free, total = self.memory()
            raise ResourceError(
                f"{what}: needs {size} bytes of device memory, but {free} of {total} are free on {self.name}; use less "
                "gpu_memory or kv_memory, lower limits, or a larger device"
            )
        address = int(self._check("cuMemAlloc", (status, *values)))
        self._owned.memory.add(address)
        return address

    def host(self, size: int) -> NDArray[np.uint8]:
        """Pinned memory."""
        if not size:
            return np.zeros(0, np.uint8)
        self._enter()
        address = int(self._call("cuMemHostAlloc", size, 0))
        self._owned.pinned.add(address)
        buffer = (ctypes.c_uint8 * size).from_address(address)
        buffer.device = self  # type: ignore[attr-defined]  # an array that is still read keeps its memory
        return np.ctypeslib.as_array(buffer)

    def put(self, address: int, data: NDArray[Any]) -> None:
        """Copy on the stream, and wait: the default stream would not be waited for by ours."""
        if data.nbytes:
            self._enter()
            array = np.ascontiguousarray(data)
            self._call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self._stream)
            self.sync()

    def send(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy from pinned memory."""
        self._enter()
        if data.nbytes:
            self._call("cuMemcpyHtoDAsync", address, data.ctypes.data, data.nbytes, self._stream)

    def fetch(self, data: NDArray[np.uint8], address: int) -> None:
        """Copy to pinned memory."""
        if data.nbytes:
            self._call("cuMemcpyDtoHAsync", data.ctypes.data, address, data.nbytes, self._stream)

    def fill(self, address: int, value: int, size: int) -> None:
        """Set bytes."""
        if size:
            self._call("cuMemsetD8Async", address, value, size, self._stream)

    def load(self, images: Mapping[str, bytes]) -> None:
        """Load cubins that hold one kernel each."""
        self._enter()
        for name, image in images.items():
            module = self._call("cuModuleLoadData", image)
            self._owned.modules.append(module)
            self._functions[name] = self._call("cuModuleGetFunction", module, name.encode())

    def run(self, launches: Sequence[Launch]) -> None:
        """Launch kernels; their params are copied by the driver."""
        for launch in launches:
            name, shared = launch.kernel.name, launch.shared
            function = self._functions[name]
            if shared > max(self._shared.get(name, 0), SHARED_BYTES):
                kind = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", function, kind, shared)
                self._shared[name] = shared
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(launch.params))
            result = self._cuda.cuLaunchKernel(
                function, *launch.grid, launch.kernel.threads, 1, 1, shared, self._stream, ctypes.addressof(pointers), 0
            )
            if int(result[0]):
                self._check(f"launch of {name}, grid {launch.grid}, {shared} bytes of shared memory", result)

    def capture(self, launches: Sequence[Launch]) -> Any:
        """Record launches."""
        cuda = self._cuda
        self._call("cuStreamBeginCapture", self._stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            self.run(launches)
        except BaseException:
            cuda.cuStreamEndCapture(self._stream)  # leaves the stream usable; the first error is the one to report
            raise
        graph = self._call("cuStreamEndCapture", self._stream)
        try:
            made = self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)
        self._owned.graphs.append(made)
        return made

    def replay(self, graph: Any) -> None:
        """Run a graph."""
        self._call("cuGraphLaunch", graph, self._stream)

    def drop(self, graph: Any) -> None:
        """Destroy a graph; the driver waits with that until it has run."""
        self._owned.graphs.remove(graph)
        self._call("cuGraphExecDestroy", graph)

    def sync(self) -> None:
        """Wait for the stream.

        Raises:
            KernelError: a kernel has failed; the device can't be used by this process any more.
        """
        self._call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Give back everything. Arrays of `host` are not to be read any more."""
        self._release()

    def _enter(self) -> None:
        """Make the context that of this thread: a step may come from any, and begins with `send`."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, function: str, *given: Any) -> Any:
        return self._check(function, getattr(self._cuda, function)(*given))

    def _check(self, what: str, result: tuple[Any, ...]) -> Any:
        """The values behind a status."""
        status, *values = result
        if int(status):
            _, name = self._cuda.cuGetErrorName(status)
            text = name.decode() if isinstance(name, bytes) else str(name)
            raise KernelError(f"CUDA: {what} failed with {text} ({int(status)})")
        return values[0] if len(values) == 1 else tuple(values)


def _give_back(cuda: ModuleType, device: Any, context: Any, owned: _Owned) -> None:
    """All that a device object owns. After a fault of a kernel the driver refuses, and keeps it until the process ends.

    So no status is looked at: there is nothing to be done about one.
    """
    if int(cuda.cuCtxSetCurrent(context)[0]):
        return
    if owned.stream is not None:
        cuda.cuStreamSynchronize(owned.stream)
    for graph in owned.graphs:
        cuda.cuGraphExecDestroy(graph)
    for module in owned.modules:
        cuda.cuModuleUnload(module)
    for address in owned.memory:
        cuda.cuMemFree(address)
    for address in owned.pinned:
        cuda.cuMemFreeHost(address)
    if owned.stream is not None:
        cuda.cuStreamDestroy(owned.stream)
    cuda.cuDevicePrimaryCtxRelease(device)


def _bindings() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise EngineError(f"the engine is built for CUDA, which needs cuda-bindings: {INSTALL}") from None
    module: ModuleType = driver
    return module


def _started(cuda: ModuleType) -> tuple[Any, ...]:
    try:
        result: tuple[Any, ...] = cuda.cuInit(0)
    except RuntimeError as error:  # there is no libcuda.so.1
        raise EngineError(
            f"the engine is built for CUDA, but this machine has no NVIDIA driver ({error}); install one, or build an "
            "engine with --target cpu"
        ) from None
    return result
