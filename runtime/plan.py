"""The instruction set of the runtime: what the compiler emits as plan.json and the executors run.

A plan is a list of steps over values. A value is a strided view of the arena, of a weight or of a batch input; its
shape, strides and offset are linear in the two sizes that change from step to step: T, the packed tokens of the step,
and N, the rows whose logits are asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.errors import EngineError

Attribute = bool | int | float | str

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
"""The dtypes of values, and the bytes of an element."""

FLOATS = ("float32", "bfloat16", "float16")

ADAPTER_INPUTS = ("adapters", "row_adapters")
"""More of them, [T] and [N], in plans that runtime/lora.py has added steps to; -1 is none."""

MAX_DIMS = 8
"""Axes that a value may have (kMaxDims of plugins/csrc/kernel.h)."""

BATCH_INPUTS = ("input_ids", "position_ids", "logit_rows")
"""int32 arrays of the batch that steps may read: [T], [T] and [N]."""


@dataclass(frozen=True, order=True)
class Dim:
    """constant + tokens * T + rows * N. In JSON an int, or an object such as ``{"T": 64, "1": 3}``."""

    constant: int = 0
    tokens: int = 0
    rows: int = 0

    def at(self, tokens: int, rows: int) -> int:
        """The size for a step with so many tokens and logit rows."""
        return self.constant + self.tokens * tokens + self.rows * rows

    @property
    def is_constant(self) -> bool:
        """Whether it is the same at every step."""
        return not (self.tokens or self.rows)

    def __add__(self, other: Dim | int) -> Dim:
        if isinstance(other, int):
            other = Dim(other)
        return Dim(self.constant + other.constant, self.tokens + other.tokens, self.rows + other.rows)

    def __mul__(self, factor: Dim | int) -> Dim:
        if isinstance(factor, Dim):
            if not factor.is_constant:
                if not self.is_constant:
                    raise ValueError(f"{self} * {factor} is not linear in T and N")
                return factor * self.constant
            factor = factor.constant
        return Dim(self.constant * factor, self.tokens * factor, self.rows * factor)

    def to_json(self) -> int | dict[str, int]:
        """The JSON form."""
        if self.is_constant:
            return self.constant
        parts = {"T": self.tokens, "N": self.rows, "1": self.constant}
        return {key: value for key, value in parts.items() if value}

    @staticmethod
    def from_json(value: Any) -> Dim:
        """Read the JSON form.

        Raises:
            EngineError: it is neither an int nor an object of T, N and 1.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            return Dim(value)
        if not isinstance(value, dict) or not set(value) <= {"T", "N", "1"}:
            raise EngineError(f"plan.json: {value!r} is not a size; expected an int or an object with T, N and 1")
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value.values()):
            raise EngineError(f"plan.json: {value!r} is not a size; its parts must be ints")
        return Dim(value.get("1", 0), value.get("T", 0), value.get("N", 0))


class Storage(enum.Enum):
    """Where a value lives."""

    ARENA = "arena"
    WEIGHT = "weight"
    BATCH = "batch"

    def to_json(self) -> str:
        """The JSON form."""
        return self.value

    @staticmethod
    def from_json(value: Any) -> Storage:
        """Read the JSON form.

        Raises:
            EngineError: there is no such storage.
        """
        known = [storage.value for storage in Storage]
        if value not in known:
            raise EngineError(f"plan.json: {value!r} is no storage; known: {', '.join(known)}")
        return Storage(value)


@dataclass(frozen=True)
class Value:
    """A strided view. ``base``: byte offset in the arena, name of a tensor in weights.safetensors, or of a batch input.

    Dtypes: float32, bfloat16, float16, int32, int64, bool, uint8 (codes). Strides, offset: in elements; a stride of 0
    broadcasts.
    """

    name: str
    storage: Storage
    base: int | str
    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim = Dim()


@dataclass(frozen=True)
class Step:
    """One kernel call. ``inputs`` and ``outputs`` are value names, None where an optional input is absent."""

    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    module: str = ""
    """Path of the Hugging Face module that the step comes from, for people and for `llmc diff`."""


@dataclass(frozen=True)
class KvSlot:
    """One paged cache: keys [kv_heads, key_dim] and values [kv_heads, value_dim] for each position.

    ``window``: positions that are ever read again behind the newest one; 0 means all.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True)
class StateSlot:
    """State of a recurrent op: one array of this shape and dtype for each running sequence."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """Everything an executor needs but the weights. ``logits`` names the output value, float32 [N, vocabulary].

    ``features``: floats [T, width] that are there after the last step, too, for a layer that drafts tokens.
    """

    values: tuple[Value, ...]
    steps: tuple[Step, ...]
    arena_bytes: int
    logits: str
    kv_slots: tuple[KvSlot, ...]
    state_slots: tuple[StateSlot, ...] = ()
    features: tuple[str, ...] = ()

    def value(self, name: str) -> Value:
        """The value of that name."""
        return self._by_name[name]

    @property
    def names(self) -> Collection[str]:
        """The names of all values."""
        return self._by_name.keys()

    @property
    def head(self) -> int | None:
        """The step that multiplies with the head: from it on, every step goes on with what the one before has made."""
        wanted: str | None = self.logits
        for number in range(len(self.steps) - 1, -1, -1):
            step = self.steps[number]
            if wanted in step.outputs:
                if step.op in ("linear", "quantized_linear"):
                    return number
                wanted = step.inputs[0]
        return None

    def input_width(self, name: str, rows: Dim) -> int | None:
        """Of floats [rows, width] of the arena, which can be written from outside; None: there are none."""
        value = self.value(name) if name in self.names else None
        if value is None or value.storage is not Storage.ARENA or value.dtype not in FLOATS or len(value.shape) != 2:
            return None
        width = value.shape[1]
        if value.shape[0] != rows or not width.is_constant or value.strides != (width, Dim(1)):
            return None
        return width.constant

    @property
    def _by_name(self) -> dict[str, Value]:
        cached: dict[str, Value] | None = self.__dict__.get("_index")
        if cached is None:
            cached = {v.name: v for v in self.values}
            object.__setattr__(self, "_index", cached)
        return cached
