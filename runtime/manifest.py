"""engine.json: what an engine is, what it was built for, and the checksum of each of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import EngineError
from llmc.plugins.paged_attention.storage import KV_DTYPES
from llmc.runtime import strict

FORMAT = 1
"""The engine format that this version writes."""

READABLE_FORMATS = (1,)
"""The formats that this version runs: its own and, from format 2 on, the one before."""

TARGETS = ("cpu", "cuda")
"""The devices whose engines this version runs; for cuda, architectures follow: cuda:sm_80,sm_90."""

NAME = "engine.json"


@dataclass(frozen=True)
class Limits:
    """What an engine was built for: tokens of a sequence, tokens of a step, sequences that run at the same time."""

    max_seq_len: int
    max_batch_tokens: int
    max_sequences: int


@dataclass(frozen=True)
class ModelFacts:
    """What the runtime has to know of the model.

    ``vocab_size`` counts the rows of the logits. ``eos_token_ids`` may be empty. ``add_bos``, ``add_eos``: what the
    tokenizer puts around a text that is not a chat. ``rope`` describes the rotary embedding and, where it was frozen,
    for which length. ``quantization``: the methods and formats of the weights, "" if they are as ``dtype`` says.
    """

    architecture: str
    model_type: str
    parameters: int
    dtype: str
    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    add_bos: bool
    add_eos: bool
    rope: str = ""
    quantization: str = ""


@dataclass(frozen=True)
class KvCacheSpec:
    """How keys and values are stored: dtype (one of storage.KV_DTYPES), and positions per block."""

    dtype: str
    block_size: int


@dataclass(frozen=True)
class FileEntry:
    """Checksum and size in bytes of one file."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """The content of engine.json."""

    format: int
    llmc: str
    target: str
    limits: Limits
    model: ModelFacts
    kv_cache: KvCacheSpec
    files: Mapping[str, FileEntry]
    inputs_sha256: str

    def to_bytes(self) -> bytes:
        """The file, the same bytes for the same content."""
        return (json.dumps(strict.dump(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def from_bytes(text: bytes, where: str) -> Manifest:
        """Parse and check everything that can be checked without another file.

        Raises:
            EngineError: damaged, of another format or for another target; says what was found and what is supported.
        """
        value = strict.parse_json(text, where)
        if not isinstance(value, dict):
            raise EngineError(f"{where}: expected an object")
        _check_format(value, where)
        manifest = strict.load(Manifest, value, where)
        _check_values(manifest, where)
        return manifest


def rebuild_command(value: Mapping[str, Any] | Manifest) -> str:
    """The command that builds the engine anew; only the model's path is left to fill in."""
    limits: Any = value.limits if isinstance(value, Manifest) else value.get("limits")
    if isinstance(value, Manifest):
        limits = strict.dump(limits)
    command = "llmc build MODEL -o ENGINE --force"
    for name in ("max_seq_len", "max_batch_tokens", "max_sequences"):
        if isinstance(limits, dict) and type(limits.get(name)) is int:
            command += f" --{name.replace('_', '-')} {limits[name]}"
    return command


def _check_format(value: dict[str, Any], where: str) -> None:
    """Before anything else is looked at: a later format may have any other fields."""
    found, target = value.get("format"), value.get("target")
    if type(found) is not int:
        raise EngineError(f"{where}: the key 'format' must be an int, found {found!r}; is this an llmc engine?")
    if found not in READABLE_FORMATS:
        supported = " and ".join(map(str, READABLE_FORMATS))
        raise EngineError(
            f"{where}: engine format {found} (written by llmc {value.get('llmc')}), but this llmc reads format "
            f"{supported}; rebuild it with: {rebuild_command(value)}"
        )
    if not isinstance(target, str) or target.partition(":")[0] not in TARGETS:
        raise EngineError(
            f"{where}: built for target {target!r}, but this llmc runs {', '.join(TARGETS)}; rebuild it with: "
            f"{rebuild_command(value)} --target {TARGETS[0]}"
        )


def _check_values(manifest: Manifest, where: str) -> None:
    limits, model = manifest.limits, manifest.model
    for name, value in strict.dump(limits).items():
        if not 1 <= value < 1 << 31:
            raise EngineError(f"{where}: limits.{name} is {value}, expected 1 to 2147483647")
    if not 1 <= model.vocab_size < 1 << 31:
        raise EngineError(f"{where}: model.vocab_size is {model.vocab_size}")
    if manifest.kv_cache.dtype not in KV_DTYPES:
        raise EngineError(
            f"{where}: kv_cache.dtype {manifest.kv_cache.dtype!r} is not supported; known: {', '.join(KV_DTYPES)}"
        )
    if not 1 <= manifest.kv_cache.block_size <= 1024 or manifest.kv_cache.block_size % 16:
        raise EngineError(
            f"{where}: kv_cache.block_size {manifest.kv_cache.block_size} is no multiple of 16 up to 1024"
        )
    ids = [*model.eos_token_ids, *(i for i in (model.bos_token_id, model.pad_token_id) if i is not None)]
    if bad := [i for i in ids if not 0 <= i < 1 << 31]:
        raise EngineError(f"{where}: {bad[0]} is no token id")
    for name, entry in manifest.files.items():
        check_name(name, where)
        if entry.size < 0 or len(entry.sha256) != 64 or set(entry.sha256) - set("0123456789abcdef"):
            raise EngineError(f"{where}: files.{name} has no valid size and sha256")


def check_name(name: str, where: str) -> None:
    """Names of files are relative, with plain components only.

    Raises:
        EngineError: the name could lead out of the directory.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(c in name for c in "\\\0:"):
        raise EngineError(f"{where}: {name!r} is not the name of a file in the engine")
