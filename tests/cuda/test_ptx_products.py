"""The PTX of products and of attention, interpreted: the bits of the emulator, for which g++ compiles the source."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_cuda import PLAIN, Pool, cut, random_rows
from contract import call_of, launches_of
from emulator import Emulator
from ptx import Interpreter
from test_product_ops import packed_experts
from test_products import large_tiles, packed_codes

from llmc.plugins import Sample
from llmc.plugins.linear import cuda_packing as linear_packing
from llmc.plugins.quantized_linear.reference import random_weight

__all__ = ["large_tiles"]
FORMATS = [
    # format, group, compute, x_group, zeros, capability, the target that the PTX is for
    ("plain", 0, "", 0, "", 80, "compute_80"),
    ("int4", 16, "bfloat16", 0, "uint8", 90, "compute_90"),
    ("int8", 0, "bfloat16", 0, "", 100, "compute_100"),
    ("int4", 32, "int8", 0, "float32", 80, "compute_80"),
    ("int8", 32, "int8", 32, "uint8", 120, "compute_120"),
    ("fp8", 0, "fp8", 0, "", 90, "compute_90"),
    ("fp8", 0, "fp8", 0, "", 89, "compute_89"),
]


def same(work: Callable[[Emulator], np.ndarray], arch: str) -> None:
    """The same bits, but for what is no number."""
    found, other = (work(device) for device in (Emulator("plain", order=0), Interpreter(arch)))
    numbers = ~np.isnan(found.astype(np.float32))
    np.testing.assert_array_equal(found[numbers].view(np.uint16), other[numbers].view(np.uint16))
    assert np.isnan(other.astype(np.float32)[~numbers]).all()
    assert found[numbers].any()


def product(op: str, inputs: list[Any], shape: tuple[int, int], attributes: dict[str, Any], capability: int) -> Any:
    def work(device: Emulator) -> np.ndarray:
        tensors = tuple(None if a is None else device.tensor(a) for a in inputs)
        y = device.empty(shape, "bfloat16")
        for launch in launches_of(op, call_of(device, tensors, (y,), attributes, capability=capability)):
            device.launch(launch)
        return device.get(y.address, y.shape, y.dtype)

    return work


def example(
    rows: int, format: str, group: int, compute: str, x_group: int, zeros: str, capability: int
) -> tuple[str, list[Any], tuple[int, int], dict[str, Any], int]:
    """What `product` takes."""
    rng, outer, inner = np.random.default_rng(rows), 34, 67
    x = rng.standard_normal((rows, inner), np.float32).astype(ml_dtypes.bfloat16)
    if format == "plain":
        weight = linear_packing.pack(rng.standard_normal((outer, inner), np.float32).astype(ml_dtypes.bfloat16))
        return "linear", [x, weight, None], (rows, outer), {}, capability
    attributes = {"format": format, "group": group, "compute": compute, "x_group": x_group}
    packed = packed_codes(*random_weight(rng, outer, inner, format, group, zeros), attributes, capability)
    return "quantized_linear", [x, *packed, None, None], (rows, outer), attributes, capability


@pytest.mark.parametrize(("rows", "form"), [*((3, form) for form in FORMATS), (40, FORMATS[0]), (70, FORMATS[4])])
def test_products(rows: int, form: tuple[Any, ...]) -> None:
    same(product(*example(rows, *form[:-1])), form[-1])


def test_experts() -> None:
    rng, tokens, hidden, inner, experts = np.random.default_rng(2), 5, 40, 24, 3
    attributes = {"format": "plain", "inner": inner, "function": "silu", "gated": True, "interleaved": False}
    attributes |= {"alpha": 0.0, "limit": 0.0}
    x, up, down = (
        rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        for shape in ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    ids = rng.integers(0, experts, (tokens, 2))
    sample = Sample((x, ids, rng.random((tokens, 2), np.float32), up, down, None, None), attributes)
    same(
        product("moe", packed_experts("", sample, list(sample.inputs)), (tokens, hidden), attributes, 90), "compute_90"
    )


@pytest.mark.parametrize(
    ("dtype", "kv", "arch", "more"),
    [
        ("bfloat16", "bfloat16", "compute_80", {}),
        ("float16", "float16", "compute_120", {"window": 20}),
        ("bfloat16", "int8", "compute_90", {"chunk": 16}),
        ("bfloat16", "float8_e4m3", "compute_100", {"softcap": 4.0}),
    ],
)
def test_attention(dtype: str, kv: str, arch: str, more: dict[str, Any]) -> None:
    """Keys and values are written, then rows by one block and unit by unit; a value is infinite."""
    rows = random_rows(np.random.default_rng(3), (2, 1, 16, 32), 76, dtype)
    rows.v[40, 0, 3] = np.inf

    def work(device: Emulator) -> np.ndarray:
        pool = Pool(device, (1, 16, 32), kv, (76,), attributes=PLAIN | more)
        return np.concatenate([pool.step([cut(rows, 0, 70)])[0], pool.step([cut(rows, 70, 76)])[0]])

    same(work, arch)
