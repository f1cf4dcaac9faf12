"""Reads a model: its config, and for every parameter of the Hugging Face model where its numbers are.

A checkpoint is a directory with safetensors files (one, or shards with an index), a snapshot in a Hugging Face cache,
or a GGUF file. Nothing in it is executed, and only what has been checked is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.gguf_checkpoint import read_gguf
from llmc.compiler.gguf_tokenizer import freeze_gguf
from llmc.compiler.model_config import read_config, read_generation_config, read_quantization
from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.naming import bind, meta_model
from llmc.compiler.prequantized.base import read_quantized
from llmc.compiler.quantized_views import dequantized, quantized_parts
from llmc.compiler.quantized_weights import describe
from llmc.compiler.safetensors_file import SafetensorsFile
from llmc.compiler.tokenizer import FrozenTokenizer, freeze_directory
from llmc.compiler.weights import Cast, WeightSource
from llmc.errors import CheckpointError
from llmc.runtime import strict

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be compiled.

    ``dtype`` is the one that most of its numbers are stored in, or that they have once they are dequantized (of GGUF
    blocks and 8-bit floats: bfloat16, the smallest that llmc computes with). ``stored`` counts bytes by how they are
    stored; ``directory`` knows what files were read.
    """

    path: Path
    config: Any
    generation_config: Mapping[str, Any]
    dtype: str
    stored: Mapping[str, int]
    directory: ModelDirectory
    warnings: Sequence[str]
    ignored: Sequence[str]
    is_quantized: bool
    """Whether weights are stored as codes."""
    _weights: Mapping[str, WeightSource]
    _gguf: Mapping[str, Any] | None = None
    """The metadata of a GGUF file."""

    @staticmethod
    def open(path: Path | str, *, allow_hard_links: bool = False, dequantize: bool = False) -> Checkpoint:
        """Open a model directory or a GGUF file and check everything but the numbers.

        Args:
            path: the directory, or a file that ends in .gguf.
            allow_hard_links: accept files that have a second name.
            dequantize: weights that are stored quantized are nothing but the floats that they stand for.

        Raises:
            CheckpointError: it is not complete, contradicts itself, or holds something that is not supported.
        """
        path = Path(path)
        if path.suffix == ".gguf" and not path.is_dir():
            path = path.resolve()  # the user names this very file, so links to it are meant
            return _open_gguf(ModelDirectory(path.parent, allow_hard_links=True), path.name, dequantize)
        directory = ModelDirectory(path, allow_hard_links)
        files = [name for name in directory.names if name.endswith(".gguf")]
        if files and not any(name.endswith(".safetensors") for name in directory.names):
            if len(files) > 1:
                raise CheckpointError(f"{path}: holds {len(files)} GGUF files; name one of {', '.join(files)}")
            return _open_gguf(directory, files[0], dequantize)
        return _open_directory(directory, dequantize)

    @property
    def names(self) -> Sequence[str]:
        """The parameters of the Hugging Face model, tied ones included."""
        return list(self._weights)

    def weight(self, name: str) -> WeightSource:
        """Where the numbers of a parameter are; tied parameters have the same source.

        Raises:
            CheckpointError: the model has no such parameter.
        """
        if name not in self._weights:
            raise CheckpointError(f"{self.path}: the model has no parameter {name!r}")
        return self._weights[name]

    @property
    def parameters(self) -> int:
        """Numbers in all weights, tied ones counted once."""
        return sum(_count(source.shape) for source in {id(s): s for s in self._weights.values()}.values())

    def tokenizer(self) -> FrozenTokenizer | None:
        """The tokenizer, chat template and special tokens as an engine keeps them; None if the model has none.

        Raises:
            CheckpointError: they can't be read.
        """
        if self._gguf is not None:
            return freeze_gguf(self._gguf, str(self.path))
        return freeze_directory(self.directory, self.config)


def _open_gguf(directory: ModelDirectory, name: str, dequantize: bool) -> Checkpoint:
    path = directory.path / name
    gguf = read_gguf(directory, name)
    model = meta_model(gguf.config)
    tensors = gguf.tensors(model, dequantize)
    bound = bind(tensors, {}, model, str(path), rules=())
    warnings = [*gguf.warnings, *bound.warnings]
    if gguf.quantized:
        warnings.append(_note(tensors.values(), ", ".join(gguf.quantized), dequantize))
    return Checkpoint(
        path=path,
        config=gguf.config,
        generation_config=gguf.generation_config,
        dtype=gguf.dtype,
        stored=gguf.file.types,
        directory=directory,
        warnings=warnings,
        ignored=bound.ignored,
        is_quantized=bool(gguf.quantized),
        _weights=bound.weights,
        _gguf=gguf.file.metadata,
    )


def _open_directory(directory: ModelDirectory, dequantize: bool) -> Checkpoint:
    path = directory.path
    names = _shard_names(directory)  # before config.json: a directory of pickles is refused whatever else it lacks
    config = read_config(directory)
    tensors, metadata = _read_shards(directory, names)
    aliases = {alias: name for alias, name in metadata.items() if name in tensors and alias not in tensors}
    stored = Counter[str]()
    for source in tensors.values():
        stored[source.dtype] += source.nbytes
    model = meta_model(config)
    warnings: list[str] = []
    quantization = read_quantization(directory)
    if quantization is not None:
        tensors, warnings = read_quantized(quantization, tensors, str(path / "config.json"), config, model, metadata)
        warnings.append(_note(tensors.values(), str(quantization.get("quant_method")), dequantize))
        tensors = {name: dequantized(source) for name, source in tensors.items()} if dequantize else tensors
    bound = bind({name: _widen(source) for name, source in tensors.items()}, aliases, model, str(path))
    return Checkpoint(
        path=path,
        config=config,
        generation_config=read_generation_config(directory),
        dtype=_main_dtype(tensors, path),
        stored=dict(stored),
        directory=directory,
        warnings=[*warnings, *bound.warnings],
        ignored=bound.ignored,
        is_quantized=quantization is not None,
        _weights=bound.weights,
    )


def _note(sources: Iterable[WeightSource], method: str, dequantize: bool) -> str:
    if dequantize:
        return (
            f"the weights are dequantized from {method}; as bfloat16 they are rounded once more, "
            "--dtype float32 keeps them exactly"
        )
    forms = Counter(describe(part) for source in sources for part in quantized_parts(source))
    codes = ", ".join(f"{form}: {count}" for form, count in sorted(forms.items()))
    return f"weights that {method} quantized have codes of {codes or 'no format that llmc computes with'}"


def _shard_names(directory: ModelDirectory) -> list[str]:
    """The files that hold the weights. A single file goes before an index, as in transformers."""
    if directory.has(SINGLE):
        return [SINGLE]
    if directory.has(INDEX):
        return sorted(set(_read_index(directory).values()))
    found = [name for name in directory.names if name.endswith(".safetensors")]
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{directory.path}: holds {', '.join(found[:8])}, but no {INDEX} that says which belong together"
        )
    pickles = [name for name in directory.names if name.endswith(PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{directory.path}: has only pickled weights ({', '.join(pickles[:3])}), which can run code when they are "
            "read: safetensors only. Convert them where you trust the file: "
            "transformers' from_pretrained, then save_pretrained(..., safe_serialization=True)"
        )
    where = f"{directory.path / 'snapshots'}/..." if directory.has("snapshots") else ""
    hint = f"; name a snapshot of this cache entry: {where}" if where else ""
    raise CheckpointError(f"{directory.path}: holds no weights (*.safetensors or *.gguf){hint}")


def _read_index(directory: ModelDirectory) -> dict[str, str]:
    where = str(directory.path / INDEX)
    content = strict.parse_json(directory.read(INDEX), where, CheckpointError)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{where}: must have a weight_map from tensor names to file names")
    return weight_map


def _read_shards(directory: ModelDirectory, names: Sequence[str]) -> tuple[dict[str, WeightSource], dict[str, str]]:
    """All tensors by name, and the files' metadata, which may state aliases."""
    indexed = _read_index(directory) if names != [SINGLE] and directory.has(INDEX) else None
    if indexed is not None:
        _check_all_there(directory, indexed)
    tensors: dict[str, WeightSource] = {}
    home: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for name in names:
        shard = SafetensorsFile(directory, name)
        for tensor in shard.header.tensors:
            if tensor in home:
                raise CheckpointError(f"{directory.path}: tensor {tensor!r} is in {home[tensor]} and in {name}")
            home[tensor] = name
            tensors[tensor] = shard.tensor(tensor)
        metadata |= shard.header.metadata
    if indexed is not None:
        _check_index(directory, indexed, home)
    return tensors, metadata


def _check_all_there(directory: ModelDirectory, index: Mapping[str, str]) -> None:
    for shard in sorted(set(index.values())):
        if "/" in shard or "\\" in shard or "\0" in shard or shard in ("", ".", ".."):
            raise CheckpointError(
                f"{directory.path / INDEX}: {shard!r} is not the plain name of a file in this directory"
            )
    missing = [shard for shard in sorted(set(index.values())) if not directory.has(shard)]
    if missing:
        lost = [tensor for tensor, name in index.items() if name in missing]
        raise CheckpointError(
            f"{directory.path}: missing are {_some(missing)}, which hold {len(lost)} of the tensors: {_some(lost)}"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")


def _check_index(directory: ModelDirectory, index: Mapping[str, str], home: Mapping[str, str]) -> None:
    where = directory.path / INDEX
    for tensor, name in index.items():
        if home.get(tensor) != name:
            found = f"it is in {home[tensor]}" if tensor in home else "it is in none of the files"
            raise CheckpointError(f"{where}: says that tensor {tensor!r} is in {name}, but {found}")


def _widen(source: WeightSource) -> WeightSource:
    """8-bit floats become bfloat16, which holds each of them exactly; float64 becomes float32."""
    if source.dtype.startswith("float8"):
        return Cast(source, "bfloat16")
    return Cast(source, "float32") if source.dtype == "float64" else source


def _main_dtype(tensors: Mapping[str, WeightSource], path: Path) -> str:
    """By bytes, matrices only: norms are often kept wider than the rest."""
    sizes = Counter[str]()
    for source in tensors.values():
        if source.dtype in FLOATS and len(source.shape) > 1:
            sizes[_widen(source).dtype] += source.nbytes
    if not sizes:
        raise CheckpointError(f"{path}: holds no matrix of floats; is it quantized, and its config does not say how?")
    return max(sorted(sizes), key=lambda dtype: sizes[dtype])


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
