"""Plans with quantized steps: kernels and references agree, on a table that the output layer shares, and on experts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.compiler.reference_executor import ReferenceExecutor
from llmc.plugins import kernels
from llmc.plugins.quantized_linear import packing
from llmc.plugins.quantized_linear.reference import random_weight
from llmc.runtime import plan_file
from llmc.runtime.batch import Batch
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import Weight
from llmc.runtime.manifest import KvCacheSpec, Limits
from llmc.runtime.plan import Dim, KvSlot, Plan, Step, Storage, Value

VOCABULARY, HIDDEN, INNER, EXPERTS, TOKENS = 33, 24, 20, 3, 9
T, N = Dim(tokens=1), Dim(rows=1)
EXPERT = {"function": "silu", "gated": True, "interleaved": False, "alpha": 0.0, "limit": 0.0, "inner": INNER}


def stored(name: str, array: np.ndarray) -> tuple[Value, np.ndarray]:
    array = np.ascontiguousarray(array)
    strides = tuple(Dim(s // array.itemsize) for s in array.strides)
    return Value(name, Storage.WEIGHT, name, array.dtype.name, tuple(map(Dim, array.shape)), strides), array


def packed(name: str, matrices: list[tuple[Any, Any, Any]], format: str, group: int) -> list[tuple[Value, np.ndarray]]:
    """Codes, scales and zeros of one matrix, or of experts."""
    codes, scale, zero = zip(*matrices, strict=True)
    dtype = packing.scale_dtype(np.stack(scale))
    arrays = {
        name: [packing.pack(format, group, c) for c in codes],
        f"{name}.scale": [packing.pack_scales(s, dtype) for s in scale],
        f"{name}.zero": [] if zero[0] is None else [packing.pack_scales(z, z.dtype.name) for z in zero],
    }
    return [stored(key, np.stack(a) if len(a) > 1 else a[0]) for key, a in arrays.items() if a]


def made(format: str, group: int, zeros: str, compute: str) -> tuple[Plan, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    table = [random_weight(rng, VOCABULARY, HIDDEN, format, group, zeros)]
    experts = [
        [random_weight(rng, rows, columns, format, group, zeros) for _ in range(EXPERTS)]
        for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    ]
    weights = dict(
        [
            *packed("table", table, format, group),
            *packed("up", experts[0], format, group),
            *packed("down", experts[1], format, group),
            stored("ids2", rng.integers(0, EXPERTS, (TOKENS, 1))),
            stored("mix", rng.random((TOKENS, 1), np.float32)),
        ]
    )
    names = {value.name for value in weights}
    size = 4 * 64 * TOKENS

    def row(name: str, place: int, rows: Dim, width: int) -> Value:
        return Value(name, Storage.ARENA, place * size, "float32", (rows, Dim(width)), (Dim(width), Dim(1)))

    views = [
        Value("input", Storage.BATCH, "input_ids", "int32", (T,), (Dim(1),)),
        row("x", 0, T, HIDDEN),
        row("y", 1, T, HIDDEN),
        row("logits", 2, N, VOCABULARY),
        *(value for value in weights if value.name not in ("ids2", "mix")),
        Value("ids2", Storage.WEIGHT, "ids2", "int64", (T, Dim(1)), (Dim(1), Dim(1))),
        Value("mix", Storage.WEIGHT, "mix", "float32", (T, Dim(1)), (Dim(1), Dim(1))),
    ]
    table_views, up, down = (
        (f"{n}.scale", f"{n}.zero" if f"{n}.zero" in names else None) for n in ("table", "up", "down")
    )
    how = {"format": format, "group": group, "compute": compute, "x_group": 0}
    steps = (
        Step("embedding", ("input", "table", *table_views), ("x",), {"format": format, "group": group}),
        Step("moe", ("x", "ids2", "mix", "up", "down", None, None, *up, *down), ("y",), {**EXPERT, **how}),
        Step("quantized_linear", ("y", "table", *table_views, None, None), ("logits",), how),
    )
    return Plan(tuple(views), steps, 3 * size, "logits", (KvSlot(1, 8, 8),)), {v.name: a for v, a in weights.items()}


def batch(count: int) -> Batch:
    ids = np.arange(count, dtype=np.int32) * 5 % VOCABULARY
    ends = np.array([0, count], np.int32)
    return Batch(ids, np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32), ends, ends[:1], ends[None])


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize(
    ("format", "group", "zeros", "compute"),
    [("int4", 16, "", "int8"), ("int8", 0, "uint8", "int8"), ("int4", 10, "float32", "float32"), ("fp8", 0, "", "fp8")],
)
def test_kernels_give_what_references_give(isa: str, format: str, group: int, zeros: str, compute: str) -> None:
    plan, arrays = made(format, group, zeros, compute)
    weights = {name: Weight(name, a.dtype.name, a.shape, a.reshape(-1).view(np.uint8)) for name, a in arrays.items()}
    engine = SimpleNamespace(path="test", plan=plan, weights=weights, kv_cache=KvCacheSpec("float32", 16))
    native: Any = CpuExecutor(engine, num_blocks=2, isa=isa)  # type: ignore[arg-type]
    reference = ReferenceExecutor(plan, arrays, num_blocks=2)
    for count in (1, TOKENS):
        found, wanted = native.step(batch(count)), reference.step(batch(count))
        # A sum that differs in its last bit may round an input of the next product the other way.
        np.testing.assert_allclose(found, wanted, 1e-2, 3e-2 if compute != "float32" else 1e-5)


def test_plan_files_hold_quantized_steps() -> None:
    plan, arrays = made("int4", 16, "uint8", "int8")
    shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    limits = Limits(max_seq_len=16, max_batch_tokens=TOKENS, max_sequences=1)
    assert plan_file.from_bytes(plan_file.to_bytes(plan), shapes, limits, "plan.json") == plan
