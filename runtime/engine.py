"""Loads an engine directory: every file is checked against engine.json before its content is used."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError
from llmc.plugins.paged_attention.storage import bytes_per_position
from llmc.runtime import eagle as eagle_file
from llmc.runtime import heads as heads_file
from llmc.runtime import manifest as manifest_file
from llmc.runtime import plan_file, strict
from llmc.runtime.eagle import EngineEagle
from llmc.runtime.heads import EngineHeads
from llmc.runtime.manifest import FileEntry, KvCacheSpec, Limits, Manifest, ModelFacts
from llmc.runtime.plan import Plan
from llmc.runtime.safetensors_file import Header, read_header

WEIGHTS = "weights.safetensors"

WEIGHTS_ALIGNMENT = 64
"""Of the data of weights.safetensors in its file, and so in memory."""

MAX_JSON_BYTES = 1 << 29
"""No JSON file of an engine is larger than this (512 MiB)."""

HASH_BYTES = 1 << 20

NUMPY_DTYPES = {"bfloat16": np.dtype(np.uint16)}
"""What stands in for dtypes that numpy lacks: their bits."""


@dataclass(frozen=True)
class Weight:
    """A tensor of weights.safetensors, mapped and read-only. ``data`` holds its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def array(self) -> NDArray[Any]:
        """A view with the tensor's shape; bfloat16 appears as uint16."""
        return self.data.view(NUMPY_DTYPES.get(self.dtype) or np.dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class Engine:
    """A loaded engine. Small files are in memory, the weights are mapped; the directory may be moved or removed."""

    path: Path
    manifest: Manifest
    plan: Plan
    weights: Mapping[str, Weight]
    digest: str
    """SHA-256 of engine.json, which holds those of all other files."""
    _texts: Mapping[str, bytes]
    _mapping: mmap.mmap
    heads: EngineHeads | None = None
    """Medusa heads, if it was built with some."""
    eagle: EngineEagle | None = None
    """An EAGLE layer, if it was built with one."""

    @property
    def limits(self) -> Limits:
        """What it was built for."""
        return self.manifest.limits

    @property
    def model(self) -> ModelFacts:
        """What is known of the model."""
        return self.manifest.model

    @property
    def kv_cache(self) -> KvCacheSpec:
        """How keys and values are stored."""
        return self.manifest.kv_cache

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache for one position of one sequence."""
        return kv_bytes_per_token(self.plan, self.kv_cache)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.data.nbytes for weight in self.weights.values())

    def release_pages(self) -> None:
        """Give back the memory of the weights that were read; they are read again when they are needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def for_cpu(self) -> Engine:
        """Itself.

        Raises:
            EngineError: it is built for another device.
        """
        if self.manifest.target != "cpu":
            raise EngineError(f"{self.path}: built for {self.manifest.target}; this needs an engine for the CPU")
        return self

    def read(self, name: str) -> bytes | None:
        """The verified content of a small file, such as ``tokenizer/tokenizer.json``; None if the engine has none."""
        return self._texts.get(name)

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer, in the format of the tokenizers library.

        Raises:
            EngineError: the engine was built from a model without a tokenizer.
        """
        text = self.read("tokenizer/tokenizer.json")
        if text is None:
            raise EngineError(f"{self.path}: the engine has no tokenizer; use token ids as prompts")
        return text.decode()

    @property
    def chat_template(self) -> str | None:
        """The chat template (Jinja), or None."""
        text = self.read("tokenizer/chat_template.jinja")
        return None if text is None else text.decode()

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Defaults for sampling from the model's generation_config.json."""
        return self._json("tokenizer/generation_config.json")

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Texts that chat templates use: bos_token, eos_token, pad_token, unk_token."""
        return self._json("tokenizer/special_tokens.json")

    def _json(self, name: str) -> dict[str, Any]:
        text = self.read(name)
        value = {} if text is None else strict.parse_json(text, str(self.path / name))
        if not isinstance(value, dict):
            raise EngineError(f"{self.path / name}: expected an object")
        return value


def kv_bytes_per_token(plan: Plan, spec: KvCacheSpec) -> int:
    """Bytes of KV cache for one position of one sequence, scales included."""
    return sum(s.kv_heads * bytes_per_position(spec.dtype, s.key_dim, s.value_dim) for s in plan.kv_slots)


def load_engine(path: Path | str, *, expect_digest: str | None = None, read_weights: bool = True) -> Engine:
    """Open an engine and verify all of it.

    Args:
        path: the engine directory.
        expect_digest: ``sha256:`` and the hex digest that engine.json must have, or None.
        read_weights: verify what is in the files of weights, too; else only which tensors they have.

    Raises:
        EngineError: missing, damaged, of another format, or built for another target.
    """
    path = Path(path)
    with _directory(path) as directory:
        text = _read_small(directory, manifest_file.NAME, path, missing=f"{path}: there is no engine here")
        digest = hashlib.sha256(text).hexdigest()
        if expect_digest is not None and expect_digest.removeprefix("sha256:") != digest:
            raise EngineError(f"{path}: expected digest {expect_digest}, found sha256:{digest}")
        manifest = Manifest.from_bytes(text, str(path / manifest_file.NAME))
        _require(manifest, path)
        texts = {}
        with _mapped_weights(directory, WEIGHTS, manifest, path, read_weights) as (mapped, header):
            for name in sorted(manifest.files.keys() - {WEIGHTS, heads_file.WEIGHTS, eagle_file.WEIGHTS}):
                content = _read_small(directory, name, path)
                _check(content, manifest.files[name], path / name)
                texts[name] = content
            weights = _views(mapped, header)
            shapes = {weight.name: (weight.dtype, weight.shape) for weight in weights.values()}
            plan = plan_file.from_bytes(texts.pop(plan_file.NAME), shapes, manifest.limits, str(path / plan_file.NAME))
        heads = eagle = None
        if (own := _own_weights(directory, manifest, path, heads_file.FILES, "Medusa heads", read_weights)) is not None:
            files = texts[heads_file.PLAN], texts[heads_file.TREE]
            heads = heads_file.read_heads(*files, own, weights, manifest.model.vocab_size, manifest.limits, str(path))
        if (
            own := _own_weights(directory, manifest, path, eagle_file.FILES, "an EAGLE layer", read_weights)
        ) is not None:
            files, vocabulary = (texts[eagle_file.PLAN], texts[eagle_file.SPEC]), manifest.model.vocab_size
            eagle = eagle_file.read_eagle(*files, own, weights, plan, vocabulary, manifest.limits, str(path))
    return Engine(path, manifest, plan, weights, digest, texts, mapped, heads, eagle)


def _own_weights(
    directory: int, manifest: Manifest, path: Path, files: tuple[str, str, str], what: str, read: bool
) -> dict[str, Weight] | None:
    """Those of a part of the engine that has a plan, weights and another file; None if it isn't there."""
    missing = [name for name in files if name not in manifest.files]
    if len(missing) == len(files):
        return None
    if missing:
        raise EngineError(f"{path}: has {what}, but no {missing[0]}; build the engine anew")
    with _mapped_weights(directory, files[1], manifest, path, read) as (mapped, header):
        return _views(mapped, header)


def read_manifest(path: Path | str) -> Manifest:
    """Only engine.json, checked by itself; for listings.

    Raises:
        EngineError: as load_engine.
    """
    path = Path(path)
    with _directory(path) as directory:
        text = _read_small(directory, manifest_file.NAME, path, missing=f"{path}: there is no engine here")
    return Manifest.from_bytes(text, str(path / manifest_file.NAME))


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise EngineError(
            f"{path}: there is no such directory; build an engine with: llmc build MODEL -o {path}"
        ) from None
    except OSError as problem:
        raise EngineError(f"{path}: can't be opened as an engine directory ({problem.strerror})") from None
    try:
        yield directory
    finally:
        os.close(directory)


@contextmanager
def _open(directory: int, name: str, path: Path, missing: str = "") -> Iterator[int]:
    """A regular file below the directory; no component of the name may be a link."""
    opened = []
    parent = directory
    try:
        *folders, last = name.split("/")
        for folder in folders:
            parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            opened.append(parent)
        fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        opened.append(fd)
    except FileNotFoundError:
        _close(opened)
        raise EngineError(missing or f"{path / name}: the file is missing; the engine is damaged") from None
    except OSError as problem:
        _close(opened)
        raise EngineError(f"{path / name}: can't be opened ({problem.strerror}); links are not followed") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise EngineError(f"{path / name}: not a regular file")
        yield fd
    finally:
        _close(opened)


def _close(descriptors: list[int]) -> None:
    for fd in reversed(descriptors):
        os.close(fd)


def _read_small(directory: int, name: str, path: Path, missing: str = "") -> bytes:
    with _open(directory, name, path, missing) as fd, os.fdopen(os.dup(fd), "rb") as file:
        size = os.fstat(fd).st_size
        if size > MAX_JSON_BYTES:
            raise EngineError(f"{path / name}: {size} bytes, more than the {MAX_JSON_BYTES} that are read")
        return file.read()


def _require(manifest: Manifest, path: Path) -> None:
    for name in (plan_file.NAME, WEIGHTS):
        if name not in manifest.files:
            raise EngineError(f"{path / manifest_file.NAME}: lists no {name}")


def _digest(fd: int) -> str | OSError:
    """Read by calls: what is read through the mapping would count as memory of the process."""
    digest = hashlib.sha256()
    buffer, position = bytearray(HASH_BYTES), 0
    try:
        while count := os.preadv(fd, [buffer], position):
            digest.update(memoryview(buffer)[:count])
            position += count
    except OSError as problem:
        return problem
    return digest.hexdigest()


def _check(content: bytes, expected: FileEntry, path: Path) -> None:
    if len(content) != expected.size:
        raise EngineError(f"{path}: expected {expected.size} bytes, found {len(content)}; the file is damaged")
    _check_digest(hashlib.sha256(content).hexdigest(), expected, path)


def _check_digest(found: str, expected: FileEntry, path: Path) -> None:
    if found != expected.sha256:
        raise EngineError(f"{path}: expected SHA-256 {expected.sha256}, found {found}; the file is damaged")


@contextmanager
def _mapped_weights(
    directory: int, name: str, manifest: Manifest, path: Path, read: bool
) -> Iterator[tuple[mmap.mmap, Header]]:
    """The digest, if the file is to be ``read``, is computed in another thread meanwhile, and compared at the end.

    The size is checked before the file is mapped: a mapping that is longer than its file crashes when it is read.
    """
    where, expected = path / name, manifest.files[name]
    with _open(directory, name, path) as fd:
        if (size := os.fstat(fd).st_size) != expected.size:
            raise EngineError(f"{where}: expected {expected.size} bytes, found {size}; the file is damaged")
        header = read_header(fd, str(where))
        if header.data_begin % WEIGHTS_ALIGNMENT:
            raise EngineError(
                f"{where}: the data begin at byte {header.data_begin}, no multiple of {WEIGHTS_ALIGNMENT}"
            )
        if not read:
            yield mmap.mmap(fd, size, prot=mmap.PROT_READ), header
            return
        found: list[str | OSError] = []
        thread = threading.Thread(target=lambda: found.append(_digest(fd)))
        thread.start()
        try:
            yield mmap.mmap(fd, size, prot=mmap.PROT_READ), header
        finally:
            thread.join()  # before the file is closed
        if isinstance(digest := found[0], OSError):
            raise digest
        _check_digest(digest, expected, where)


def _views(mapped: mmap.mmap, header: Header) -> dict[str, Weight]:
    data = np.frombuffer(mapped, np.uint8)
    return {t.name: Weight(t.name, t.dtype, t.shape, data[t.begin : t.end]) for t in header.tensors.values()}
