"""Products by wgmma, for engines built for sm_90a: as the references say, and with the same bits for any rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract import Contract, check_op
from emulator import PLUGINS, Emulator
from ptx import Interpreter
from sass import Recorder, disassemble, problems, product_instances, tensor_operations
from test_products import KEPT, linear_samples, packed_codes, packed_linear, quantized_samples
from test_products import run as run_on_sm_90

from llmc.compiler.cuda.nvrtc import compile_kernels
from llmc.plugins import Sample, cuda_wgmma
from llmc.plugins.cuda import SM_90A
from llmc.plugins.cuda_packing import common
from llmc.plugins.linear import cuda_packing as linear_packing
from llmc.plugins.quantized_linear.reference import random_weight

BFLOAT16 = ml_dtypes.bfloat16
FORMATS = [
    # format, group, compute, zeros, the instruction
    ("plain", 0, "", "", "HGMMA"),
    ("int4", 128, "bfloat16", "uint8", "HGMMA"),
    ("int4", 32, "bfloat16", "", "HGMMA"),
    ("int8", 64, "bfloat16", "", "HGMMA"),
    ("int4", 0, "int8", "", "IGMMA"),
    ("int8", 0, "int8", "", "IGMMA"),
    ("fp8", 0, "fp8", "", "QGMMA"),
    ("fp8", 0, "fp8", "", "HGMMA"),  # packed for sm_90 too
]


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows have all ways in one block here, though the weights are small."""
    monkeypatch.setattr(cuda_wgmma, "FEW_BLOCKS", 0)


def packed_quantized(_: str, sample: Sample, inputs: list[Any]) -> list[Any]:
    x, codes, scale, zero, *rest = inputs
    return [x, *packed_codes(codes, scale, zero, sample.attributes, SM_90A), *rest]


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_linear(dtype: str) -> None:
    names = check_op(Contract("linear", KEPT, packed_linear, samples=linear_samples(dtype), capability=SM_90A), dtype)
    assert any(name.startswith("wgmma") for name in names)


@pytest.mark.parametrize(("dtype", "every", "first"), (("bfloat16", 9, 1), ("float16", 41, 5)))
def test_quantized_linear(dtype: str, every: int, first: int) -> None:
    samples = quantized_samples(dtype, every, first)
    names = check_op(Contract("quantized_linear", KEPT, packed_quantized, samples=samples, capability=SM_90A), dtype)
    assert any(name.startswith("wgmma") for name in names)


def example(form: tuple[Any, ...], shape: tuple[int, int], rng: np.random.Generator) -> tuple[str, Any, list[Any]]:
    """The op, the attributes and the weight's inputs."""
    format, group, compute, zeros, _ = form
    if format == "plain":
        weight = (rng.standard_normal(shape, np.float32) / 40).astype(BFLOAT16)
        return "linear", {}, [linear_packing.pack(weight), None]
    attributes = {"format": format, "group": group, "compute": compute, "x_group": 0}
    packed_for = common([90, SM_90A]) if form[-1] == "HGMMA" else SM_90A
    packed = packed_codes(*random_weight(rng, *shape, format, group, zeros), attributes, packed_for)
    return "quantized_linear", attributes, [*packed, None, None]


def run(inputs: list[Any], shape: tuple[int, int], attributes: Any, op: str, device: Any = None) -> np.ndarray:
    return run_on_sm_90(inputs, shape, attributes, op, "bfloat16", capability=SM_90A, device=device)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_have_the_same_bits_in_any_number(form: tuple[Any, ...], outer: int = 170, inner: int = 1100) -> None:
    """All tiles, with the ways of K in blocks of their own and in one; the last block has two panels of four."""
    rng = np.random.default_rng(3)
    op, attributes, weight = example(form, (outer, inner), rng)
    x = rng.standard_normal((130, inner), np.float32).astype(BFLOAT16)
    together = run([x, *weight], (130, outer), attributes, op)
    assert np.isfinite(together.astype(np.float32)).all()
    for begin, rows in ((3, 1), (7, 20), (60, 40), (121, 9)):
        alone = run([x[begin : begin + rows], *weight], (rows, outer), attributes, op)
        np.testing.assert_array_equal(alone.view(np.uint16), together[begin : begin + rows].view(np.uint16))


PTX = [
    # form, rows, dtype of x: all tiles and types, so all that gpu_hopper.cuh has
    (FORMATS[0], 3, BFLOAT16),
    (FORMATS[1], 20, BFLOAT16),
    (FORMATS[2], 20, np.float16),
    (FORMATS[5], 35, BFLOAT16),
    (FORMATS[6], 5, BFLOAT16),
]


@pytest.mark.parametrize(("form", "rows", "dtype"), PTX)
def test_ptx_gives_the_bits_of_the_emulator(form: tuple[Any, ...], rows: int, dtype: Any) -> None:
    rng = np.random.default_rng(rows)
    op, attributes, weight = example(form, (70, 150), rng)
    x = rng.standard_normal((rows, 150), np.float32).astype(dtype)
    found, other = (
        run([x, *weight], (rows, 70), attributes, op, device)
        for device in (Emulator("plain"), Interpreter("compute_90a"))
    )
    np.testing.assert_array_equal(found.view(np.uint16), other.view(np.uint16))


def test_the_ring_goes_round_without_a_race() -> None:
    """More chunks than slots, in all orders of threads and of arriving copies."""
    rng = np.random.default_rng(4)
    op, attributes, weight = example(FORMATS[1], (140, 2900), rng)
    x = rng.standard_normal((40, 2900), np.float32).astype(BFLOAT16)
    found = [
        run([x, *weight], (40, 140), attributes, op, Emulator("checked", order=order, seed=order)) for order in range(3)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].view(np.uint16), other.view(np.uint16))


def test_the_sum_of_a_row_does_not_depend_on_the_number_of_rows() -> None:
    """Ways, chunks of a way and steps between folds are of the weight alone; no way is empty."""
    for rows in (8, 200, 4096, 14336):
        for columns in (16, 576, 4096, 14336):
            layout = linear_packing.layout(rows, columns)
            count, chunks = cuda_wgmma.ways(layout)
            assert (count - 1) * chunks < layout.chunks <= count * chunks
            assert {cuda_wgmma.splits(n, layout) for n in (1, 8, 32, 4096)} <= {1, count}


@pytest.mark.parametrize("form", FORMATS)
def test_machine_code(form: tuple[Any, ...], tmp_path: Path) -> None:
    """The tensor cores that the type has, copies by the TMA unit, no spills."""
    rng = np.random.default_rng(5)
    op, attributes, weight = example(form, (40, 200), rng)
    with Recorder() as device:
        run([np.zeros((40, 200), BFLOAT16), *weight], (40, 40), attributes, op, device)
    (kernel,) = (kernel for name, kernel in device.kernels.items() if name.startswith("wgmma"))
    image, ptx = (compile_kernels([kernel], arch, folders=[PLUGINS])[kernel.name] for arch in ("sm_90a", "compute_90a"))
    (tmp_path / "one.cubin").write_bytes(image)
    code = disassemble(tmp_path / "one.cubin")[kernel.name]
    assert tensor_operations(ptx.decode(), "sm_90a") == {form[-1], "UBLKCP"}
    assert problems(kernel, code, ptx.decode(), "sm_90a") == []


def test_products_of_models_are_by_wgmma() -> None:
    names = [kernel.name for kernel in product_instances(SM_90A)]
    assert len(names) == 6 * len(cuda_wgmma.TILES) and all(name.startswith("wgmma") for name in names)


def test_what_wgmma_has_no_kernel_for_takes_that_of_other_targets() -> None:
    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for sample in quantized_samples("bfloat16")(rng):
            zero, compute = sample.inputs[3], sample.attributes["compute"]
            if zero is not None and (compute == "int8" or zero.dtype == np.float32):
                yield sample
                return

    contract = Contract("quantized_linear", KEPT, packed_quantized, samples=samples, capability=SM_90A)
    names = check_op(contract, "bfloat16")
    assert names and not any(name.startswith("wgmma") for name in names)
