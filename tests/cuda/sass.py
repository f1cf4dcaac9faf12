"""Checks of machine code, by cuobjdump: tensor cores where they belong, no spills, registers that fit.

Needs the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, no GPU and no toolkit.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from emulator import Emulator

from llmc.plugins.cuda import Kernel, Launch

REGISTERS = 65536
"""Of a multiprocessor."""
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
    number = int(arch.removeprefix("sm_"))
    names = set()
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
