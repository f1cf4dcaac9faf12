"""What a step of a plan becomes on a CUDA device: the form that the compiler, the runtime and the tests share.

``plugins/<op>/cuda.py`` holds ``launches(call) -> list[Launch]``: the kernels of one step, in order. It decides by the
dtypes, shapes and attributes of the call alone, never by what is in memory, so that the compiler finds out which
kernels an engine needs by asking for the launches of its steps. The kernels are templates in
``plugins/<op>/<op>_cuda.cuh``; a `Kernel` is one instance, and `source_text` what NVRTC and the emulator of the tests
compile. See csrc/cuda/device.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

Params = ctypes.Structure
"""The one argument of a kernel: pointers (c_void_p), c_int32, c_int64, c_uint32 and c_float, passed by value."""

_TYPES = {
    ctypes.c_void_p: "void*",
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_float: "float",
}


SM_90A = 91
"""What ``Call.capability`` is in engines for sm_90a: compute capability 9.0 with its own instructions (wgmma, TMA).

No chip has compute capability 9.1. Only engines that are built for sm_90a by name have it.
"""


def capability_of(arch: str) -> int:
    """What kernels for an architecture are chosen by: 90 for sm_90, `SM_90A` for sm_90a."""
    return SM_90A if arch == "sm_90a" else int(arch.removeprefix("sm_"))


@cache
def params_type(name: str, pointers: str, longs: str, ints: str) -> Any:
    """A struct of pointers, int64 and int32 fields, named in one string each."""
    kinds = ((pointers, ctypes.c_void_p), (longs, ctypes.c_int64), (ints, ctypes.c_int32))
    fields = [(field, kind) for names, kind in kinds for field in names.split()]
    return type(name, (Params,), {"_fields_": fields})


@dataclass(frozen=True)
class Kernel:
    """An instance of a kernel template.

    ``name``: its symbol, which says everything that ``function`` and ``threads`` do. ``source``: the file below
    plugins/ that defines ``function``, such as ``rope<BF16>``; it is called with the params. ``blocks_per_sm``: at
    least so many have to fit, which caps registers.
    """

    name: str
    source: str
    function: str
    params: type[Params]
    threads: int
    blocks_per_sm: int = 1

    @property
    def source_text(self) -> str:
        """One translation unit: the struct of the params, then the template, then the instance."""
        fields = "".join(f" {_TYPES[kind]} {name};" for name, kind in self.params._fields_)  # type: ignore[misc]
        name = self.params.__name__
        return (
            f'#include "csrc/cuda/device.cuh"\nstruct {name} {{{fields} }};\n#include "{self.source}"\n'
            f"KERNEL({self.name}, {name}, {self.threads}, {self.blocks_per_sm}) {{ {self.function}(p); }}\n"
        )


@dataclass(frozen=True)
class Launch:
    """A kernel with its params, its grid and the bytes of its dynamic shared memory."""

    kernel: Kernel
    params: Params
    grid: tuple[int, int, int]
    shared: int = 0


@dataclass(frozen=True)
class Tensor:
    """A strided view of device memory. ``strides`` in elements; dtypes as in runtime/plan.py."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class BatchTensors:
    """Where the arrays of runtime.batch.Batch stand on the device, and how many rows there is room for.

    A step may have fewer sequences and rows than the bucket it runs in: surplus sequences have no rows (their entries
    of cu_seqlens repeat the last), and rows behind the last sequence are computed, but never written to the cache.
    """

    position_ids: int
    cu_seqlens: int
    num_computed: int
    block_tables: int
    tree_mask: int
    """0: no step of this bucket has a tree."""
    tokens: int
    rows: int
    sequences: int
    max_blocks: int
    tree_words: int
    longest: int
    """Rows that one sequence may have; 1: decode."""


@dataclass(frozen=True)
class Cache:
    """One KV slot of the pool: addresses of keys and values (codes), and of their scales (0: the dtype has none)."""

    keys: int
    values: int
    key_scales: int
    value_scales: int
    dtype: str
    block_size: int
    window: int


class Scratch(Protocol):
    """Gives device memory that only this step uses."""

    def __call__(self, size: int) -> int:
        """The address of so many bytes, aligned to 256."""
        ...


@dataclass(frozen=True)
class Call:
    """One step of a plan with its tensors. ``capability``: of the device, such as 90."""

    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Any]
    batch: BatchTensors
    caches: tuple[Cache, ...]
    scratch: Scratch
    capability: int
    table: Callable[[bytes], int]
    """Puts constant bytes on the device, once for the same bytes, and gives their address."""


LaunchMaker = Callable[[Call], list[Launch]]
