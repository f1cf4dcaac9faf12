"""Medusa heads as files: the layout of Hugging Face checkpoints, read with strict checks, and written.

    tokens.safetensors               ours, optional: token_ids int32, by how often the model wrote them
    config.json                      medusa_num_heads, medusa_num_layers
    medusa_lm_head.safetensors       i.l.linear.weight [H, H], i.l.linear.bias [H]: head i, residual block l
                                     i.L.weight [V, H]: its own output layer; heads without one share the model's
                                     i.token.weight [H, E]: ours, optional: what it makes of the model's own token

A head is x + silu(W x + b) for each of its L blocks, and then the output layer. Head i predicts the token that comes
i + 1 tokens after the one that the model itself predicts from the same x. That token is known when heads are asked, and
what follows depends on it, so heads may see it: they begin with x + T e then, e being its embedding in the model's
table (arXiv:2402.05109 lets each head see all tokens before its own, one run after another; these still take one run).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.compiler import safetensors_writer, weights
from llmc.compiler.engine_writer import ArrayTensor, to_json
from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.safetensors_file import FileTensor, SafetensorsFile
from llmc.compiler.staging import Staging
from llmc.compiler.weights import WeightSource
from llmc.errors import CheckpointError
from llmc.plugins.linear import packing
from llmc.runtime import strict

CONFIG = "config.json"
WEIGHTS = ("medusa_lm_head.safetensors", "medusa_head.safetensors")
"""Names of the file; the first is the one that is written."""

TOKENS, TOKEN_IDS = "tokens.safetensors", "token_ids"
PICKLES = ("medusa_lm_head.pt", "medusa_head.pt", "pytorch_model.bin")
MOST_HEADS, MOST_LAYERS = 16, 16
TOKEN = "token"
_Key = tuple[int, int, bool, str]
_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(?:(\d+)\.(?:(linear)\.)?(weight|bias)|token\.weight)")


@dataclass(frozen=True, eq=False)
class Block:
    """A residual block: weight [H, H], bias [H]."""

    weight: WeightSource
    bias: WeightSource


@dataclass(frozen=True, eq=False)
class Head:
    """The blocks of a head, and its own output layer [V, H]; None: that of the model.

    ``token``: [H, E], for the embedding of the model's own token; None: it does not see it.
    """

    blocks: tuple[Block, ...]
    output: WeightSource | None
    token: WeightSource | None = None


@dataclass(frozen=True, eq=False)
class Heads:
    """All heads of a checkpoint, which all have as many blocks. ``files``: SHA-256 and size of what was read.

    ``frequent``: tokens, the most frequent first, if that is known.
    """

    path: Path
    heads: tuple[Head, ...]
    files: Mapping[str, Mapping[str, Any]]
    frequent: NDArray[np.int32] | None = None

    @property
    def is_tied(self) -> bool:
        """Whether they share the output layer of the model."""
        return self.heads[0].output is None

    @property
    def sees_token(self) -> bool:
        """Whether they see the model's own token."""
        return self.heads[0].token is not None

    def nbytes(self, dtype: str, tokens: int | None = None) -> int:
        """Of all weights, if they are not quantized but stored so; ``tokens``: that they choose from, if not all."""
        blocks = [block for head in self.heads for block in head.blocks]
        shapes = [block.weight.shape[:2] for block in blocks]
        outputs = [head.output.shape[:2] for head in self.heads if head.output is not None]
        if (token := self.heads[0].token) is not None:
            shapes.append((len(self.heads) * token.shape[0], token.shape[1]))
        if tokens is not None:
            outputs = [(tokens, shapes[0][1])] * max(1, len(outputs))  # those that are tied need one of their own, too
        numbers = sum(math.prod(packing.packed_shape(rows, columns, dtype)) for rows, columns in [*shapes, *outputs])
        return np.dtype(dtype).itemsize * numbers + 4 * sum(block.bias.shape[0] for block in blocks) + 4 * (tokens or 0)


def read_heads(
    path: Path, hidden: int, vocabulary: int, allow_hard_links: bool = False, embedding: int | None = None
) -> Heads:
    """Open a checkpoint of heads for a model with this hidden size and vocabulary. The numbers are read later.

    Args:
        path: of the folder.
        hidden: the size H.
        vocabulary: of the model.
        allow_hard_links: accept files that have a second name elsewhere.
        embedding: the size E of the model's embeddings; None: it takes none from a table.

    Raises:
        CheckpointError: files are missing or pickles, or tensors are missing, left over or of another size.
    """
    directory = ModelDirectory(path, allow_hard_links)
    name, count, layers = _outline(directory)
    tensors = _Tensors(SafetensorsFile(directory, name), str(path / name), f"{count} heads of {layers} blocks")
    sees_token = _same(tensors, [(head, 0, False, TOKEN) for head in range(count)], "sees no token")
    if sees_token and embedding is None:
        raise CheckpointError(f"{path / name}: these heads see tokens, but the model has no table of embeddings")
    has_output = _same(tensors, [(head, layers, False, "weight") for head in range(count)], "has no output layer")
    heads = []
    for head in range(count):
        blocks = tuple(
            Block(
                tensors.take((head, layer, True, "weight"), (hidden, hidden)),
                tensors.take((head, layer, True, "bias"), (hidden,)),
            )
            for layer in range(layers)
        )
        output = tensors.take((head, layers, False, "weight"), (vocabulary, hidden)) if has_output else None
        token = tensors.take((head, 0, False, TOKEN), (hidden, embedding or 0)) if sees_token else None
        heads.append(Head(blocks, output, token))
    tensors.check_empty()
    frequent = _read_tokens(directory, vocabulary)
    files = {n: {"sha256": directory.sha256(n), "size": directory.size(n)} for n in directory.used}
    return Heads(path, tuple(heads), files, frequent)


def count_heads(path: Path, allow_hard_links: bool = False) -> int:
    """How many a checkpoint has. Raises CheckpointError if files are missing or pickles."""
    return _outline(ModelDirectory(path, allow_hard_links))[1]


def _outline(directory: ModelDirectory) -> tuple[str, int, int]:
    """Name of the file, heads, and blocks of each."""
    return (_file_name(directory), *_sizes(directory))


class _Tensors:
    """The tensors of a file by (head, layer, whether of a block, weight or bias)."""

    def __init__(self, file: SafetensorsFile, where: str, sizes: str) -> None:
        self.left: dict[_Key, FileTensor] = {}
        self.where, self._sizes = where, sizes
        for name in file.header.tensors:
            match = _NAME.fullmatch(name)
            key = None if match is None else _key(match)
            if key is None or key in self.left:
                raise CheckpointError(
                    f"{where}: tensor {name!r} is none of Medusa heads; expected names as 0.0.linear.weight"
                )
            self.left[key] = file.tensor(name)

    def take(self, key: _Key, shape: tuple[int, ...]) -> FileTensor:
        """One of them."""
        tensor, label = self.left.pop(key, None), _label(key)
        if tensor is None:
            raise CheckpointError(f"{self.where}: {label} is missing; {CONFIG} names {self._sizes}")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self.where}: {label} has shape {list(tensor.shape)}, expected {list(shape)}; these heads are of a "
                "model with another hidden size or vocabulary"
            )
        if tensor.dtype not in ("float32", "float16", "bfloat16"):
            raise CheckpointError(f"{self.where}: {label} is {tensor.dtype}; expected float32, float16 or bfloat16")
        return tensor

    def check_empty(self) -> None:
        """Refuse what nothing has taken."""
        for key in self.left:
            raise CheckpointError(f"{self.where}: {_label(key)} is left over; {CONFIG} names {self._sizes}")


def _key(match: re.Match[str]) -> _Key:
    if match[2] is None:
        return int(match[1]), 0, False, TOKEN
    return int(match[1]), int(match[2]), match[3] is not None, match[4]


def _same(tensors: _Tensors, keys: Sequence[_Key], lacks: str) -> bool:
    """Whether the tensors are there: for all heads, or for none."""
    there = [key in tensors.left for key in keys]
    if any(there) and not all(there):
        raise CheckpointError(f"{tensors.where}: head {there.index(False)} {lacks}, but others do")
    return all(there)


def _label(key: _Key) -> str:
    head, layer, is_block, kind = key
    if kind == TOKEN:
        return f"{head}.{TOKEN}.weight"
    return f"{head}.{layer}.{'linear.' if is_block else ''}{kind}"


def _file_name(directory: ModelDirectory) -> str:
    for name in WEIGHTS:
        if directory.has(name):
            return name
    for name in PICKLES:
        if directory.has(name):
            raise CheckpointError(
                f"{directory.path / name}: a pickle, which may run code when it is opened, and is not read. Convert it "
                "where you trust it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
                f'"{WEIGHTS[0]}")'
            )
    raise CheckpointError(f"{directory.path}: there is no {WEIGHTS[0]}; are these Medusa heads?")


def write_heads(
    staging: Staging,
    blocks: Sequence[Sequence[tuple[Any, Any]]],
    base: str,
    tokens: NDArray[np.int32],
    seen: Sequence[Any] = (),
) -> None:
    """Write heads that share the model's output layer, as bfloat16.

    Args:
        staging: where to.
        blocks: of each head its (weight, bias) arrays.
        base: what the model is called; no path.
        tokens: what the model wrote.
        seen: of each head, what it makes of the model's own token [H, E]; (): they see none.
    """
    different, counts = np.unique(tokens, return_counts=True)
    ids = ArrayTensor(TOKEN_IDS, different[np.argsort(-counts, kind="stable")].astype(np.int32))
    staging.write_stream(TOKENS, safetensors_writer.pieces(safetensors_writer.order([ids])))
    arrays = {f"{head}.{TOKEN}.weight": array for head, array in enumerate(seen)}
    for head, layers in enumerate(blocks):
        for layer, (weight, bias) in enumerate(layers):
            arrays |= {f"{head}.{layer}.linear.weight": weight, f"{head}.{layer}.linear.bias": bias}
    tensors = [
        ArrayTensor(name, np.asarray(array, np.float32).astype(ml_dtypes.bfloat16)) for name, array in arrays.items()
    ]
    staging.write_stream(WEIGHTS[0], safetensors_writer.pieces(safetensors_writer.order(tensors)))
    config = {
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": base,
        "medusa_num_heads": len(blocks),
        "medusa_num_layers": len(blocks[0]),
        "model_type": "medusa",
        "version": "2",
    }
    staging.write(CONFIG, to_json(config))


def _read_tokens(directory: ModelDirectory, vocabulary: int) -> NDArray[np.int32] | None:
    if not directory.has(TOKENS):
        return None
    file, where = SafetensorsFile(directory, TOKENS), str(directory.path / TOKENS)
    if set(file.header.tensors) != {TOKEN_IDS} or (tensor := file.tensor(TOKEN_IDS)).dtype != "int32":
        raise CheckpointError(f"{where}: expected one tensor, {TOKEN_IDS}, of int32")
    ids: NDArray[np.int32] = weights.read(tensor)
    if ids.ndim != 1 or not len(ids) or len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
        raise CheckpointError(
            f"{where}: {TOKEN_IDS} are no different tokens of the model's {vocabulary}; use the file that was trained "
            "for it, or none"
        )
    return ids


def _sizes(directory: ModelDirectory) -> tuple[int, int]:
    where = str(directory.path / CONFIG)
    config = strict.parse_json(directory.read(CONFIG), where, CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: expected an object")
    sizes = []
    for key, most in (("medusa_num_heads", MOST_HEADS), ("medusa_num_layers", MOST_LAYERS)):
        value = config.get(key)
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(f"{where}: {key} is {json.dumps(value)}, expected a number from 1 to {most}")
        sizes.append(value)
    return sizes[0], sizes[1]
