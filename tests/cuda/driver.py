"""A driver for machines without a GPU, under the real cuda.bindings: kernels run on the emulator.

    with fake_gpu(kernels, capability=90):   # in this process, or in one that is started with environment(kernels)
        LLM(engine).generate(...)

See driver/state.h for what it is strict about. A fault of a kernel is CUDA_ERROR_ILLEGAL_ADDRESS; what happened, and
where, stands on stderr.
"""

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from emulator import ROOT, SIMT, build_at, cache_folder, libraries, run_compiler, runtime_library

from llmc.plugins.cuda import Kernel

SOURCES = ROOT / "tests/cuda/driver"

COUNTS = ("allocations", "bytes", "pinned", "modules", "graphs", "streams", "contexts", "launches", "waits", "copies")
"""What a process holds of the driver, and from ``launches`` on what it did."""


@cache
def driver_folder() -> Path:
    """The folder with libcuda.so.1."""
    sources = [*sorted(SOURCES.glob("*.cpp")), *sorted(SOURCES.glob("*.h")), SIMT / "simt.h"]
    key = "".join(path.read_text() for path in [*sources, Path(__file__)]) + runtime_library().name
    folder = cache_folder() / f"driver-{hashlib.sha256(key.encode()).hexdigest()[:24]}"

    def make(path: Path) -> None:
        path.mkdir()
        (path / "libsimt.so").symlink_to(runtime_library())  # one file: a process has one emulator, by any name
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"]
        files = [source for source in sources if source.suffix == ".cpp"]
        libraries = [f"-L{path}", "-lsimt", "-Wl,-rpath,$ORIGIN", "-ldl"]
        run_compiler([*flags, *files, "-o", path / "libcuda.so.1", *libraries])

    return build_at(folder, make)


def environment(
    kernels: Iterable[Kernel], *, capability: int = 90, mode: str = "checked", **settings: int
) -> dict[str, str]:
    """The variables with which a process finds the driver, and kernels that it may launch.

    ``settings``: driver (version, 13000), devices (1), memory (bytes), order (of threads: 0, 1, 2).
    """
    places = libraries(list(kernels), mode)
    key = "|".join(f"{name}={path.name}" for name, path in sorted(places.items()))
    folder = cache_folder() / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:24]}"

    def make(path: Path) -> None:
        path.mkdir()
        for name, library in places.items():
            (path / f"{name}.so").symlink_to(library)

    variables = {"SIMT_KERNELS": str(build_at(folder, make)), "SIMT_CAPABILITY": str(capability)}
    variables |= {f"SIMT_{name.upper()}": str(value) for name, value in settings.items()}
    old = os.environ.get("LD_LIBRARY_PATH", "")
    return variables | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(driver_folder()), old]))}


def counts(library: ctypes.CDLL) -> dict[str, int]:
    """By the names of COUNTS; ``library``: what `fake_gpu` gives."""
    found = (ctypes.c_uint64 * len(COUNTS))()
    library.fake_counts(found)
    return dict(zip(COUNTS, found, strict=True))


def held(library: ctypes.CDLL) -> dict[str, int]:
    """Only what is held now, and is more than nothing."""
    return {name: number for name, number in list(counts(library).items())[:7] if number}


@contextlib.contextmanager
def fake_gpu(
    kernels: Iterable[Kernel], *, capability: int = 90, mode: str = "checked", **settings: int
) -> Iterator[ctypes.CDLL]:
    """The driver in this process. No handle of a driver call may outlive it."""
    variables = environment(kernels, capability=capability, mode=mode, **settings)
    old = {name: os.environ.get(name) for name in {*variables, *(n for n in os.environ if n.startswith("SIMT_"))}}
    # The bindings open libcuda.so.1, which is there already.
    library = ctypes.CDLL(str(driver_folder() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    library.fake_reset()
    try:
        for name in old:
            os.environ.pop(name, None)
        os.environ.update(variables)
        yield library
    finally:
        library.fake_reset()
        for name, value in old.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
