"""Machine code has the instructions that belong there, and spills nothing."""

from pathlib import Path

import numpy as np
import pytest
from attention_cuda import Pool, random_rows
from contract import converted, reference, run
from emulator import PLUGINS, SIMT
from sass import (
    Code,
    Recorder,
    attention_instances,
    disassemble,
    problems,
    product_instances,
    tensor_operations,
)
from test_ptx import LAYOUTS, layout
from test_ptx_products import FORMATS, example, product
from test_small_ops import CONTRACTS

from llmc.compiler.cuda.nvrtc import compile_kernels
from llmc.plugins import all_ops
from llmc.plugins.cuda import Kernel


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


def attention_kernels(kv: str) -> dict[str, Kernel]:
    """Of a step of many rows and one of few, with heads of 64 dims."""
    rows = random_rows(np.random.default_rng(1), (2, 1, 64, 64), 70, "bfloat16")
    with Recorder() as device:
        device.run(Pool(device, (1, 64, 64), kv, (70,)).launches([rows])[0])
        return {name: kernel for name, kernel in device.kernels.items() if "store" not in name}


@pytest.mark.parametrize(("form", "arch"), [(0, "sm_120"), (1, "sm_100"), (3, "sm_80"), (5, "sm_90"), (6, "sm_89")])
def test_products_of_all_formats(form: int, arch: str, tmp_path: Path) -> None:
    """A kind of weight and a target each; build_scripts/cuda_sass.py has all kernels for all targets."""
    with Recorder() as device:
        format, group, compute, x_group, zeros, capability, _ = FORMATS[form]
        product(*example(3, format, group, compute, x_group, zeros, capability))(device)
        (kernel,) = (kernel for name, kernel in device.kernels.items() if name.startswith("gemm"))
    code, ptx = code_of(kernel, arch, tmp_path)
    assert tensor_operations(ptx, arch) and problems(kernel, code, ptx, arch) == []


@pytest.mark.parametrize(("kv", "arch"), [("bfloat16", "sm_90"), ("int8", "sm_80")])
def test_attention_uses_tensor_cores_and_spills_nothing(kv: str, arch: str, tmp_path: Path) -> None:
    kernels = attention_kernels(kv)
    assert len(kernels) == 3
    for name, kernel in kernels.items():
        code, ptx = code_of(kernel, arch, tmp_path)
        assert problems(kernel, code, ptx, arch) == []
        assert tensor_operations(ptx, arch) == (set() if "combine" in name else {"HMMA"})


@pytest.mark.parametrize(("dims", "arch"), [(256, "sm_90"), (128, "sm_120")])
def test_decodes_of_wide_heads_spill_nothing(dims: int, arch: str, tmp_path: Path) -> None:
    """Where registers are scarce: sums of 128 dims for a lane, and the target whose compiler takes most of them."""
    kernels = attention_instances([(dims, dims)], ["bfloat16"])
    decode = next(kernel for kernel in kernels if "decode" in kernel.name)
    code, ptx = code_of(decode, arch, tmp_path)
    assert problems(decode, code, ptx, arch) == []


def test_products_of_models_have_tiles_for_few_rows_and_many() -> None:
    """On sm_90 and sm_120, which differ in shared memory and in what multiplies fp8."""
    found = {capability: {kernel.name for kernel in product_instances(capability)} for capability in (90, 120)}
    for names in found.values():
        for tile in ("bf16_int416_f32_1x1x1", "bf16_int416_f32_2x2x4", "Signed8_int832_f32_2x2x4", "plain16_4x2x4"):
            assert any(tile in name for name in names), tile
    assert any("Float8" in name for name in found[120] - found[90])


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
