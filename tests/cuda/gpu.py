"""Runs tests of CUDA kernels on the driver API instead of the emulator: a GPU, or the stand-in for the driver.

    PYTHONPATH=tests/cuda pytest -p gpu tests/cuda/test_small_ops.py

What happened to each test, and the kernels that it launched, goes to $GPU_RECORD, a line of JSON each. Used by
build_scripts/gpu_check.py.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import emulated
import emulator
import numpy as np
import pytest
from emulator import DTYPES, PLUGINS, SIMT, Emulator, libraries

from llmc.compiler.cuda.nvrtc import compile_kernels, known_archs
from llmc.plugins.cuda import Kernel, Launch
from llmc.runtime.devices.cuda.driver import CudaDevice

MODE = "checked"
"""Of builds for the stand-in driver."""
ONLY_SM_90A = ("csrc/cuda/gemm_wgmma.cuh",)
launched: dict[str, str] = {}
"""The template of each kernel that the test has launched, by name."""


def arch_of(capability: int) -> str:
    """The newest target of NVRTC whose machine code a device runs."""
    fitting = [number for number in known_archs() if number // 10 == capability // 10 and number <= capability]
    return f"sm_{max(fitting, default=capability)}"


def compiled(kernels: Iterable[Kernel], arch: str) -> dict[str, bytes]:
    """Their machine code; for sm_90a of those that need it."""
    parts: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        parts.setdefault("sm_90a" if kernel.source in ONLY_SM_90A else arch, []).append(kernel)
    made = [compile_kernels(part, target, folders=(PLUGINS, SIMT)) for target, part in parts.items()]
    return {name: image for images in made for name, image in images.items()}


def note(kernels: Iterable[Kernel]) -> None:
    """That the test launches these."""
    launched.update({kernel.name: f"{kernel.source}:{kernel.function.split('<')[0]}" for kernel in kernels})


def stand_in(kernels: Sequence[Kernel]) -> None:
    """Where the stand-in driver is: give it the kernels' builds for the emulator."""
    if folder := os.environ.get("SIMT_KERNELS"):
        paths = {kernel.name: Path(folder) / f"{kernel.name}.so" for kernel in kernels}
        missing = [kernel for kernel in kernels if not paths[kernel.name].exists()]
        for name, library in libraries(missing, MODE).items():
            paths[name].symlink_to(library)


class OnGpu(CudaDevice):
    """A device that is like EmulatedDevice: kernels are compiled from the sources when they are launched."""

    def __init__(self, capability: int = 90, mode: str = "plain") -> None:
        super().__init__()
        self.names: set[str] = set()
        self.copies = self.replays = self.waits = 0

    def load(self, images: Mapping[str, bytes]) -> None:
        assert all(image[:4] == b"\x7fELF" for image in images.values())

    def run(self, launches: Sequence[Launch]) -> None:
        self._load(launches)
        super().run(launches)

    def capture(self, launches: Sequence[Launch]) -> Any:
        self._load(launches)  # not within the capture
        return super().capture(launches)

    def _load(self, launches: Sequence[Launch]) -> None:
        kernels = {launch.kernel.name: launch.kernel for launch in launches}
        note(kernels.values())
        new = [kernel for name, kernel in kernels.items() if name not in self.names]
        if new:
            stand_in(new)
            super().load(compiled(new, arch_of(self.capability)))
            self.names |= {kernel.name for kernel in new}

    def free(self, address: int) -> None:
        """Give back what `alloc` gave; an executor keeps all until it is closed."""
        self._owned.memory.remove(address)
        self._call("cuMemFree", address)

    def send(self, address: int, data: Any) -> None:
        self.copies += 1
        super().send(address, data)

    def replay(self, graph: Any) -> None:
        self.replays += 1
        super().replay(graph)

    def sync(self) -> None:
        self.waits += 1
        super().sync()


@cache
def device() -> OnGpu:
    """The device of this process."""
    return OnGpu()


class Gpu(Emulator):
    """Implements what tests use of `Emulator`. Modes and orders of threads mean nothing to a device."""

    def __init__(self, mode: str = "checked", order: int = 2, seed: int = 1) -> None:
        self.mode, self.order, self.seed = "gpu", order, seed
        self.places: list[int] = []

    def alloc(self, size: int, name: str = "", *, writable: bool = True, known: bool = False) -> int:
        """Memory of the device, filled with 0xff."""
        address = device().alloc(max(size, 1), name or "a buffer")
        self.places.append(address)
        device().fill(address, 0xFF, size)
        return address

    def put(self, array: np.ndarray, name: str = "", *, writable: bool = False) -> int:
        """See `Emulator.put`."""
        address = self.alloc(array.nbytes, name)
        self.set(address, array)
        return address

    def get(self, address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """See `Emulator.get`."""
        kind = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        data = np.empty(int(np.prod(shape)) * kind.itemsize, np.uint8)
        device().fetch(data, address)
        device().sync()
        return data.view(kind).reshape(shape)

    def set(self, address: int, array: np.ndarray) -> None:
        """See `Emulator.set`."""
        device().put(address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels, several at a time."""
        compiled(kernels, arch_of(device().capability))

    def launch(self, launch: Launch, *, order: int | None = None, seed: int | None = None) -> None:
        """Run a kernel to its end."""
        device().run([launch])
        device().sync()

    def run(self, launches: Iterable[Launch], **options: Any) -> None:
        """Run launches in order."""
        for launch in launches:
            self.launch(launch)

    def free(self) -> None:
        """Give all memory back."""
        while self.places:
            device().free(self.places.pop())


@contextlib.contextmanager
def real_driver(kernels: Iterable[Kernel], **_: Any) -> Iterator[None]:
    """In place of `driver.fake_gpu`: the driver that is here."""
    given = list(kernels)
    stand_in(given)
    note(given)
    yield


def pytest_configure() -> None:
    """Before tests import the emulator."""
    import driver
    import engines

    build, arch = engines.build, arch_of(device().capability)
    emulator.Emulator, emulated.EmulatedDevice, driver.fake_gpu = Gpu, OnGpu, real_driver  # type: ignore[misc,assignment]
    engines.build = lambda *given, target, **options: build(*given, target=f"cuda:{arch}", **options)  # type: ignore[assignment]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test that ran."""
    if report.when != "call" and report.outcome == "passed":
        return
    lines = str(report.longrepr).splitlines() if report.failed else []
    error = next((line[1:].strip() for line in lines if line.startswith("E  ")), "".join(lines[-1:]))
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "error": error}
    with open(os.environ["GPU_RECORD"], "a") as file:
        file.write(json.dumps(line | {"kernels": dict(launched)}) + "\n")
    launched.clear()
    if report.failed and "KernelError" in str(report.longrepr):
        pytest.exit("the device can't be used by this process any more", returncode=9)
