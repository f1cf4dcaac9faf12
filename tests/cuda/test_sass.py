"""Machine code has the instructions that belong there, and spills nothing."""

from pathlib import Path

import numpy as np
import pytest
from contract import converted, reference, run
from emulator import PLUGINS, SIMT, Emulator
from sass import Code, disassemble, problems, tensor_operations
from test_ptx import LAYOUTS, layout
from test_small_ops import CONTRACTS

from llmc.compiler.cuda.nvrtc import compile_kernels
from llmc.plugins import all_ops
from llmc.plugins.cuda import Kernel, Launch


class Recorder(Emulator):
    """A device that runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, Kernel] = {}

    def launch(self, launch: Launch, *, order: int | None = None, seed: int | None = None) -> None:
        self.kernels[launch.kernel.name] = launch.kernel


def code_of(kernel: Kernel, arch: str, folder: Path) -> tuple[Code, str]:
    """Machine code, and the PTX for the same target."""
    images = [compile_kernels([kernel], a, folders=(PLUGINS, SIMT))[kernel.name] for a in (arch, f"compute_{arch[3:]}")]
    (folder / "one.cubin").write_bytes(images[0])
    return disassemble(folder / "one.cubin")[kernel.name], images[1].decode()


@pytest.mark.parametrize(
    ("name", "arch", "operation"),
    [("bf16", "sm_80", "HMMA"), ("s8", "sm_90", "IMMA"), ("e4m3", "sm_89", "QMMA"), ("e4m3", "sm_90", "HMMA")],
)
def test_products_use_tensor_cores(name: str, arch: str, operation: str, tmp_path: Path) -> None:
    kernel = layout(name, LAYOUTS[name][0])
    code, ptx = code_of(kernel, arch, tmp_path)
    assert tensor_operations(ptx, arch) == {operation}
    assert problems(kernel, code, ptx, arch) == []
    without = Code(code.registers, code.stack, {**code.operations, operation: 0})
    assert problems(kernel, without, ptx, arch) == [f"no {operation}"]


def test_spills_and_too_many_registers_are_problems() -> None:
    kernel = Kernel("kernel_big", "layouts.cuh", "layout<BF16>", layout("bf16", "").params, 256, 2)
    assert problems(kernel, Code(128, 0, {}), "", "sm_90") == []
    assert problems(kernel, Code(129, 0, {}), "", "sm_90") == ["129 registers: 2 blocks of 256 don't fit"]
    assert problems(kernel, Code(40, 8, {"STL": 2}), "", "sm_90") == ["2 accesses of local memory, 8 bytes of stack"]


@pytest.mark.parametrize("name", ["norm", "softmax", "rope"])
def test_small_ops_spill_nothing(name: str, tmp_path: Path) -> None:
    contract, dtype = CONTRACTS[name]
    op = all_ops()[contract.op]
    sample = converted(op, contract, next(iter(op.samples(np.random.default_rng(7)))), dtype)
    with Recorder() as device:
        outputs = [(e.shape, e.dtype.name) for e in reference(op, contract, sample, dtype)]
        run(contract, sample, dtype, device, outputs)
        for kernel in device.kernels.values():
            code, ptx = code_of(kernel, "sm_90", tmp_path)
            assert problems(kernel, code, ptx, "sm_90") == []
