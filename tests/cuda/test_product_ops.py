"""CUDA kernels of the other ops with products: llmc::moe, embedding, matmul and lora."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from contract import NUMPY, Contract, check_op
from test_products import large_tiles, packed_codes, run

from llmc.plugins import Sample, all_ops
from llmc.plugins.linear import cuda_packing as linear_packing
from llmc.plugins.quantized_linear.reference import random_weight

__all__ = ["large_tiles"]
KEPT = (
    *("weights", "weight", "gate_up", "down", "a", "b", "ranks", "adapters", "scale?", "zero?"),
    *("gate_up_bias?", "down_bias?", "gate_up_scale?", "gate_up_zero?", "down_scale?", "down_zero?"),
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


def some_samples(op: str, every: int) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """Some of the op's samples."""
    return lambda rng: itertools.islice(all_ops()[op].plan_samples(rng), 0, None, every)


def expert_samples(dtype: str, every: int) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """Some of the op's samples, with plain experts in the dtype of activations."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for sample in some_samples("moe", every)(rng):
            inputs, attributes = list(sample.inputs), dict(sample.attributes)
            if attributes.get("format", "plain") == "plain":
                inputs[3:5] = [weight.astype(NUMPY[dtype]) for weight in inputs[3:5]]
                attributes["inner"] = inputs[4].shape[2]
            yield Sample(tuple(inputs), attributes)

    return samples


@pytest.mark.parametrize(("dtype", "every"), (("bfloat16", 2), ("float32", 5)))
def test_experts(dtype: str, every: int) -> None:
    check_op(Contract("moe", KEPT, packed_experts, samples=expert_samples(dtype, every), units=8), dtype)


def test_tokens_have_the_same_bits_in_any_number() -> None:
    """Few rows of an expert and many take different tiles; int8 rounds what is between the products."""
    rng = np.random.default_rng(2)
    tokens, hidden, inner, experts = 200, 72, 40, 3
    attributes = {"format": "int4", "group": 32, "compute": "int8", "x_group": 0, "inner": inner}
    attributes |= {"function": "silu", "gated": True, "interleaved": False, "alpha": 0.0, "limit": 0.0}
    x = rng.standard_normal((tokens, hidden), np.float32).astype(NUMPY["bfloat16"])
    ids = rng.integers(-1, experts + 1, (tokens, 2))
    weights = rng.random((tokens, 2), np.float32)
    packed = []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        each = [packed_codes(*random_weight(rng, rows, columns, "int4", 32), attributes) for _ in range(experts)]
        packed.append([np.stack(part) for part in list(zip(*each, strict=True))[:2]])
    (gate_up, up_scale), (down, down_scale) = packed

    def first(count: int) -> np.ndarray:
        inputs = [x[:count], ids[:count], weights[:count], gate_up, down, *(None, None, up_scale, None, down_scale)]
        return run(inputs, (count, hidden), attributes, "moe", "bfloat16")

    together = first(tokens)
    assert together.any()
    for count in (1, 30, 129):  # and a pair more than the warps take at once
        np.testing.assert_array_equal(first(count).view(np.uint16), together[:count].view(np.uint16))


def packed_table(_: str, sample: Sample, inputs: list[Any]) -> list[Any]:
    ids, table, *scales = inputs
    if not sample.attributes:
        return [ids, linear_packing.pack(table) if table.shape[1] == 19 and table.dtype != np.float32 else table]
    compute = ("bfloat16", "int8")[table.shape[1] % 2] if sample.attributes["format"] != "fp8" else "bfloat16"
    return [ids, *packed_codes(table, *scales, {**sample.attributes, "compute": compute, "x_group": 0})]


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_embedding(dtype: str) -> None:
    check_op(Contract("embedding", KEPT, packed_table, samples=some_samples("embedding", 3)), dtype)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_matmul(dtype: str) -> None:
    check_op(Contract("matmul"), dtype)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_lora(dtype: str) -> None:
    check_op(Contract("lora", KEPT), dtype)
