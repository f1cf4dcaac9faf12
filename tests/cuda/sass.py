"""Checks of machine code, by cuobjdump: tensor cores where they belong, no spills, registers that fit.

Needs the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, no GPU and no toolkit.
"""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from emulator import Emulator

from llmc.plugins import cuda_gemm, cuda_packing, cuda_wgmma
from llmc.plugins.cuda import SM_90A, Kernel, Launch
from llmc.plugins.paged_attention import cuda as attention

REGISTERS = 65536
"""Of a multiprocessor."""
FORMATS = (
    *(("plain", 0, ""), ("int4", 128, "bfloat16"), ("int8", 128, "bfloat16")),
    *(("int4", 128, "int8"), ("int8", 0, "int8"), ("fp8", 0, "fp8")),
)
"""Of weights: the format, columns that share a scale, what is multiplied."""
LOCAL = re.compile(r"sin|cos")
"""Kernels that may use local memory: the sine of a large angle looks digits up in it."""


@dataclass(frozen=True)
class Code:
    """What the machine code of a kernel uses; ``operations``: how often each instruction stands in it."""

    registers: int
    stack: int
    operations: dict[str, int]


class Recorder(Emulator):
    """A device that runs nothing, and remembers what it was to run."""

    def __init__(self, mode: str = "plain", order: int = 0, seed: int = 1) -> None:
        super().__init__("plain")
        self.kernels: dict[str, Kernel] = {}

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Nothing will run."""

    def launch(self, launch: Launch, *, order: int | None = None, seed: int | None = None) -> None:
        """Remember the kernel."""
        self.kernels[launch.kernel.name] = launch.kernel

    def run(self, launches: Iterable[Launch], **options: Any) -> None:
        """Remember the kernels."""
        for one in launches:
            self.launch(one)


def attention_instances(heads: Sequence[tuple[int, int]], kv: Sequence[str]) -> Iterator[Kernel]:
    """Those of sequences of many rows and of few, with these dims of keys and values and dtypes of the cache."""
    p = attention.AttentionParams(group=1, sequences=1, kv_heads=1, max_units=1, part_rows=1)
    for widths, dtype, biased in itertools.product(heads, kv, (False, True)):
        yield attention._prefill(p, ("bfloat16", dtype), widths, biased, 100).kernel
        yield attention._decode(p, ("bfloat16", dtype), widths, biased).kernel


def product_instances(capability: int) -> Iterator[Kernel]:
    """Those of bfloat16 rows and a weight [4096, 4096] of each format, for few rows and for many."""
    limits = cuda_gemm.shared_limits(capability)
    for format, group, compute in FORMATS:
        step = cuda_packing.step_of(format, compute, capability)
        layout = cuda_packing.Layout(4096, 4096, format, step, group)
        weight = cuda_gemm.Weight(layout, "bfloat16" if format == "plain" else "uint8", 0, compute, group)
        if capability == SM_90A and cuda_wgmma.multiplies(weight):
            yield from wide_instances(weight)
            continue
        kind = cuda_gemm.math_of(weight, "bfloat16", capability)
        of = cuda_gemm._weight_type(weight, kind), kind, layout, weight.scale, weight.zeros
        for rows in (1, 32, 64, 4096):
            yield cuda_gemm.instance(*of, cuda_gemm.shape_for(rows, weight, limits), limits).kernel


def wide_instances(weight: cuda_gemm.Weight) -> Iterator[Kernel]:
    """Those of wgmma, a tile each."""
    kind = cuda_gemm.math_of(weight, "bfloat16", SM_90A)
    for rows in cuda_wgmma.TILES:
        yield cuda_wgmma.instance(cuda_gemm._weight_type(weight, kind), kind, weight, rows)[0]


@cache
def _tools() -> tuple[str, dict[str, str]]:
    environment, spec = dict(os.environ), importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for folder in sorted(Path(root).glob("*/bin")):
            environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    program = shutil.which("cuobjdump", path=environment["PATH"])
    if program is None:
        raise FileNotFoundError("cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return program, environment


def disassemble(cubin: Path) -> dict[str, Code]:
    """The kernels of a cubin."""
    program, environment = _tools()

    sass = subprocess.check_output([program, "-res-usage", "-sass", str(cubin)], env=environment, text=True)
    found = {}
    usage = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", sass)
    bodies = dict(re.findall(r"Function : (\w+)\n(.*?)(?=\n\s+Function : |\Z)", sass, re.S))
    for name, registers, stack in usage:
        operations: dict[str, int] = {}
        for full in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", bodies[name], re.M):
            operations[full] = operations.get(full, 0) + 1
        found[name] = Code(int(registers), int(stack), operations)
    return found


def tensor_operations(ptx: str, arch: str) -> set[str]:
    """The instructions that the tensor-core instructions of PTX have to become on a target such as sm_90."""
    number = int(arch.removeprefix("sm_").removesuffix("a"))
    groups = {"bf16": "HGMMA", "f16": "HGMMA", "e4m3": "QGMMA", "s8": "IGMMA"}
    names = {groups[kind] for kind in re.findall(r"wgmma\.mma_async\S*\.(bf16|f16|s8|e4m3)\b", ptx)}
    if "cp.async.bulk" in ptx:
        names.add("UBLKCP")
    for kind in set(re.findall(r"mma\.sync\S*\.(bf16|f16|s8|e4m3)\.(?:f32|s32)\b", ptx)):
        if kind == "e4m3":
            names.add("QMMA" if number in (89, 120, 121) else "HMMA")  # the others unpack bytes to halves
        else:
            names.add("IMMA" if kind == "s8" else "HMMA")
    return names


def problems(kernel: Kernel, code: Code, ptx: str, arch: str) -> list[str]:
    """What is wrong with the machine code of a kernel."""
    found = [f"no {name}" for name in sorted(tensor_operations(ptx, arch)) if not code.operations.get(name)]
    spills = code.operations.get("LDL", 0) + code.operations.get("STL", 0)
    if (spills or code.stack) and not LOCAL.search(kernel.name):
        found.append(f"{spills} accesses of local memory, {code.stack} bytes of stack")
    warps = -(-kernel.threads // 32)
    needed = -(-code.registers // 8) * 8 * 32 * warps * kernel.blocks_per_sm
    if needed > REGISTERS:
        found.append(f"{code.registers} registers: {kernel.blocks_per_sm} blocks of {kernel.threads} don't fit")
    return found
