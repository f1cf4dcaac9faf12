"""CUDA kernels of llmc::linear and quantized_linear agree with the references, and with themselves for other rows."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract import NUMPY, Contract, call_of, check_op, launches_of
from emulator import Emulator

from llmc.errors import KernelError
from llmc.plugins import Sample, all_ops, cuda_gemm
from llmc.plugins.linear import cuda_packing as linear_packing
from llmc.plugins.quantized_linear import cuda_packing
from llmc.plugins.quantized_linear.packing import scale_dtype
from llmc.plugins.quantized_linear.reference import random_weight

BFLOAT16 = ml_dtypes.bfloat16
KEPT = ("weight", "scale", "zero?", "bias?", "x_scale?")


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows take large tiles here, though the weights are small."""
    monkeypatch.setattr(cuda_gemm, "FEW_BLOCKS", 0)


def packed_linear(_: str, __: Sample, inputs: list[Any]) -> list[Any]:
    x, weight, *rest = inputs
    return [x, weight if weight.dtype == np.float32 else linear_packing.pack(weight), *rest]


def packed_codes(codes: Any, scale: Any, zero: Any, attributes: Any, capability: int = 90) -> list[Any]:
    given = [attributes[name] for name in ("format", "group", "compute", "x_group")]
    layout = cuda_packing.layout(*given, *codes.shape, capability)
    packed = cuda_packing.pack(layout, codes)
    np.testing.assert_array_equal(cuda_packing.unpack(layout, packed), codes)
    zeros = None if zero is None else cuda_packing.pack_scales(zero, zero.dtype.name)
    return [packed, cuda_packing.pack_scales(scale, scale_dtype(scale)), zeros]


def packed_quantized(_: str, sample: Sample, inputs: list[Any]) -> list[Any]:
    x, codes, scale, zero, *rest = inputs
    return [x, *packed_codes(codes, scale, zero, sample.attributes), *rest]


def quantized_samples(dtype: str, every: int = 1, first: int = 0) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """Some of the op's samples; float16 is multiplied as it is, and gelu_tanh has no digits left far from zero."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for number, sample in enumerate(all_ops()["quantized_linear"].plan_samples(rng)):
            attributes = dict(sample.attributes)
            if "function" in attributes:
                attributes["function"] = "silu"
            if dtype == "float16" and attributes["compute"] == "bfloat16":
                attributes["compute"] = "float32"
            *inputs, x_scale = sample.inputs
            if x_scale is not None and attributes["compute"] == "int8":
                x_scale = np.array([x_scale[0], -40.0], np.float32)  # with a shift
            if number % every == first:
                yield Sample((*inputs, x_scale), attributes)

    return samples


def linear_samples(dtype: str) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """The op's samples with weights in the dtype of activations, or in float32."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for x, weight, bias in (sample.inputs for sample in all_ops()["linear"].plan_samples(rng)):
            kind = weight.dtype if weight.dtype == np.float32 else NUMPY[dtype]
            yield Sample((x, weight.astype(kind), bias))

    return samples


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_linear(dtype: str) -> None:
    check_op(Contract("linear", KEPT, packed_linear, samples=linear_samples(dtype)), dtype)


@pytest.mark.parametrize(("dtype", "every", "first"), (("bfloat16", 8, 2), ("float16", 37, 0)))
def test_quantized_linear(dtype: str, every: int, first: int) -> None:
    samples = quantized_samples(dtype, every, first)
    names = check_op(Contract("quantized_linear", KEPT, packed_quantized, samples=samples), dtype)
    assert any("Signed8" in name for name in names) or dtype != "bfloat16"


def run(
    inputs: list[Any],
    shape: tuple[int, int],
    attributes: dict[str, Any],
    op: str,
    dtype: str,
    *,
    capability: int = 90,
    device: Emulator | None = None,
) -> np.ndarray:
    with device or Emulator("plain") as device:
        tensors = tuple(None if a is None else device.tensor(a) for a in inputs)
        y = device.empty(shape, dtype)
        for launch in launches_of(op, call_of(device, tensors, (y,), attributes, capability=capability)):
            device.launch(launch)
        return device.get(y.address, y.shape, y.dtype)


def test_rows_have_the_same_bits_in_any_number(outer: int = 40, inner: int = 2100) -> None:
    """Each shape of tiles, with K split over blocks: bfloat16, int4 in groups, bytes with x in units, a gated unit."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((130, inner), np.float32).astype(BFLOAT16)
    plain = linear_packing.pack((rng.standard_normal((outer, inner), np.float32) / 40).astype(BFLOAT16))
    for format, group, compute, x_group, zeros in (
        ("plain", 0, "", 0, ""),
        ("int4", 128, "bfloat16", 0, "uint8"),
        ("int8", 64, "int8", 32, "float32"),
    ):
        attributes = {"format": format, "group": group, "compute": compute, "x_group": x_group, "function": "silu"}
        op, width, weight = "quantized_linear", outer // 2, [plain]
        if format == "plain":
            op, width, attributes = "linear", outer, {}
        else:
            weight = packed_codes(*random_weight(rng, outer, inner, format, group, zeros), attributes)
        together = run([x, *weight], (130, width), attributes, op, "bfloat16")
        assert np.isfinite(together.astype(np.float32)).all()
        for begin, rows in ((3, 1), (7, 20), (60, 40)):
            alone = run([x[begin : begin + rows], *weight], (rows, width), attributes, op, "bfloat16")
            np.testing.assert_array_equal(alone.view(np.uint16), together[begin : begin + rows].view(np.uint16))


def test_x_of_another_dtype_is_rounded_first() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((3, 41), np.float32)
    weight = linear_packing.pack(rng.standard_normal((9, 41), np.float32).astype(BFLOAT16))
    wide, rounded = (run([a, weight], (3, 9), {}, "linear", "float32") for a in (x, x.astype(BFLOAT16)))
    np.testing.assert_array_equal(wide, rounded)


def test_a_row_that_is_not_finite_stays_so_and_alone() -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((4, 64), np.float32).astype(BFLOAT16)
    x[2, 5] = np.inf
    attributes = {"format": "int8", "group": 0, "compute": "int8", "x_group": 0}
    weight = packed_codes(*random_weight(rng, 8, 64, "int8", 0), attributes)
    y = run([x, *weight], (4, 8), attributes, "quantized_linear", "bfloat16").astype(np.float32)
    assert np.isnan(y[2]).all() and np.isfinite(np.delete(y, 2, 0)).all()


@pytest.mark.parametrize("damage", ("shape", "capability", "bias"))
def test_what_is_not_packed_for_this_call_is_refused(damage: str) -> None:
    attributes = {"format": "fp8", "group": 0, "compute": "fp8", "x_group": 0}
    rng = np.random.default_rng(6)
    weight = packed_codes(*random_weight(rng, 8, 64, "fp8", 0), attributes, 89 if damage == "capability" else 90)
    bias = np.zeros(8, np.float16) if damage == "bias" else None
    columns = 80 if damage == "shape" else 64
    with pytest.raises(KernelError, match="bias must be float32" if damage == "bias" else "for CUDA, not"):
        run([np.zeros((2, columns), BFLOAT16), *weight, bias], (2, 8), attributes, "quantized_linear", "bfloat16")


def test_e4m3_is_multiplied_as_it_is_where_the_chip_can() -> None:
    """sm_89: the instruction, and another packing; the result is that of the conversion to bfloat16."""

    def pack(dtype: str, sample: Sample, inputs: list[Any]) -> list[Any]:
        x, codes, scale, zero, *rest = inputs
        return [x, *packed_codes(codes, scale, zero, sample.attributes, 89), *rest]

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        fp8 = [s for s in quantized_samples("bfloat16")(rng) if s.attributes["compute"] == "fp8"]
        yield from fp8[::4]

    names = check_op(Contract("quantized_linear", KEPT, pack, samples=samples, capability=89), "bfloat16")
    assert any("Float8" in name for name in names)
