"""Compile kernels with NVRTC: no GPU, no driver and none of CUDA's headers are needed.

The same kernel gives the same bytes on every machine with the same NVRTC, so results are kept by content.
"""

import ctypes
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llmc
from llmc import plugins
from llmc.errors import CompileError
from llmc.plugins.cuda import Kernel

PLUGINS = Path(plugins.__file__).parent
INSTALL = "pip install 'llmc-engine[cuda-build]'"
OPTIONS = ("--std=c++17", "--fmad=false")
"""No fused multiply-add but where kernels say so: every compiler gives the same bits."""
DIGEST = 32
"""Bytes of the digest that stands before what is kept."""


def compile_kernels(
    kernels: Iterable[Kernel], arch: str, *, folders: Sequence[Path] = (PLUGINS,), cache_folder: Path | None = None
) -> dict[str, bytes]:
    """What each kernel compiles to, by name: a cubin for an arch such as ``sm_90``, PTX for one such as ``compute_90``.

    Args:
        kernels: what to compile; those with equal names must be equal.
        arch: the target.
        folders: where included files are looked up.
        cache_folder: where results are kept; default ~/.cache/llmc/cuda.

    Raises:
        CompileError: NVRTC is missing, does not know the arch, or can't compile a kernel (with its log).
    """
    unique: dict[str, Kernel] = {}
    for kernel in kernels:
        if unique.setdefault(kernel.name, kernel) != kernel:
            raise CompileError(f"two different kernels are called {kernel.name}")
    check_arch(arch)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda kernel: _cached(kernel, arch, folders, cache_folder), unique.values())
        return dict(zip(unique, results, strict=True))


def nvrtc_version() -> str:
    """The version of NVRTC, such as 13.0."""
    major, minor = _values(_nvrtc(), _nvrtc().nvrtcVersion())
    return f"{major}.{minor}"


def check_arch(arch: str) -> None:
    """Refuse a target that this NVRTC does not know.

    Raises:
        CompileError: it does not.
    """
    known = known_archs()
    number = re.fullmatch(r"(sm|compute)_(\d+)[af]?", arch)
    if not number or int(number[2]) not in known or int(number[2]) < 80:
        names = ", ".join(f"sm_{number}" for number in known if number >= 80)
        raise CompileError(f"NVRTC {nvrtc_version()} has no target {arch} for these kernels; it knows {names}")


@cache
def known_archs() -> tuple[int, ...]:
    """The targets of this NVRTC, such as 90."""
    (numbers,) = _values(_nvrtc(), _nvrtc().nvrtcGetSupportedArchs())
    return tuple(numbers)


def _cached(kernel: Kernel, arch: str, folders: Sequence[Path], cache_folder: Path | None) -> bytes:
    headers = included(kernel.source_text, folders)
    versions = [llmc.__version__, nvrtc_version()]  # of llmc: others may keep something else
    parts = [*versions, arch, *OPTIONS, kernel.source_text, *(text for pair in headers.items() for text in pair)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmc/cuda"
    path = (cache_folder or root) / f"{digest[:32]}.{arch}"
    with suppress(OSError):  # none, or one that can't be read
        kept = path.read_bytes()
        image = kept[DIGEST:]
        if kept[:DIGEST] == hashlib.sha256(image).digest():  # else it was damaged on the disk
            return image
    image = compile_text(kernel.source_text, headers, arch, kernel.name)
    _keep(path, hashlib.sha256(image).digest() + image, f"{os.getpid()}.{kernel.name}")
    return image


def _keep(path: Path, kept: bytes, writer: str) -> None:
    """Where nothing can be written (a full disk, a read-only home), kernels are compiled again the next time."""
    partial = path.with_name(f"{path.name}.{writer}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(kept)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def included(text: str, folders: Sequence[Path]) -> dict[str, str]:
    """Every file that the text includes by quotes, however deep, by the name it is included by.

    Raises:
        CompileError: one is missing.
    """
    found: dict[str, str] = {}
    for name in re.findall(r'^\s*#include "([^"]+)"', text, re.M):
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            if name in (
                "simt_device.h",
                "simt_hopper.h",
            ):  # of the tests' emulator: the branch that GPU compilers leave out
                continue
            raise CompileError(f"there is no file {name} in {' or '.join(map(str, folders))}")
        found |= {name: path.read_text(), **included(path.read_text(), folders)}
    return dict(sorted(found.items()))


def compile_text(text: str, headers: dict[str, str], arch: str, name: str) -> bytes:
    """Compile one translation unit.

    Raises:
        CompileError: with the compiler's log.
    """
    nvrtc = _nvrtc()
    names, texts = [key.encode() for key in headers], [value.encode() for value in headers.values()]
    (program,) = _values(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", len(names), texts, names))
    try:
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status):
            log = _text(nvrtc, program, "ProgramLog").decode(errors="replace")
            raise CompileError(f"{name} does not compile for {arch}:\n{log}")
        return _text(nvrtc, program, "CUBIN") if arch.startswith("sm_") else _text(nvrtc, program, "PTX").rstrip(b"\0")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: Any, program: object, what: str) -> bytes:
    (size,) = _values(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    out: bytes = b" " * size  # the binding writes into it
    _values(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, out))
    return out.rstrip(b"\0") if what == "ProgramLog" else out


def _values(nvrtc: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = result
    if int(status):
        (_, message) = nvrtc.nvrtcGetErrorString(status)
        raise CompileError(f"NVRTC failed: {message.decode()}")
    return tuple(values)


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise CompileError(f"building for CUDA needs cuda-bindings and NVRTC: {INSTALL}") from None
    try:
        _load_library()
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library itself is missing
        raise CompileError(f"building for CUDA needs NVRTC ({error}): {INSTALL}") from None
    return nvrtc


def _load_library() -> None:
    """Load the library of the package nvidia-cuda-nvrtc from wherever Python finds packages.

    The bindings look into the environment's own folder alone, and use a library that is there already.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.13")):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return
