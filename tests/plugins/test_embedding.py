"""Embedding: rows exactly as stored, from plain and from packed weights."""

import ml_dtypes
import numpy as np
import pytest
import torch

from llmc.plugins import kernels
from llmc.plugins.embedding.reference import reference
from llmc.plugins.linear.packing import pack
from llmc.plugins.quantized_linear import packing
from llmc.plugins.quantized_linear.reference import random_weight

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]


def run(ids: np.ndarray, weight: np.ndarray, width: int, isa: str) -> np.ndarray:
    y = np.full((*ids.shape, width), np.nan, np.float32)
    kernels.run_op("embedding", [ids, weight], [y], isa=isa, threads=2)
    return y


def test_the_reference_picks_rows() -> None:
    weight = torch.arange(12.0).reshape(4, 3)
    found = reference(torch.tensor([[2, 0], [3, 3]]), weight)
    assert found.tolist() == [[[6, 7, 8], [0, 1, 2]], [[9, 10, 11], [9, 10, 11]]]


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (16, 16), (33, 19), (50, 576)])
def test_every_row_is_what_is_stored(isa: str, dtype: np.dtype, rows: int, width: int) -> None:
    weight = np.random.default_rng(rows).standard_normal((rows, width), np.float32).astype(dtype)
    weight[0, 0] = 0.0
    ids = np.concatenate([np.arange(rows), np.arange(rows)[::-1], [rows - 1] * 100]).astype(np.int64)
    wanted = weight[ids].astype(np.float32)
    np.testing.assert_array_equal(run(ids, weight, width, isa), wanted)
    np.testing.assert_array_equal(run(ids.astype(np.int32), pack(weight), width, isa), wanted)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [-1, 48, 1 << 40])
def test_ids_out_of_range_are_refused(packed: bool, bad: int) -> None:
    weight = np.ones((48, 8), np.float32)
    with pytest.raises(kernels.KernelError, match=rf"token id {bad} is not one of the weight's 48 rows"):
        run(np.array([3, bad]), pack(weight) if packed else weight, 8, "scalar")


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(kernels.KernelError, match="as wide as y"):
        run(np.array([0]), pack(np.ones((4, 8), np.float32)), 9, "scalar")
    with pytest.raises(kernels.KernelError, match=r"\[V, H\]"):
        run(np.array([0]), np.ones((4, 8), np.float32), 9, "scalar")


def test_what_a_quantized_table_must_be() -> None:
    codes, scale, zero = random_weight(np.random.default_rng(0), 20, 24, "int4", 16, "uint8")
    assert zero is not None
    packed, scales = packing.pack("int4", 16, codes), packing.pack_scales(scale, "float32")
    zeros, ids, y = packing.pack_scales(zero, "uint8"), np.array([3, 19]), np.empty((2, 24), np.float32)
    given = {"format": "int4", "group": 16}
    kernels.run_op("embedding", [ids, packed, scales, zeros], [y], given)
    np.testing.assert_array_equal(y, packing.dequantize("int4", 16, codes, scale, zero)[ids])
    for inputs, attributes, message in (
        ([ids, packed], given, "scale must be"),
        ([ids, packed, scales, zeros], given | {"group": 8}, "scale must be"),
        ([ids, codes, scales], given, "not packed"),
        ([ids, packed, scales], {"format": "plain", "group": 16}, "a plain table has no groups"),
        ([ids, np.ones((20, 24), np.float32), scales], {}, "a plain table has no scales"),
        ([ids + 30, packed, scales, zeros], given, "token id 33 is not one of the weight's 32 rows"),
    ):
        with pytest.raises(kernels.KernelError, match=message):
            kernels.run_op("embedding", inputs, [y], attributes)
