"""Checkpoints of Medusa heads: read as Hugging Face has them, refused with a reason otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import safetensors_bytes

from llmc.compiler import weights
from llmc.compiler.medusa.heads import read_heads, write_heads
from llmc.compiler.staging import Staging
from llmc.errors import CheckpointError

HIDDEN, VOCABULARY = 6, 10


EMBEDDING = 4


def arrays(
    heads: int = 2, layers: int = 1, output: bool = False, prefix: str = "", token: bool = False
) -> dict[str, Any]:
    random = np.random.default_rng(0)
    result = {}
    for head in range(heads):
        for layer in range(layers):
            name = f"{prefix}{head}.{layer}.linear"
            result[f"{name}.weight"] = random.normal(size=(HIDDEN, HIDDEN)).astype(np.float32)
            result[f"{name}.bias"] = random.normal(size=HIDDEN).astype(np.float32)
        if token:
            result[f"{prefix}{head}.token.weight"] = random.normal(size=(HIDDEN, EMBEDDING)).astype(np.float32)
        if output:
            result[f"{prefix}{head}.{layers}.weight"] = random.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
    return result


def write(folder: Path, tensors: dict[str, Any], heads: Any = 2, layers: Any = 1, name: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / (name or "medusa_lm_head.safetensors")).write_bytes(safetensors_bytes(tensors))
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": layers}))
    return folder


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize(("prefix", "name"), [("", ""), ("medusa_head.", "medusa_head.safetensors")])
def test_all_numbers_are_read(tmp_path: Path, output: bool, prefix: str, name: str) -> None:
    given = arrays(layers=2, output=output, prefix=prefix, token=output)
    heads = read_heads(write(tmp_path, given, layers=2, name=name), HIDDEN, VOCABULARY, embedding=EMBEDDING)
    assert heads.is_tied is not output and heads.sees_token is output
    assert set(heads.files) == {"config.json", name or "medusa_lm_head.safetensors"}
    for h, head in enumerate(heads.heads):
        for b, block in enumerate(head.blocks):
            assert np.array_equal(weights.read(block.weight), given[f"{prefix}{h}.{b}.linear.weight"])
            assert np.array_equal(weights.read(block.bias), given[f"{prefix}{h}.{b}.linear.bias"])
        if head.token is not None:
            assert np.array_equal(weights.read(head.token), given[f"{prefix}{h}.token.weight"])
        if head.output is not None:
            assert np.array_equal(weights.read(head.output), given[f"{prefix}{h}.2.weight"])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    blocks = [[(random.normal(size=(HIDDEN, HIDDEN)), random.normal(size=HIDDEN))] for _ in range(3)]
    seen = random.normal(size=(3, HIDDEN, EMBEDDING))
    write_heads(Staging(tmp_path), blocks, "tiny", np.array([5, 9, 9, 2], np.int32), list(seen))
    heads = read_heads(tmp_path, HIDDEN, VOCABULARY, embedding=EMBEDDING)
    token = heads.heads[1].token
    assert token is not None
    np.testing.assert_allclose(weights.read(token).astype(np.float64), seen[1], 1e-2)
    assert heads.frequent is not None and heads.frequent.tolist() == [9, 2, 5]
    assert len(heads.heads) == 3 and heads.is_tied
    np.testing.assert_allclose(weights.read(heads.heads[2].blocks[0].bias).astype(np.float64), blocks[2][0][1], 1e-2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["base_model_name_or_path"], config["medusa_num_heads"], config["medusa_num_layers"]) == (
        "tiny",
        3,
        1,
    )


def changed(**changes: Any) -> dict[str, Any]:
    tensors = arrays() | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (changed(**{"1.0.linear.bias": None}), {}, r"1\.0\.linear\.bias is missing; config.json names 2 heads"),
        (arrays(3), {}, r"2\.0\.linear\.weight is left over"),
        (changed(**{"0.0.linear.weight": np.zeros((5, 6), np.float32)}), {}, r"has shape \[5, 6\], expected \[6, 6\]"),
        (changed(**{"0.0.linear.bias": np.zeros(6, np.int32)}), {}, "is int32; expected float32"),
        (changed(**{"lm_head.weight": np.zeros((10, 6), np.float32)}), {}, "'lm_head.weight' is none of Medusa heads"),
        (changed(**{"0.1.weight": np.zeros((10, 6), np.float32)}), {}, "head 1 has no output layer, but others"),
        (changed(**{"1.token.weight": np.zeros((6, 4), np.float32)}), {}, "head 0 sees no token, but others do"),
        (arrays(), {"heads": 0}, "medusa_num_heads is 0, expected a number from 1 to 16"),
        (arrays(), {"layers": "one"}, 'medusa_num_layers is "one"'),
        (arrays(), {"layers": 2}, r"0\.1\.linear\.weight is missing"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, tensors: Any, config: Any, message: str) -> None:
    write(tmp_path, tensors, **config)
    with pytest.raises(CheckpointError, match=message):
        read_heads(tmp_path, HIDDEN, VOCABULARY)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match=r"a pickle.*safetensors\.torch\.save_file"):
        read_heads(tmp_path, HIDDEN, VOCABULARY)
    (tmp_path / "medusa_lm_head.pt").unlink()
    with pytest.raises(CheckpointError, match="are these Medusa heads"):
        read_heads(tmp_path, HIDDEN, VOCABULARY)
