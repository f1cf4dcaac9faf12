"""Random damage to files is harmless or refused by an error of ours: no other exception, no huge allocation."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import llama_arrays, safetensors_bytes
from gguf_files import f32, gguf_bytes

from llmc.compiler.gguf_file import GgufFile
from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.weights import read
from llmc.errors import CheckpointError
from llmc.runtime.safetensors_file import read_header

ROUNDS = 1000

INTERESTING = (b"\0", b"\xff", b"{", b"}", b'"', b"[", b",", b"-1", b"1e9", b"9" * 20, b"\xff" * 8, b"\0" * 8)


def damaged(data: bytes, choose: random.Random) -> bytes:
    """A few bytes changed, inserted, removed or repeated; more often near the start, where the sizes are."""
    result = bytearray(data)
    for _ in range(choose.randint(1, 4)):
        span = len(result) if choose.random() < 0.2 else min(len(result), 900)
        at = choose.randrange(max(1, span))
        kind = choose.randrange(5)
        if kind == 0:
            result[at : at + 1] = bytes([choose.randrange(256)])
        elif kind == 1:
            piece = choose.choice(INTERESTING)
            result[at : at + len(piece)] = piece
        elif kind == 2:
            result[at:at] = choose.choice(INTERESTING)
        elif kind == 3:
            del result[at : at + choose.randint(1, 16)]
        else:
            result[at:at] = result[at : at + choose.randint(1, 64)]
    return bytes(result)


def read_safetensors(path: Path) -> None:
    with path.open("rb") as file:
        header = read_header(file.fileno(), path.name, CheckpointError)
        for tensor in header.tensors.values():
            assert 0 <= tensor.begin <= tensor.end <= path.stat().st_size


def read_gguf(path: Path) -> None:
    for tensor in GgufFile.open(ModelDirectory(path.parent), path.name).tensors.values():
        read(tensor)


def gguf() -> bytes:
    metadata = {"general.architecture": "llama", "llama.block_count": 2, "a": [1, 2, 3], "b": ["x", "yy"], "c": 0.5}
    blocks = ((4, 32), 2, bytes(4 * 18))
    return gguf_bytes(metadata, {"x": f32(np.ones((3, 8))), "q": blocks, "y": f32(np.ones(5))})


CASES: dict[str, tuple[Callable[[], bytes], Callable[[Path], None]]] = {
    "safetensors": (lambda: safetensors_bytes(llama_arrays(num_hidden_layers=1), {"format": "pt"}), read_safetensors),
    "gguf": (gguf, read_gguf),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_files(tmp_path: Path, case: str) -> None:
    make, reader = CASES[case]
    whole, choose, refused = make(), random.Random(0), 0
    path = tmp_path / "file"
    path.write_bytes(whole)
    reader(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(ROUNDS):
        path.write_bytes(damaged(whole, choose))
        try:
            reader(path)
        except CheckpointError:
            refused += 1
    assert refused > ROUNDS // 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "memory grew by more than 64 MiB"
