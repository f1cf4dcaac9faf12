"""CUDA kernels of llmc::linear and quantized_linear agree with the references, and with themselves for other rows."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract import NUMPY, Contract, call_of, check_op, launches_of
from emulator import Emulator

from llmc.plugins import Sample, all_ops
from llmc.plugins.linear import cuda_packing as linear_packing
from llmc.plugins.quantized_linear import cuda_packing
from llmc.plugins.quantized_linear.packing import scale_dtype
from llmc.plugins.quantized_linear.reference import random_weight

BFLOAT16 = ml_dtypes.bfloat16
KEPT = ("weight", "scale", "zero?", "bias?", "x_scale?")


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


def quantized_samples(dtype: str, every: int = 1) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """The op's samples; float16 is multiplied as it is, and gelu_tanh has no digits left far from zero."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for number, sample in enumerate(all_ops()["quantized_linear"].plan_samples(rng)):
            attributes = dict(sample.attributes)
            if "function" in attributes:
                attributes["function"] = "silu"
            if dtype == "float16" and attributes["compute"] == "bfloat16":
                attributes["compute"] = "float32"
            if number % every == 0:
                yield Sample(sample.inputs, attributes)

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


@pytest.mark.parametrize(("dtype", "mode"), (("bfloat16", "checked"), ("float16", "plain")))
def test_quantized_linear(dtype: str, mode: str) -> None:
    contract = Contract("quantized_linear", KEPT, packed_quantized, samples=quantized_samples(dtype))
    print(check_op(contract, dtype, mode=mode))
