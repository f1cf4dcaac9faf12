"""The codes of GGUF blocks: what they stand for is bit-equal to the gguf library's dequantization, for any bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from gguf_files import gguf_bytes

from llmc.compiler.gguf_blocks import TYPES, QuantizedBlocks, quantized
from llmc.compiler.gguf_file import BLOCKS, GgufFile
from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.quantized_views import find_quantized
from llmc.compiler.quantized_weights import is_quantized
from llmc.compiler.weights import Reshape, Transpose, read


def blocks_of(path: Path, name: str, rows: int = 12) -> tuple[QuantizedBlocks, np.ndarray]:
    """A tensor of random bytes, two blocks a row, without scales that are no numbers."""
    size, nbytes = GGML_QUANT_SIZES[Kind[name]]
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (4 * rows, 2 * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        data = data[np.isfinite(dequantize(data, Kind[name])).all(1)][:rows]
    shape = (rows, 2 * size)
    (path / "x.gguf").write_bytes(gguf_bytes({}, {"w": (shape, Kind[name].value, data.tobytes())}))
    tensor = quantized(GgufFile.open(ModelDirectory(path), "x.gguf").tensors["w"])
    assert isinstance(tensor, QuantizedBlocks)
    return tensor, dequantize(data, Kind[name])


def test_all_types_have_codes() -> None:
    assert set(TYPES) == set(BLOCKS)


@pytest.mark.parametrize("name", TYPES)
def test_bit_equal_to_the_library(tmp_path: Path, name: str) -> None:
    tensor, expected = blocks_of(tmp_path, name)
    assert is_quantized(tensor)
    np.testing.assert_array_equal(read(tensor), expected)
    for start, stop in ((0, 12), (5, 6), (3, 3)):
        found = tensor.quantized_rows(start, stop)
        np.testing.assert_array_equal(found.dequantize(), expected[start:stop])
        scale, zero = tensor.scale_rows(start, stop)
        np.testing.assert_array_equal(scale, found.scale)
        assert (zero is None) == (found.zero is None) == (tensor.zero is None)
        assert found.codes.max(initial=0) < (16 if tensor.scheme.format == "int4" else 256)
    if tensor.scale_dtype == "float16":
        scale = tensor.quantized_rows(0, 12).scale
        np.testing.assert_array_equal(scale, scale.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_rows_that_are_permuted(tmp_path: Path, name: str) -> None:
    """As llama.cpp interleaves those of q and k."""
    tensor, expected = blocks_of(tmp_path, name)
    columns = tensor.shape[1]
    view = Reshape(Transpose(Reshape(tensor, (2, 3, 2, columns)), (0, 2, 1, 3)), tensor.shape)
    found = find_quantized(view)
    assert found is not None
    order = np.arange(12).reshape(2, 3, 2).transpose(0, 2, 1).reshape(-1)
    np.testing.assert_array_equal(found.quantized_rows(1, 11).dequantize(), expected[order][1:11])
    np.testing.assert_array_equal(read(view), expected[order])
