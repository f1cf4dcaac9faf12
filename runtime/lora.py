"""LoRA adapters beside an engine: a step after each adapted product adds the low-rank term of each row's adapter.

The engine's linears.json says which parameters of the model the rows of a packed weight are, and by what factors their
inputs and outputs are scaled (calibrated methods fold such into other weights); A and B are scaled alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError, UsageError
from llmc.runtime import strict
from llmc.runtime.adapter_file import AdapterFile, LowRank, read_adapter
from llmc.runtime.engine import Engine, Weight
from llmc.runtime.plan import Dim, Plan, Step, Storage, Value

NAME = "linears.json"
PRODUCTS = ("linear", "quantized_linear")
ROWS = {Dim(tokens=1): "adapters", Dim(rows=1): "row_adapters"}
"""The batch input with the adapter of each row, by how many rows a step has."""


@dataclass(frozen=True)
class LinearRows:
    """Rows of a packed weight that are one parameter of the model."""

    name: str
    rows: int


@dataclass(frozen=True)
class Linear:
    """A packed weight: its parts in order; its columns are multiplied and its rows divided by such factors."""

    parts: tuple[LinearRows, ...]
    columns: tuple[float, ...] = ()
    rows: tuple[float, ...] = ()


@dataclass(frozen=True)
class Linears:
    """The content of linears.json: by the name of the tensor in weights.safetensors."""

    weights: Mapping[str, Linear]


def adapters_of(values: Mapping[str, str | Path]) -> dict[str, AdapterFile]:
    """Read all of them, by name.

    Raises:
        CheckpointError: one is damaged or not supported.
        UsageError: a name is empty.
    """
    if "" in values:
        raise UsageError("lora: an adapter needs a name")
    return {name: read_adapter(path) for name, path in values.items()}


def with_adapters(engine: Engine, adapters: Mapping[str, AdapterFile]) -> Engine:
    """The engine with steps and weights for adapters, which have numbers in the order of the mapping.

    Raises:
        EngineError: the engine does not say what its weights are made of; it was built by an older version.
        UsageError: an adapter is not made for this model.
    """
    for name, adapter in adapters.items():
        if only := adapter.merged_only:
            raise UsageError(
                f"lora {name}: {only[0]}: only linears can be adapted beside an engine; this adapter can be merged "
                f"into one: llmc build MODEL --lora {adapter.path}"
            )
    linears, where = read_linears(engine), str(engine.path / NAME)
    made = _Adapted(engine, list(adapters.values()), {}, [])
    found: set[str] = set()
    steps: list[Step] = []
    for step in engine.plan.steps:
        steps.append(step)
        weight = _weight_of(engine.plan, step)
        if weight is not None and weight in linears:
            steps += made.steps(step, linears[weight], where, found)
    for name, adapter in adapters.items():
        if missing := sorted(set(adapter.modules) - found):
            raise UsageError(f"lora {name}: the engine has no product {missing[0]!r} that can be adapted")
    plan = replace(engine.plan, steps=tuple(steps), values=(*engine.plan.values, *made.values))
    return replace(engine, plan=plan, weights={**engine.weights, **made.weights})


def input_factors(engine: Engine, step: Step) -> NDArray[np.float32] | None:
    """What the input of a product was divided by; None: it is the model's own."""
    linear = read_linears(engine).get(_weight_of(engine.plan, step) or "") if engine.read(NAME) is not None else None
    return np.array(linear.columns, np.float32) if linear is not None and linear.columns else None


def read_linears(engine: Engine) -> Mapping[str, Linear]:
    """What the packed weights are made of.

    Raises:
        EngineError: the engine does not say; it was built by an older version.
    """
    text, where = engine.read(NAME), str(engine.path / NAME)
    if text is None:
        raise EngineError(f"{engine.path}: has no {NAME}, as of an older version; build the engine anew")
    return strict.load(Linears, strict.parse_json(text, where), where).weights


@dataclass
class _Adapted:
    engine: Engine
    adapters: Sequence[AdapterFile]
    weights: dict[str, Weight]
    values: list[Value]
    known: set[str] = field(default_factory=set)

    def steps(self, step: Step, linear: Linear, where: str, found: set[str]) -> list[Step]:
        """One for each part of a product that an adapter changes."""
        made, first = [], 0
        plan = self.engine.plan
        x, y = plan.value(str(step.inputs[0])), plan.value(step.outputs[0])
        width, height = x.shape[-1].constant, sum(part.rows for part in linear.parts)
        if y.shape[-1] != Dim(height) or any(
            len(f) not in (0, n) for f, n in ((linear.columns, width), (linear.rows, height))
        ):
            raise EngineError(f"{where}: the parts and factors of {step.module} do not fit its product")
        for part in linear.parts:
            rows = slice(first, first + part.rows)
            first += part.rows
            module = part.name.removesuffix(".weight")
            added = [adapter.modules.get(module) for adapter in self.adapters]
            if not any(added):
                continue
            found.add(module)
            for adapter, low in zip(self.adapters, added, strict=True):
                if low is not None and (low.b.shape[0], low.a.shape[1]) != (part.rows, width):
                    raise UsageError(
                        f"{adapter.path}: {module} adapts a weight [{low.b.shape[0]}, {low.a.shape[1]}], but that of "
                        f"the model is [{part.rows}, {width}]; it was made for another model"
                    )
            scaled = [_scaled(low, linear, rows) for low in added]
            made.append(self._step(step, x, y, rows, scaled))
        return made

    def _step(self, step: Step, x: Value, y: Value, rows: slice, added: Sequence[LowRank | None]) -> Step:
        stem = f"lora.{len(self.weights)}"
        view = replace(
            y, name=f"{stem}.y", shape=(y.shape[0], Dim(rows.stop - rows.start)), offset=y.offset + Dim(rows.start)
        )
        self.values.append(view)
        most = max(low.a.shape[0] for low in added if low is not None)
        a = np.zeros((len(added), most, x.shape[-1].constant), np.float32)
        b = np.zeros((len(added), most, rows.stop - rows.start), np.float32)
        ranks = np.zeros(len(added), np.int32)
        for number, low in enumerate(added):
            if low is not None:
                ranks[number] = rank = low.a.shape[0]
                a[number, :rank], b[number, :rank] = low.a, low.b.T
        names = [self._weight(f"{stem}.{key}", array) for key, array in (("a", a), ("b", b), ("ranks", ranks))]
        return Step("lora", (x.name, view.name, *names, self._rows(y.shape[0])), (view.name,), {}, step.module)

    def _weight(self, name: str, array: NDArray[Any]) -> str:
        self.weights[name] = Weight(name, array.dtype.name, array.shape, array.reshape(-1).view(np.uint8))
        strides = [stride // array.itemsize for stride in array.strides]
        shape = tuple(map(Dim, array.shape))
        self.values.append(Value(name, Storage.WEIGHT, name, array.dtype.name, shape, tuple(map(Dim, strides))))
        return name

    def _rows(self, count: Dim) -> str:
        if count not in ROWS:
            raise EngineError(f"{self.engine.path}: a product has neither a row for each token nor one for each logit")
        name = ROWS[count]
        if name not in self.known:
            self.known.add(name)
            self.values.append(Value(name, Storage.BATCH, name, "int32", (count,), (Dim(1),)))
        return name


def _weight_of(plan: Plan, step: Step) -> str | None:
    if step.op not in PRODUCTS or step.inputs[1] is None:
        return None
    value = plan.value(step.inputs[1])
    return str(value.base) if value.storage is Storage.WEIGHT else None


def _scaled(low: LowRank | None, linear: Linear, rows: slice) -> LowRank | None:
    """As the weight beside it: its inputs are divided by the factors of its columns, outputs by those of its rows."""
    if low is None:
        return None
    a = low.a * np.array(linear.columns, np.float32) if linear.columns else low.a
    b = low.b / np.array(linear.rows[rows], np.float32)[:, None] if linear.rows else low.b
    return LowRank(a, b)
