"""Kernels of plugins/*/cuda.py on the CPU: compiles a `Kernel` with g++ on the emulator in simt/ and launches it.

Builds are kept by content in $XDG_CACHE_HOME/llmc-tests (default: ~/.cache), so that a kernel is compiled once. Mode
"checked" reports every stray, uninitialised or racing access, also to a thread's own arrays; "plain" is faster;
"coverage" counts lines for gcov.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmc.plugins.cuda import Kernel, Launch, Tensor

ROOT = Path(__file__).parents[2]
PLUGINS, SIMT = ROOT / "plugins", ROOT / "tests/cuda/simt"
OVERLAY = [Path(folder) for folder in [os.environ.get("SIMT_OVERLAY")] if folder]
INCLUDES = [*OVERLAY, PLUGINS, SIMT]  # files of the overlay stand in for those of plugins/
COUNTERS = ("switches", "mma", "ldmatrix", "bank_conflicts", "cp_async", "accesses", "barriers")
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}
FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
CHECKS = ("--param", "tsan-instrument-func-entry-exit=0", "-fsanitize=bounds")
MODES = {
    "plain": ("-O1", "-DSIMT_CHECKED=0"),  # -O2 takes twice as long to compile, and would run no test sooner
    "checked": ("-O1", "-g1", "-DSIMT_CHECKED=1", "-fsanitize=thread", *CHECKS),
    "coverage": ("-O0", "-g1", "-DSIMT_CHECKED=0", "--coverage"),
}


class EmulatorError(AssertionError):
    """A kernel did what it may not, or a launch is impossible."""


class Options(ctypes.Structure):
    """How a launch is run; see runtime.h."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("order", ctypes.c_int),
        ("workers", ctypes.c_int),
        ("check", ctypes.c_int),
        ("strict_blocks", ctypes.c_int),
    )


def cache_folder() -> Path:
    """Where builds are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmc-tests/cuda"
    folder = Path(os.environ.get("SIMT_CACHE") or folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiler() -> str:
    """The C++ compiler."""
    return os.environ.get("CXX", "g++")


@cache
def _version(program: str) -> str:
    return subprocess.check_output([program, "--version"], text=True)


def included(text: str, folders: Sequence[Path]) -> str:
    """The text with that of every file it includes by quotes, however deep: what a build depends on."""
    seen: dict[Path, str] = {}

    def follow(text: str) -> None:
        for name in re.findall(r'^\s*#include "([^"]+)"', text, re.M):
            path = next((folder / name for folder in folders if (folder / name).exists()), None)
            if path is not None and path not in seen:
                seen[path] = path.read_text()
                follow(seen[path])

    follow(text)
    return "".join([text, *(f"\n// {path.name}\n{body}" for path, body in sorted(seen.items()))])


def build(key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The file for this key, made by ``make(path)`` unless it is there; one process makes it, others wait."""
    return build_at(cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}{suffix}", make)


def build_at(path: Path, make: Callable[[Path], None]) -> Path:
    """The file at this path, made by ``make(path)`` unless it is there."""
    if path.exists():
        return path
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
            make(partial)
            os.replace(partial, path)
    return path


def run_compiler(arguments: Sequence[str | Path]) -> None:
    """Run g++.

    Raises:
        EmulatorError: it fails; with what it says.
    """
    done = subprocess.run([compiler(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise EmulatorError(f"{compiler()} can't compile this:\n{done.stderr[:6000]}")


@cache
def runtime_library() -> Path:
    """The emulator itself, which the libraries of kernels find when they are loaded."""
    sources = [*sorted(SIMT.glob("*.cpp")), *sorted(SIMT.glob("*.h"))]
    key = "".join(path.read_text() for path in sources) + _version(compiler())
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-Wl,-soname,libsimt.so", "-I", SIMT]
    files = [path for path in sources if path.suffix == ".cpp"]
    return build(key, ".so", lambda path: run_compiler([*flags, *files, "-o", path, "-ldl", "-lpthread"]))


def library_of(kernel: Kernel, mode: str = "checked") -> Path:
    """The library with this kernel."""
    return libraries([kernel], mode)[kernel.name]


def libraries(kernels: Iterable[Kernel], mode: str = "checked") -> dict[str, Path]:
    """The library of each kernel. Those that are missing are compiled, kernels of one source at once."""
    kernels = list(kernels)
    places = {kernel.name: _place(kernel, mode) for kernel in kernels}
    groups: dict[tuple[str, type[Any]], list[Kernel]] = {}
    for kernel in {kernel.name: kernel for kernel in kernels if not places[kernel.name].exists()}.values():
        groups.setdefault((kernel.source, kernel.params), []).append(kernel)
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda group: _build_group(group, mode), groups.values()):
            pass
    return places


@cache
def _place(kernel: Kernel, mode: str) -> Path:
    key = [kernel.name, included(kernel.source_text, INCLUDES), mode, *FLAGS, *MODES[mode]]
    key = "|".join([*key, _version(compiler()), str(ROOT) if mode == "coverage" else ""])
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def _build_group(kernels: list[Kernel], mode: str) -> None:
    """Compile kernels of one source into a library; the place of each becomes a link to it."""
    head = kernels[0].source_text.splitlines()[:-1]  # its last line is the instance
    text = "\n".join([*head, *(kernel.source_text.splitlines()[-1] for kernel in kernels), ""])
    places = [_place(kernel, mode) for kernel in kernels]

    def make(path: Path) -> None:
        source = path.with_suffix(".cpp")
        source.write_text(text)
        linked = path.with_suffix(".o")
        run_compiler([*FLAGS, *MODES[mode], *(f"-I{folder}" for folder in INCLUDES), "-c", source, "-o", linked])
        # Without the libraries of -fsanitize: the emulator has the hooks.
        run_compiler(["-shared", linked, "-o", path, *(["--coverage"] if mode == "coverage" else [])])
        if mode != "coverage":
            for part in (source, linked):
                part.unlink()

    library = build("|".join(place.name for place in places), ".so", make) if len(places) > 1 else None
    for place in places:
        if library is None:
            build_at(place, make)
        elif not place.exists():
            partial = place.with_name(f"{place.stem}.{os.getpid()}.link")
            partial.symlink_to(library.name)
            os.replace(partial, place)


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    pointer, size, number, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p
    library.simt_register.argtypes = [pointer, size, number, number, text, number]
    library.simt_unregister.argtypes = [pointer]
    library.simt_launch.argtypes = [pointer, pointer, pointer, size, pointer, pointer]
    library.simt_launch.restype = text
    library.simt_take_reports.argtypes = [text, size]
    library.simt_stats.argtypes = [pointer]
    return library


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    _runtime()
    return ctypes.CDLL(str(path))


def _lines(report: str) -> str:
    """The report with code addresses as lines of the source."""
    for path, offset in sorted(set(re.findall(r"at (\S+)\+0x([0-9a-f]+)", report))):
        found = subprocess.run(["addr2line", "-e", path, f"0x{offset}"], capture_output=True, text=True).stdout.strip()
        report = report.replace(f"at {path}+0x{offset}", f"at {found.removeprefix(f'{PLUGINS}/')}")
    return report


class Emulator:
    """A device in this process. ``order`` of threads and blocks: 0 in order, 1 reversed, 2 random by ``seed``."""

    def __init__(self, mode: str = "checked", order: int = 2, seed: int = 1) -> None:
        self.mode, self.order, self.seed = os.environ.get("SIMT_MODE") or mode, order, seed
        self._runtime = _runtime()
        self._buffers: dict[int, np.ndarray] = {}

    def alloc(self, size: int, name: str = "", *, writable: bool = True, known: bool = False) -> int:
        """The address of so many bytes, filled with 0xff. ``known``: it is no mistake to read them as they are."""
        raw = np.full(size + 512, 0xFF, np.uint8)
        address = -(-raw.ctypes.data // 256) * 256
        self._buffers[address] = raw
        label = (name or f"buffer {len(self._buffers)}").encode()
        self._runtime.simt_register(address, size, writable, not known, label, self.mode == "checked")
        return address

    def put(self, array: np.ndarray, name: str = "", *, writable: bool = False) -> int:
        """The address of a copy of a contiguous array; read-only for kernels unless it is ``writable``."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.alloc(data.nbytes, name, writable=writable, known=True)
        self._bytes(address, data.nbytes)[:] = data
        return address

    def get(self, address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """What stands at the address, copied."""
        kind = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        size = int(np.prod(shape)) * kind.itemsize
        return self._bytes(address, size).copy().view(kind).reshape(shape)

    def set(self, address: int, array: np.ndarray) -> None:
        """Overwrite what stands at the address."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._bytes(address, data.nbytes)[:] = data

    def tensor(self, array: np.ndarray, name: str = "", *, writable: bool = False) -> Tensor:
        """A copy on the device with the strides of the array (0 broadcasts, as anywhere)."""
        size = array.dtype.itemsize
        strides = tuple(stride // size for stride in array.strides)
        if array.size == 0 or array.flags.c_contiguous:
            return Tensor(self.put(array, name, writable=writable), array.dtype.name, array.shape, strides)
        if min(strides) < 0:
            raise ValueError("tensors have no negative strides")
        extent = 1 + sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True))
        memory = np.zeros(extent, array.dtype)
        np.lib.stride_tricks.as_strided(memory, array.shape, array.strides)[...] = array
        return Tensor(self.put(memory, name, writable=writable), array.dtype.name, array.shape, strides)

    def empty(self, shape: Sequence[int], dtype: str, name: str = "") -> Tensor:
        """A contiguous output."""
        kind = np.dtype(DTYPES.get(dtype, dtype))
        strides = np.empty(shape, kind).strides
        address = self.alloc(int(np.prod(shape)) * kind.itemsize, name)
        return Tensor(address, dtype, tuple(shape), tuple(stride // kind.itemsize for stride in strides))

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels at once: a compiler for each that is launched would take most of the time of a test."""
        libraries(kernels, self.mode)

    def launch(self, launch: Launch, *, order: int | None = None, seed: int | None = None) -> None:
        """Run a kernel to its end.

        Raises:
            EmulatorError: it can't be launched so, or did what it may not.
        """
        kernel = launch.kernel
        library = _loaded(library_of(kernel, self.mode))
        entry = ctypes.addressof(ctypes.c_char.in_dll(library, kernel.name))
        options = Options(self.seed if seed is None else seed, self.order if order is None else order, 2, 0, 1)
        grid, block = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(kernel.threads, 1, 1)
        params = type(launch.params).from_buffer_copy(launch.params)
        error = self._runtime.simt_launch(
            entry, grid, block, launch.shared, ctypes.byref(params), ctypes.byref(options)
        )
        text = ctypes.create_string_buffer(1 << 16)
        self._runtime.simt_take_reports(text, len(text))
        if error is not None:
            raise EmulatorError(f"{kernel.name} {launch.grid}: {error.decode()}{_lines(text.value.decode())}")

    def sync(self) -> None:
        """Launches have run when they return."""

    def run(self, launches: Iterable[Launch], **options: Any) -> None:
        """Run launches in order."""
        launches = list(launches)
        self.prepare(launch.kernel for launch in launches)
        for one in launches:
            self.launch(one, **options)

    def free(self) -> None:
        """Give all memory back."""
        for address in self._buffers:
            self._runtime.simt_unregister(address)
        self._buffers.clear()

    def __del__(self) -> None:
        self.free()  # what is registered would outlive the memory, and be taken for what comes there next

    def __enter__(self) -> "Emulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def _bytes(self, address: int, size: int) -> np.ndarray:
        for start, raw in self._buffers.items():
            if start <= address and address + size <= start + len(raw) - 255:
                offset = address - raw.ctypes.data
                return raw[offset : offset + size]
        raise ValueError(f"no buffer holds {size} bytes at {address:#x}")


def stats() -> dict[str, int]:
    """What all launches of this process did."""
    counters = (ctypes.c_uint64 * len(COUNTERS))()
    _runtime().simt_stats(counters)
    return dict(zip(COUNTERS, counters, strict=True))
