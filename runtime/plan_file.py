"""plan.json: a Plan written as JSON, and read back with every size, index and name checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmc.errors import EngineError
from llmc.plugins import Op, all_ops
from llmc.runtime import strict
from llmc.runtime.manifest import Limits
from llmc.runtime.plan import BATCH_INPUTS, DTYPES, FLOATS, MAX_DIMS, Dim, Plan, Storage, Value

NAME = "plan.json"

ROWS = Dim(rows=1)

MAX_ELEMENTS = 1 << 48
"""More elements than any machine holds; products up to its square still fit into Python's and the kernels' ints."""


def to_bytes(plan: Plan) -> bytes:
    """The file: one value or step a line, so that two plans can be compared with diff."""
    value = strict.dump(plan)
    lines = []
    for key in sorted(value):
        item = value[key]
        if isinstance(item, list) and item:
            rows = ",\n  ".join(json.dumps(row, sort_keys=True, allow_nan=False, ensure_ascii=False) for row in item)
            lines.append(f'"{key}": [\n  {rows}\n ]')
        else:
            lines.append(f'"{key}": {json.dumps(item, ensure_ascii=False)}')
    return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()


def from_bytes(
    text: bytes,
    weights: Mapping[str, tuple[str, tuple[int, ...]]],
    limits: Limits,
    where: str,
    logits: Dim = ROWS,
) -> Plan:
    """Parse and check a plan.

    Args:
        text: the content of the file.
        weights: dtype and shape of each tensor in weights.safetensors.
        limits: what the engine was built for.
        where: the path, for messages.
        logits: how many rows of them there are.

    Raises:
        EngineError: the plan contradicts itself, its weights or the ops of this build.
    """
    plan: Plan = strict.load(Plan, strict.parse_json(text, where), where)
    _check_values(plan, weights, limits, where)
    _check_steps(plan, where)
    _check_logits(plan, logits, where)
    for slot in plan.kv_slots:
        if (
            min(slot.kv_heads, slot.key_dim, slot.value_dim) < 1
            or slot.window < 0
            or slot.kv_heads * slot.key_dim > 1 << 24
        ):
            raise EngineError(f"{where}: {slot} is no cache")
    for state in plan.state_slots:
        if state.dtype not in DTYPES or any(not 0 < n < 1 << 31 for n in state.shape):
            raise EngineError(f"{where}: {state} is no state")
    return plan


def _check_values(plan: Plan, weights: Mapping[str, tuple[str, tuple[int, ...]]], limits: Limits, where: str) -> None:
    names = set()
    if not 0 <= plan.arena_bytes < MAX_ELEMENTS:
        raise EngineError(f"{where}: arena_bytes is {plan.arena_bytes}")
    for value in plan.values:
        if value.name in names:
            raise EngineError(f"{where}: two values are named {value.name!r}")
        names.add(value.name)
        spot = f"{where}: value {value.name!r}"
        if value.dtype not in DTYPES:
            raise EngineError(f"{spot}: unknown dtype {value.dtype!r}; known: {', '.join(DTYPES)}")
        if len(value.shape) != len(value.strides) or len(value.shape) > MAX_DIMS:
            raise EngineError(
                f"{spot}: {len(value.shape)} sizes and {len(value.strides)} strides; at most {MAX_DIMS} of each"
            )
        _check_extent(value, _capacity(value, plan, weights, spot, limits), limits, spot)


def _capacity(
    value: Value, plan: Plan, weights: Mapping[str, tuple[str, tuple[int, ...]]], spot: str, limits: Limits
) -> int:
    """Elements that the memory behind a value holds, at the largest step."""
    if value.storage is Storage.ARENA:
        if type(value.base) is not int or value.base < 0 or value.base % DTYPES[value.dtype]:
            raise EngineError(f"{spot}: {value.base!r} is no offset in the arena")
        return (plan.arena_bytes - value.base) // DTYPES[value.dtype]
    if type(value.base) is not str:
        raise EngineError(f"{spot}: the base must be a name, found {value.base!r}")
    if value.storage is Storage.BATCH:
        if value.base not in BATCH_INPUTS or value.dtype != "int32":
            raise EngineError(
                f"{spot}: the batch has no {value.dtype} input {value.base!r}; it has {BATCH_INPUTS}, int32"
            )
        return limits.max_batch_tokens
    if value.base not in weights:
        raise EngineError(f"{spot}: there is no weight {value.base!r}")
    dtype, shape = weights[value.base]
    if dtype != value.dtype:
        raise EngineError(f"{spot}: the weight {value.base!r} is {dtype}, not {value.dtype}")
    elements = 1
    for size in shape:
        elements *= size
    return elements


def _check_extent(value: Value, capacity: int, limits: Limits, spot: str) -> None:
    """All sizes grow with T and N, so the largest step reaches furthest."""
    for dim in (*value.shape, *value.strides, value.offset):
        if min(dim.tokens, dim.rows) < 0 or _smallest(dim) < 0 or _largest(dim, limits) >= MAX_ELEMENTS:
            raise EngineError(f"{spot}: {dim.to_json()} is no size")
    if any(_largest(dim, limits) == 0 for dim in value.shape):
        return
    steps = zip(value.shape, value.strides, strict=True)
    last = sum((_largest(size, limits) - 1) * _largest(stride, limits) for size, stride in steps)
    if (end := _largest(value.offset, limits) + last + 1) > capacity:
        raise EngineError(f"{spot}: reaches element {end} of {capacity}")


def _smallest(dim: Dim) -> int:
    return dim.at(1, 0) if dim.tokens else dim.constant


def _largest(dim: Dim, limits: Limits) -> int:
    return dim.at(limits.max_batch_tokens, limits.max_batch_tokens)


def _check_steps(plan: Plan, where: str) -> None:
    ops = all_ops()
    known = {v.name: v for v in plan.values}
    for number, step in enumerate(plan.steps):
        spot = f"{where}: step {number} ({step.op})"
        if step.op not in ops:
            raise EngineError(f"{spot}: this llmc has no op {step.op!r}; it has {', '.join(ops)}")
        op = ops[step.op]
        inputs = op.plan_inputs
        required = sum(not name.endswith("?") for name in inputs)
        absent = [i for i, name in enumerate(step.inputs) if name is None]
        if not required <= len(step.inputs) <= len(inputs) or any(not inputs[i].endswith("?") for i in absent):
            raise EngineError(f"{spot}: takes the inputs {', '.join(inputs)}, found {list(step.inputs)}")
        if len(step.outputs) != len(op.outputs):
            raise EngineError(f"{spot}: has the outputs {', '.join(op.outputs)}, found {list(step.outputs)}")
        for name in (*step.inputs, *step.outputs):
            if name is not None and name not in known:
                raise EngineError(f"{spot}: there is no value {name!r}")
        for name in step.outputs:
            if known[name].storage is not Storage.ARENA:
                raise EngineError(f"{spot}: writes to {name!r}, which is not in the arena")
        _check_attributes(step.attributes, op, len(plan.kv_slots), spot)


def _check_attributes(found: Mapping[str, Any], op: Op, kv_slots: int, spot: str) -> None:
    declared = op.plan_attributes
    if not set(op.attributes) <= set(found) <= set(declared):
        raise EngineError(
            f"{spot}: has the attributes {', '.join(declared) or 'none'}, found {', '.join(found) or 'none'}"
        )
    for name, value in found.items():
        if type(value) is not declared[name]:
            raise EngineError(f"{spot}: {name} must be {declared[name].__name__}, found {value!r}")
        if name == "slot" and value not in range(kv_slots):
            raise EngineError(f"{spot}: slot {value} of {kv_slots}")


def _check_logits(plan: Plan, rows: Dim, where: str) -> None:
    names = [v for v in plan.values if v.name == plan.logits]
    if not names or names[0].dtype != "float32" or len(names[0].shape) != 2 or names[0].shape[0] != rows:
        raise EngineError(
            f"{where}: logits is {plan.logits!r}, which is no float32 [{rows.rows} * N, vocabulary] value"
        )
    for name in plan.features:
        found = plan.value(name) if name in plan.names else None
        if found is None or found.dtype not in FLOATS or len(found.shape) != 2 or found.shape[0] != Dim(tokens=1):
            raise EngineError(f"{where}: features name {name!r}, which are no floats [T, width]")
