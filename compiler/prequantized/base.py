"""What reads a quantized checkpoint: the options of its config, its tensors by module, and weights made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from llmc import discover
from llmc.compiler import weights
from llmc.compiler.prequantized.sources import ActOrder
from llmc.compiler.weights import WeightSource
from llmc.errors import CheckpointError, CompileError

FLOATS = ("float16", "bfloat16", "float32")
REQUIRED: Any = object()
NOTHING: tuple[Any, ...] = (None, False, [], {})


class Options:
    """The ``quantization_config`` of a config.json, read strictly. ``dtype``: the floats that the model computes in."""

    def __init__(self, values: Mapping[str, Any], where: str, dtype: str) -> None:
        """``where``: the file, for messages."""
        self.where = f"{where}: quantization_config"
        self.dtype = dtype
        self._values = values
        self._known: set[str] = set()

    def get(self, name: str, kind: type, default: Any = REQUIRED, allowed: Sequence[Any] = ()) -> Any:
        """A value of that type, and one of those allowed; ``default`` where it is missing or null.

        Raises:
            CheckpointError: it is missing or of another type.
            CompileError: its value is not supported.
        """
        self._known.add(name)
        value = self._values.get(name)
        if value is None and default is not REQUIRED:
            return default
        if type(value) is not kind:
            found = "is missing" if value is None else f"must be {kind.__name__}, found {value!r}"
            raise CheckpointError(f"{self.where}: {name} {found}")
        if allowed and value not in allowed:
            raise CompileError(
                f"{self.where}: {name} {value!r} is not supported; supported: {', '.join(map(str, allowed))}"
            )
        return value

    def has(self, name: str) -> bool:
        """Whether there is a value."""
        return self._values.get(name) is not None

    def ignore(self, *names: str) -> None:
        """Keys that say how the checkpoint was made, or how to run it, but not what its numbers are."""
        self._known.update(names)

    def nested(self, name: str, values: Any) -> Options:
        """An object inside, under the name of its place.

        Raises:
            CheckpointError: it is no object.
        """
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{self.where}.{name} must be an object, found {values!r}")
        inner = Options(values, "", self.dtype)
        inner.where = f"{self.where}.{name}"
        return inner

    @property
    def unknown(self) -> list[str]:
        """Keys that nobody asked for and that have a value."""
        return sorted(key for key, value in self._values.items() if key not in self._known and value not in NOTHING)


@dataclass(frozen=True)
class Kind:
    """A way to store quantized weights.

    ``read`` takes tensors of a Tensors away and puts weights in their place.
    """

    name: str
    read: Callable[[Options, Tensors], None]


class Tensors:
    """The tensors of a checkpoint, from which those of quantized modules are taken away, and weights put back."""

    def __init__(self, tensors: Mapping[str, WeightSource], where: str, metadata: Mapping[str, str]) -> None:
        """``where``: the directory, for messages; ``metadata``: of the files."""
        self.left: dict[str, WeightSource] = dict(tensors)
        self.weights: dict[str, WeightSource] = {}
        self.notes: dict[str, None] = {}
        self.where = where
        self.metadata = metadata

    def stems(self, suffix: str) -> list[str]:
        """What stands before the suffix, in the names that end with it."""
        return [name.removesuffix(suffix) for name in self.left if name.endswith(suffix)]

    def take(
        self, name: str, dtypes: str | Sequence[str], shape: Sequence[int | None] | None = None, why: str = ""
    ) -> WeightSource:
        """Take a tensor away. A size of None is any.

        Raises:
            CheckpointError: it is missing, or of another dtype or shape.
        """
        if name not in self.left:
            raise CheckpointError(f"{self.where}: tensor {name!r} is missing{why and f', {why}'}")
        source = self.left.pop(name)
        if 0 in source.shape:
            raise self.fail(name, f"has the shape {list(source.shape)}: it is empty")
        allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
        if source.dtype not in allowed:
            raise CheckpointError(
                f"{self.where}: tensor {name!r} is {source.dtype}, expected {' or '.join(allowed)}{why and f': {why}'}"
            )
        if shape is not None:
            fits = [size is None or size == found for size, found in zip(shape, source.shape, strict=False)]
            if len(shape) != len(source.shape) or not all(fits):
                expected = ", ".join("any" if size is None else str(size) for size in shape)
                raise CheckpointError(
                    f"{self.where}: tensor {name!r} has the shape {list(source.shape)}, expected [{expected}]"
                    f"{why and f': {why}'}"
                )
        return source

    def pop(self, name: str) -> WeightSource | None:
        """Take a tensor away if it is there."""
        return self.left.pop(name, None)

    def put(self, name: str, weight: WeightSource) -> None:
        """A weight that was made.

        Raises:
            CheckpointError: the checkpoint holds one of that name.
        """
        if name in self.left or name in self.weights:
            raise CheckpointError(f"{self.where}: holds {name!r} both quantized and as floats")
        self.weights[name] = weight

    def fail(self, name: str, what: str) -> CheckpointError:
        """An error about a tensor."""
        return CheckpointError(f"{self.where}: tensor {name!r}: {what}")


@cache
def kinds() -> Mapping[str, Kind]:
    """Those that are known, by ``quant_method``."""
    return {kind.name: kind for kind in discover.instances("llmc.compiler.prequantized", Kind)}


def read_quantized(
    values: Mapping[str, Any],
    tensors: Mapping[str, WeightSource],
    where: str,
    config: Any,
    model: Any,
    metadata: Mapping[str, str] | None = None,
) -> tuple[dict[str, WeightSource], list[str]]:
    """The tensors with weights in place of what a quantizer stored for them, and notes for the user.

    Args:
        values: quantization_config.
        tensors: those of the checkpoint.
        where: config.json, for messages.
        config: of the model; its dtype is what weights are dequantized to that have no other.
        model: on the meta device.
        metadata: of the files.

    Raises:
        CheckpointError: the checkpoint contradicts itself or lacks something.
        CompileError: it is quantized in a way that is not supported.
    """
    method = values.get("quant_method")
    if method is None and values.get("load_in_4bit", values.get("load_in_8bit")) is not None:
        method = "bitsandbytes"  # before transformers wrote quant_method
    if not isinstance(method, str) or method not in kinds():
        raise CompileError(
            f"{where}: the checkpoint is quantized by {method!r}, which is not supported; supported: "
            f"{', '.join(kinds())}. Or use the unquantized model"
        )
    options = Options(values, where, _dtype(config))
    taken = Tensors(tensors, where.removesuffix("/config.json"), metadata or {})
    options.ignore("quant_method")
    kinds()[method].read(options, taken)
    if not taken.weights:
        raise CheckpointError(f"{options.where}: says {method}, but none of the tensors is quantized")
    notes = list(taken.notes)
    if options.unknown:
        notes.append(f"quantization_config has keys that were not looked at: {', '.join(options.unknown)}")
    return taken.left | _turned(taken.weights, model), notes


def _dtype(config: Any) -> str:
    """The floats that a model was made for."""
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in FLOATS else "bfloat16"


def _turned(made: Mapping[str, WeightSource], model: Any) -> dict[str, WeightSource]:
    """All formats have rows of outputs; transformers' Conv1D has columns of them."""
    turned = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    prefix = model.base_model_prefix
    return {
        name: weights.Transpose(source, (1, 0)) if turned & {name, f"{prefix}.{name}"} else source
        for name, source in made.items()
    }


def group_size(options: Options, name: str) -> int:
    """The columns of a group; 0 (in the file -1) is one group for a row.

    Raises:
        CheckpointError: it is no size.
    """
    group: int = options.get(name, int)
    if group < 1 and group != -1:
        raise CheckpointError(f"{options.where}: {name} {group} is no size; a number above 0, or -1 for whole rows")
    return max(group, 0)


def input_scale(tensors: Tensors, name: str, zero: str = "") -> tuple[float, ...]:
    """A scale for the inputs of a product, and what the tensor ``zero`` holds if that is not 0.

    Raises:
        CheckpointError: they are missing, or no numbers that could be meant.
    """
    found = weights.read(tensors.take(name, FLOATS, why="though the scheme of the inputs is static"))
    if found.size != 1 or not 0 < float(found.reshape(-1)[0]) < np.inf:
        raise tensors.fail(name, f"must be one positive number, found {found.reshape(-1)[:4].tolist()}")
    scale = float(found.reshape(-1)[0])
    source = tensors.pop(zero) if zero else None
    if source is None:
        return (scale,)
    point = weights.read(source).astype(np.float32).reshape(-1)
    if point.size != 1 or not -128 <= point[0] <= 127:
        raise tensors.fail(zero, f"must be one number from -128 to 127, found {point[:4].tolist()}")
    return (scale, float(point[0])) if point[0] else (scale,)


def act_order(tensors: Tensors, name: str, columns: int, group: int) -> ActOrder | None:
    """What a tensor g_idx says; None if there is none, or neighbours are in one group as usual.

    Raises:
        CheckpointError: its shape or the groups that it names are wrong.
    """
    if name not in tensors.left:
        return None
    found = weights.read(tensors.take(name, ("int32", "int64"), (columns,))).astype(np.int64)
    count = -(-columns // group) if group else 1
    if found.min() < 0 or found.max() >= count:
        raise tensors.fail(name, f"names the groups {found.min()} to {found.max()}, but there are {count}")
    if np.array_equal(found, np.arange(columns) // (group or columns)):
        return None
    result = ActOrder(found, group)
    if result.order is None:
        tensors.notes["groups of g_idx have other sizes than group_size says: these weights are dequantized"] = None
    return result
