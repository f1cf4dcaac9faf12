"""AWQ checkpoints: packed here in the order of AutoAWQ's GEMM, dequantized in plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantized_files import AWQ, pack_awq, write_quantized

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.quantized_weights import is_quantized
from llmc.compiler.weights import read
from llmc.errors import LlmcError


@pytest.mark.parametrize("group", [32, 64, -1])
def test_values_and_codes(tmp_path: Path, group: int) -> None:
    """96 columns in groups of 64 end in a shorter one; the codes times float32 round to what float16 gives."""
    expected = write_quantized(tmp_path, AWQ | {"group_size": group}, lambda w, r: pack_awq(w, r, group))
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.names:
        source = checkpoint.weight(name)
        np.testing.assert_array_equal(read(source).astype(np.float32), expected[name].astype(np.float32))
        if name.endswith("proj.weight"):
            assert is_quantized(source)
            assert (source.dtype, source.scheme.format, source.scale_dtype) == ("float16", "int4", "float16")
            assert source.scheme.group == max(group, 0)
            rows = source.quantized_rows(3, 29).dequantize().astype(np.float16)
            np.testing.assert_array_equal(rows.astype(np.float32), expected[name][3:29])
    assert checkpoint.dtype == "float16"
    form = "by row" if group == -1 else f"in groups of {group}"
    assert any(f"int4 {form} with zero points: 14" in warning for warning in checkpoint.warnings)


def test_dequantized_on_request(tmp_path: Path) -> None:
    expected = write_quantized(tmp_path, AWQ, pack_awq)
    checkpoint = Checkpoint.open(tmp_path, dequantize=True)
    name = "model.layers.1.mlp.down_proj.weight"
    assert not is_quantized(checkpoint.weight(name))
    np.testing.assert_array_equal(checkpoint.weight(name).rows(5, 60).astype(np.float32), expected[name][5:60])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "bits 8 is not supported; supported: 4"),
        ({"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"zero_point": False}, "zero_point False is not supported"),
        ({"group_size": 0}, "group_size 0 is no size"),
        ({"group_size": "32"}, "group_size must be int, found '32'"),
        (
            {"group_size": 16},
            "scales' has the shape [2, 64], expected [4, 64]: for a weight of 64 x 64",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_quantized(tmp_path, AWQ | changes, pack_awq)
    with pytest.raises(LlmcError) as error:
        Checkpoint.open(tmp_path)
    assert message in str(error.value)
