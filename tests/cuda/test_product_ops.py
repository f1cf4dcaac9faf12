"""CUDA kernels of the other ops with products: llmc::moe, embedding, matmul and lora."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from contract import NUMPY, Contract, check_op
from test_products import packed_codes

from llmc.plugins import Sample, all_ops
from llmc.plugins.linear import cuda_packing as linear_packing

KEPT = tuple(
    f"{name}{mark}"
    for name in ("weights", "weight", "scale", "zero", "gate_up", "down", "gate_up_bias", "down_bias")
    + tuple(f"{which}_{part}" for which in ("gate_up", "down") for part in ("scale", "zero"))
    + ("a", "b", "ranks", "adapters")
    for mark in ("", "?")
)


def packed_experts(_: str, sample: Sample, inputs: list[Any]) -> list[Any]:
    x, ids, weights, gate_up, down, *rest = inputs
    biases, scales = rest[:2], [*rest[2:], *(None,) * 4][:4]
    if sample.attributes.get("format", "plain") == "plain":
        if gate_up.dtype != np.float32:
            gate_up, down = (np.stack([linear_packing.pack(one) for one in part]) for part in (gate_up, down))
        return [x, ids, weights, gate_up, down, *biases]
    packed = []
    for codes, scale, zero in ((gate_up, *scales[:2]), (down, *scales[2:])):
        zeros = [None] * len(codes) if zero is None else zero
        parts = [packed_codes(*one, sample.attributes) for one in zip(codes, scale, zeros, strict=True)]
        packed.append([None if part[0] is None else np.stack(part) for part in zip(*parts, strict=True)])
    (gate_up, up_scale, up_zero), (down, down_scale, down_zero) = packed
    return [x, ids, weights, gate_up, down, *biases, up_scale, up_zero, down_scale, down_zero]


def expert_samples(dtype: str) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """The op's samples: plain experts in the dtype of activations, quantized ones computed in every way."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for sample in all_ops()["moe"].plan_samples(rng):
            inputs, attributes = list(sample.inputs), dict(sample.attributes)
            if attributes.get("format", "plain") == "plain":
                inputs[3:5] = [weight.astype(NUMPY[dtype]) for weight in inputs[3:5]]
                attributes["inner"] = inputs[4].shape[2]
            yield Sample(tuple(inputs), attributes)

    return samples


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_experts(dtype: str) -> None:
    check_op(Contract("moe", KEPT, packed_experts, samples=expert_samples(dtype), units=8), dtype)


def packed_table(_: str, sample: Sample, inputs: list[Any]) -> list[Any]:
    ids, table, *scales = inputs
    if not sample.attributes:
        return [ids, linear_packing.pack(table) if table.shape[1] == 19 and table.dtype != np.float32 else table]
    compute = ("bfloat16", "int8")[table.shape[1] % 2] if sample.attributes["format"] != "fp8" else "bfloat16"
    return [ids, *packed_codes(table, *scales, {**sample.attributes, "compute": compute, "x_group": 0})]


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_embedding(dtype: str) -> None:
    check_op(Contract("embedding", KEPT, packed_table), dtype)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_matmul(dtype: str) -> None:
    check_op(Contract("matmul"), dtype)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_lora(dtype: str) -> None:
    check_op(Contract("lora", KEPT), dtype)
