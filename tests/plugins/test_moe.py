"""Mixture of experts: a plain float64 oracle, packed weights of every dtype, and rows that do not see one another."""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.plugins import kernels
from llmc.plugins.linear.packing import pack
from llmc.plugins.quantized_linear import packing
from llmc.plugins.quantized_linear.reference import random_weight

Array = NDArray[np.float32]
ISAS = kernels.isas()
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
PLAIN = {"function": "silu", "gated": True, "interleaved": False, "alpha": 0.0, "limit": 0.0}
GPT_OSS = {"function": "gpt_oss", "gated": True, "interleaved": True, "alpha": 1.702, "limit": 0.7}
TOLERANCE = {"float32": 2e-5, "float16": 2e-5, "bfloat16": 1e-4}


@dataclass(frozen=True)
class Case:
    x: Array
    ids: NDArray[np.int64]
    weights: Array
    gate_up: NDArray[Any]
    down: NDArray[Any]
    gate_up_bias: Array | None = None
    down_bias: Array | None = None

    def run(self, attributes: dict[str, Any], isa: str = ISAS[-1], threads: int = 1) -> Array:
        y = np.full_like(self.x, np.nan)
        packed = [np.stack([pack(expert) for expert in weight]) for weight in (self.gate_up, self.down)]
        inputs = [self.x, self.ids, self.weights, *packed, self.gate_up_bias, self.down_bias]
        kernels.run_op("moe", inputs, [y], attributes, isa=isa, threads=threads)
        return y

    def rows(self, chosen: slice | list[int]) -> "Case":
        return replace(self, x=self.x[chosen], ids=self.ids[chosen], weights=self.weights[chosen])


def case(
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    dtype: str,
    *,
    gated: bool = True,
    bias: bool = False,
) -> Case:
    rng = np.random.default_rng(tokens + hidden)
    rows = 2 * inner if gated else inner

    def normal(*size: int) -> Array:
        return rng.standard_normal(size, dtype=np.float32)

    return Case(
        normal(tokens, hidden),
        np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int64),
        rng.random((tokens, top_k), dtype=np.float32),
        (normal(experts, rows, hidden) / np.sqrt(hidden)).astype(DTYPES[dtype]),
        (normal(experts, hidden, inner) / np.sqrt(inner)).astype(DTYPES[dtype]),
        normal(experts, rows) if bias else None,
        normal(experts, hidden) if bias else None,
    )


def oracle(
    c: Case, *, function: str, gated: bool, interleaved: bool, alpha: float, limit: float
) -> NDArray[np.float64]:
    """One token, one expert, one activation after the other; bfloat16 weights round what they are multiplied with."""

    def rounded(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) if bf16 else x

    bf16 = c.gate_up.dtype == ml_dtypes.bfloat16
    y = np.zeros(c.x.shape)
    for t, (ids, weights) in enumerate(zip(c.ids, c.weights, strict=True)):
        for e, weight in zip(ids, weights, strict=True):
            if not 0 <= e < len(c.gate_up):
                continue
            h = c.gate_up[e].astype(np.float64) @ rounded(c.x[t].astype(np.float64))
            h += c.gate_up_bias[e] if c.gate_up_bias is not None else 0.0
            if gated:
                gate, up = (h[::2], h[1::2]) if interleaved else np.split(h, 2)
                if limit > 0:
                    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                h = gate / (1 + np.exp(-alpha * gate)) * (up + 1) if function == "gpt_oss" else _silu(gate) * up
            else:
                h = np.maximum(h, 0) ** 2
            out = c.down[e].astype(np.float64) @ rounded(h) + (c.down_bias[e] if c.down_bias is not None else 0.0)
            y[t] += weight * out
    return y


def _silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "attributes", "bias"),
    [
        ((1, 64, 48, 8, 2), PLAIN, False),
        ((19, 40, 24, 4, 2), PLAIN | {"interleaved": True, "limit": 0.6}, True),
        ((5, 33, 14, 3, 1), GPT_OSS, True),
        ((130, 32, 16, 2, 2), PLAIN, False),
        ((7, 31, 10, 5, 5), PLAIN | {"function": "relu2", "gated": False}, True),
    ],
    ids=str,
)
def test_against_the_oracle(
    sizes: tuple[int, int, int, int, int], attributes: dict[str, Any], bias: bool, dtype: str, isa: str
) -> None:
    c = case(*sizes, dtype, gated=attributes["gated"], bias=bias)
    found = c.run(attributes, isa, threads=2)
    # A sum that falls on the other side of a rounding step moves one bfloat16 input of the second product.
    atol = 5e-3 if dtype == "bfloat16" else TOLERANCE[dtype]
    np.testing.assert_allclose(found, oracle(c, **attributes), TOLERANCE[dtype], atol)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: str, isa: str) -> None:
    c = case(150, 72, 40, 6, 3, dtype)
    together = c.run(PLAIN, isa)
    assert np.array_equal(c.run(PLAIN, isa, threads=2), together)
    assert np.array_equal(c.run(PLAIN, isa, threads=3), together)
    for chosen in ([0], [149], [7, 8, 9], list(range(40, 77)), list(range(149, -1, -1))):
        assert np.array_equal(c.rows(chosen).run(PLAIN, isa), together[chosen]), f"rows {chosen}"


def test_ids_that_are_no_expert_contribute_nothing() -> None:
    c = case(4, 32, 16, 3, 2, "float32")
    c.ids[0] = [3, 1]
    c.ids[1] = [-1, 3]
    c.ids[2] = [2, 2]
    found = c.run(PLAIN)
    np.testing.assert_allclose(found, oracle(c, **PLAIN), 2e-5, 2e-5)  # type: ignore[arg-type]
    assert (found[1] == 0).all()


def test_weights_of_other_experts_are_not_read() -> None:
    c = case(6, 32, 16, 4, 2, "float32")
    c.ids[:] = [[1, 3]] * 6
    expected = c.run(PLAIN)
    c.gate_up[[0, 2]] = np.nan
    c.down[[0, 2]] = np.nan
    assert np.array_equal(c.run(PLAIN), expected)


def test_many_tokens_are_taken_in_turns() -> None:
    """More than fits into the bounded scratch memory at once: the same bits as the last rows alone."""
    c = case(1700, 2048, 6, 2, 2, "bfloat16")  # turns of some 1600 tokens: much memory, little to compute
    found = c.run(PLAIN, threads=2)
    assert np.array_equal(c.rows(list(range(1550, 1700))).run(PLAIN), found[1550:])


def test_refusals() -> None:
    c = case(3, 32, 16, 2, 1, "float32")
    with pytest.raises(kernels.KernelError, match="ids must be int64"):
        replace(c, ids=c.ids[:2]).run(PLAIN)
    with pytest.raises(kernels.KernelError, match="another shape"):
        replace(c, gate_up=c.gate_up[:, :, :30]).run(PLAIN)
    with pytest.raises(kernels.KernelError, match="no activation"):
        c.run(PLAIN | {"function": "sillu"})
    with pytest.raises(kernels.KernelError, match="biases"):
        replace(c, down_bias=np.zeros((2, 31), np.float32)).run(PLAIN)


def quantized(c: Case, format: str, group: int, compute: str, *, inner: int | None = None) -> tuple[list[Any], Any]:
    """The inputs with quantized experts, and the attributes."""
    rng = np.random.default_rng(5)
    inputs: list[Any] = [c.x, c.ids, c.weights, None, None, c.gate_up_bias, c.down_bias]
    for place, weight in ((3, c.gate_up), (4, c.down)):
        made = [random_weight(rng, *expert.shape, format, group) for expert in weight]
        inputs[place] = np.stack([packing.pack(format, group, codes) for codes, _, _ in made])
        inputs += [np.stack([packing.pack_scales(scale, "float32") for _, scale, _ in made]), None]
    inner = c.down.shape[2] if inner is None else inner
    return inputs, PLAIN | {"format": format, "group": group, "compute": compute, "x_group": 0, "inner": inner}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "compute"), [("int4", "int8"), ("int8", "int8"), ("fp8", "bfloat16")])
def test_a_row_of_quantized_experts_has_the_same_bits_alone(format: str, compute: str, isa: str) -> None:
    c = case(60, 72, 40, 4, 2, "float32")
    inputs, attributes = quantized(c, format, 32, compute)
    together = np.full_like(c.x, np.nan)
    kernels.run_op("moe", inputs, [together], attributes, isa=isa)
    for chosen in ([0], [59], list(range(7, 28)), list(range(59, -1, -1))):
        alone = np.full_like(c.x[chosen], np.nan)
        given = [*(np.ascontiguousarray(part[chosen]) for part in inputs[:3]), *inputs[3:]]
        kernels.run_op("moe", given, [alone], attributes, isa=isa, threads=2)
        np.testing.assert_array_equal(alone, together[chosen])


def test_refusals_of_quantized_experts() -> None:
    c = case(3, 32, 16, 2, 1, "float32")
    inputs, attributes = quantized(c, "int4", 16, "int8")
    y = np.empty_like(c.x)
    without = [*inputs[:7], *[None] * 4]
    for given, changed, message in (
        (without, {}, "scale must be"),
        (inputs, {"inner": 24}, "not packed"),
        (inputs, {"inner": -1}, "inner must be"),
        (inputs, {"compute": "plain"}, "can't be computed as 'plain'"),
        (inputs, {"format": "plain"}, "plain experts have no compute"),
        ([*inputs[:7], inputs[7][:1], *inputs[8:]], {}, "for the same experts"),
    ):
        with pytest.raises(kernels.KernelError, match=message):
            kernels.run_op("moe", given, [y], attributes | changed)
    with pytest.raises(kernels.KernelError, match="plain experts have no scales"):
        packed = [np.stack([pack(expert) for expert in weight]) for weight in (c.gate_up, c.down)]
        kernels.run_op("moe", [*inputs[:3], *packed, None, None, *inputs[7:]], [y], PLAIN)
