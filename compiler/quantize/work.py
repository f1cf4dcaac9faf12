"""What a build has quantized so far: kept beside the target, so that a build that was killed can go on.

The folder belongs to a key, the hash of all that its content depends on. A result is complete once its .json file is
there; it is written last, and renamed into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.progress import Progress
from llmc.compiler.staging import disk_errors
from llmc.compiler.weights import numpy_dtype
from llmc.errors import LlmcError, ResourceError
from llmc.quantization.base import LayerInputs
from llmc.runtime import strict

KEY = "key.json"
READ_BYTES = 16 << 20
ALIGNMENT = 64
INPUT_PARTS = ("mean_abs", "max_abs", "rows", "hessian")
KEPT = "what was quantized so far is kept"

FOLDED = "folded "
"""What names of records of floats with factors begin with."""

SENSITIVITY, TRIES, FOUND = "sensitivity", "tries", "held-out text"
"""Records of a choice of formats."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file of the folder, to be written to weights.safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize

    def chunks(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes in order."""
        with open(self.path, "rb", buffering=0) as file:
            position, end = self.begin, self.begin + self.nbytes
            while position < end:
                piece = os.pread(file.fileno(), min(READ_BYTES, end - position), position)
                if not piece:
                    raise ResourceError(f"{self.path}: was cut short; remove {self.path.parent} and build again")
                yield np.frombuffer(piece, np.uint8)
                position += len(piece)

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows of the first axis as an array."""
        stop = self.shape[0] if stop is None else stop
        dtype, rest = numpy_dtype(self.dtype), self.shape[1:]
        width = int(np.prod(rest, dtype=np.int64))
        begin = self.begin + start * width * dtype.itemsize
        array = np.fromfile(self.path, dtype, (stop - start) * width, offset=begin)
        return array.reshape(stop - start, *rest)


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is in the file of its record. ``suffix``: what its name has after that of the weight."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Record:
    """A quantized weight, or another result. ``facts``: plain values for the report and for the steps."""

    name: str
    tensors: tuple[TensorEntry, ...]
    facts: Mapping[str, Any]


class Writer:
    """Writes the tensors of a record, one behind the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by the record
        self._entries: list[TensorEntry] = []
        self._position = 0

    def tensor(self, suffix: str, dtype: str, shape: Sequence[int], pieces: Iterator[NDArray[Any]]) -> None:
        """Append a tensor from arrays with its bytes in order."""
        padding = -self._position % ALIGNMENT
        self._write(bytes(padding))
        begin = self._position
        for piece in pieces:
            self._write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        size = int(np.prod(tuple(shape), dtype=np.int64)) * numpy_dtype(dtype).itemsize
        assert self._position - begin == size, f"{self._path}: a tensor of {size} bytes got {self._position - begin}"
        self._entries.append(TensorEntry(suffix, dtype, tuple(shape), begin))

    def finish(self) -> tuple[TensorEntry, ...]:
        """Flush it to disk."""
        os.fsync(self._file.fileno())
        self._file.close()
        return tuple(self._entries)

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            count = self._file.write(view)
            view, self._position = view[count:], self._position + count


class Work:
    """The folder. One build at a time uses it: it is guarded by the lock of the target."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, Record] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be lost with it."""
        return not self._records and not (self.path / "state.json").exists()

    def is_whole(self) -> bool:
        """Whether all records can be read, and their tensors are there in full; finds all of them."""
        try:
            for file in sorted(self.path.glob("*.json")):
                if file.name in (KEY, "state.json"):
                    continue
                record = self.find(strict.parse_json(file.read_bytes(), file.name)["name"])
                tensors = () if record is None else self.tensors(record).values()
                if any(tensor.path.stat().st_size < tensor.begin + tensor.nbytes for tensor in tensors):
                    return False
        except (LlmcError, OSError, KeyError, TypeError, AttributeError):
            return False
        return True

    def find(self, name: str) -> Record | None:
        """A complete result, or None."""
        if name not in self._records:
            try:
                text = (self.path / f"{_file_name(name)}.json").read_bytes()
            except FileNotFoundError:
                return None
            self._records[name] = strict.load(Record, strict.parse_json(text, name), name)
        return self._records[name]

    def forget(self, name: str) -> None:
        """Remove a result, if there is one."""
        stem = self.path / _file_name(name)
        self._records.pop(name, None)
        for suffix in (".json", ".bin"):  # without the first of them the second does not count
            stem.with_suffix(suffix).unlink(missing_ok=True)

    @contextmanager
    def record(self, name: str, facts: dict[str, Any]) -> Iterator[Writer]:
        """Write a result; it counts when the context is left, with what ``facts`` hold then.

        Raises:
            ResourceError: the disk is full or fails.
        """
        stem = self.path / _file_name(name)
        with disk_errors(stem, KEPT):
            part = stem.with_suffix(".part")
            writer = Writer(part)
            try:
                yield writer
                entries = writer.finish()
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            os.replace(part, stem.with_suffix(".bin"))
            record = Record(name, entries, dict(facts))
            write_whole(stem.with_suffix(".json"), asdict(record))
            self._records[name] = record

    def tensors(self, record: Record) -> dict[str, StoredTensor]:
        """The tensors of a record by suffix."""
        path = self.path / f"{_file_name(record.name)}.bin"
        return {
            entry.suffix: StoredTensor(record.name + entry.suffix, entry.dtype, entry.shape, path, entry.begin)
            for entry in record.tensors
        }

    def keep_inputs(self, name: str, inputs: Mapping[str, LayerInputs], facts: dict[str, Any]) -> None:
        """Write what calibration saw arrive at a layer: at all of it, or at each expert, by a key."""
        facts["counts"] = {key: given.count for key, given in inputs.items()}
        with self.record(name, facts) as writer:
            for key, given in inputs.items():
                for part in INPUT_PARTS:
                    array = getattr(given, part)
                    if array is not None:
                        writer.tensor(f"/{key}/{part}", array.dtype.name, array.shape, iter([array]))

    def inputs(self, record: Record, key: str) -> LayerInputs:
        """Read one of them back."""
        tensors = self.tensors(record)
        found = {part: tensors.get(f"/{key}/{part}") for part in INPUT_PARTS}
        arrays = {part: None if tensor is None else tensor.read() for part, tensor in found.items()}
        return LayerInputs(count=int(record.facts["counts"][key]), **arrays)  # type: ignore[arg-type]


@contextmanager
def open_work(target: Path, key: Mapping[str, Any], progress: Progress) -> Iterator[Work]:
    """The work folder of a target; removed when the build succeeds, kept if it has something a later one can use.

    Args:
        target: the engine that is being built.
        key: all that the results depend on; a folder with another key is removed.
        progress: is told what is taken up.
    """
    path = work_path(target)
    digest = key_digest(key)
    with disk_errors(path):
        if path.exists() and (found := _key_of(path)) != digest:
            if found is not None:  # without a key it is what was left while a folder was removed
                progress.note(f"{path}: belongs to a build with other inputs or options; removed")
            _remove(path)
        elif path.exists() and not Work(path).is_whole():
            progress.note(f"{path}: what an earlier build left there is damaged; removed")
            _remove(path)
        elif path.exists():
            progress.note(f"taking up what an earlier build left in {path}")
        path.mkdir(exist_ok=True)
        write_whole(path / KEY, {"key": digest, "of": key})
    work = Work(path)
    work.is_whole()  # knows its records from here on
    for part in path.glob("*.part"):
        part.unlink()
    try:
        yield work
    except BaseException as problem:
        if work.is_empty:
            _remove(path)
        elif isinstance(problem, LlmcError):
            problem.args = (f"{problem}; {KEPT} in {path}, and the next build with the same options goes on there",)
        else:
            progress.note(f"{KEPT} in {path}; the same command goes on there")
        raise
    _remove(path)


def work_path(target: Path) -> Path:
    """Where the folder of a target is."""
    target = Path(os.path.realpath(target))
    return target.with_name(f".{target.name}.llmc-quant")


def key_digest(key: Mapping[str, Any]) -> str:
    """Its SHA-256."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def write_whole(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file that is there whole or not at all."""
    part = path.with_suffix(".tmp")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _remove(path: Path) -> None:
    """The key goes first, so that a build that is killed here leaves nothing that counts."""
    (path / KEY).unlink(missing_ok=True)
    shutil.rmtree(path)


def _key_of(path: Path) -> str | None:
    try:
        return str(json.loads((path / KEY).read_text())["key"])
    except (OSError, ValueError, KeyError):
        return None


def _file_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]
