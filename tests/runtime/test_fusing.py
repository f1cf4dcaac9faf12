"""Gated units are computed with their product exactly where nothing else can see the product."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.plugins import kernels
from llmc.plugins.quantized_linear import packing
from llmc.plugins.quantized_linear.reference import random_weight
from llmc.runtime.batch import Batch
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import Weight
from llmc.runtime.fusing import fuse_gates
from llmc.runtime.manifest import KvCacheSpec
from llmc.runtime.plan import Dim, KvSlot, Plan, Step, Storage, Value

T, TOKENS, INNER, WIDTH = Dim(tokens=1), 40, 24, 37
ROOM = TOKENS * 2 * WIDTH * 4


def view(name: str, base: int, columns: int, stride: int, offset: int = 0) -> Value:
    return Value(name, Storage.ARENA, base, "float32", (T, Dim(columns)), (Dim(stride), Dim(1)), Dim(offset))


def weights() -> tuple[dict[str, Weight], list[Value]]:
    codes, scale, _ = random_weight(np.random.default_rng(0), 2 * WIDTH, INNER, "int4", 8)
    table = np.random.default_rng(1).standard_normal((11, INNER), np.float32)
    arrays = {
        "table": table,
        "w": packing.pack("int4", 8, codes),
        "scale": packing.pack_scales(scale, packing.scale_dtype(scale)),
    }
    made = {n: Weight(n, a.dtype.name, a.shape, a.reshape(-1).view(np.uint8)) for n, a in arrays.items()}
    values = [
        Value(
            n, Storage.WEIGHT, n, a.dtype.name, tuple(map(Dim, a.shape)), tuple(Dim(s // a.itemsize) for s in a.strides)
        )
        for n, a in arrays.items()
    ]
    return made, values


WEIGHTS, WEIGHT_VALUES = weights()
VALUES = (
    Value("ids", Storage.BATCH, "input_ids", "int32", (T,), (Dim(1),)),
    *WEIGHT_VALUES,
    view("x", ROOM, INNER, INNER),
    view("product", 0, 2 * WIDTH, 2 * WIDTH),
    view("gate", 0, WIDTH, 2 * WIDTH),
    view("up", 0, WIDTH, 2 * WIDTH, WIDTH),
    view("y", ROOM, WIDTH, WIDTH),  # where x was
    view("after", 0, WIDTH, WIDTH),
)
PRODUCT = Step(
    "quantized_linear",
    ("x", "w", "scale", None, None, None),
    ("product",),
    {"format": "int4", "group": 8, "compute": "int8", "x_group": 8},
    "mlp",
)
GLU = Step("glu", ("gate", "up"), ("y",), {"function": "silu"}, "mlp.act")
AFTER = Step("elementwise", ("y",), ("after",), {"function": "tanh"})
PLAN = Plan(
    VALUES, (Step("embedding", ("ids", "table"), ("x",)), PRODUCT, GLU, AFTER), 2 * ROOM, "y", (KvSlot(1, 8, 8),)
)


def with_steps(*steps: Step) -> Plan:
    return replace(PLAN, steps=(PLAN.steps[0], *steps))


def result(plan: Plan, isa: str) -> np.ndarray:
    engine: Any = SimpleNamespace(path="test", plan=plan, weights=WEIGHTS, kv_cache=KvCacheSpec("float32", 16))
    run = CpuExecutor(engine, num_blocks=4, threads=2, isa=isa, poison=True)
    batch = Batch(
        input_ids=np.arange(TOKENS, dtype=np.int32) % 11,
        position_ids=np.arange(TOKENS, dtype=np.int32),
        logit_rows=np.array([0], np.int32),
        cu_seqlens=np.array([0, TOKENS], np.int32),
        num_computed=np.array([0], np.int32),
        block_tables=np.arange(4, dtype=np.int32).reshape(1, 4) % 4,
    )
    run.run(batch)
    return run.read("after")


@pytest.mark.parametrize("isa", kernels.isas())
def test_a_fused_step_has_the_same_bits(isa: str) -> None:
    fused = fuse_gates(PLAN)
    assert [step.op for step in fused.steps] == ["embedding", "quantized_linear", "elementwise"]
    assert (fused.steps[1].attributes["function"], fused.steps[1].outputs) == ("silu", ("y",))
    assert fuse_gates(fused) is fused
    np.testing.assert_array_equal(result(fused, isa), result(PLAN, isa))


NEAR_MISSES = {
    "the halves are exchanged": with_steps(PRODUCT, replace(GLU, inputs=("up", "gate")), AFTER),
    "a step between them, as adapters have": with_steps(PRODUCT, replace(AFTER, inputs=("gate",), outputs=("y",)), GLU),
    "the product is read later": with_steps(PRODUCT, GLU, Step("glu", ("up", "gate"), ("y",), {"function": "silu"})),
    "the product is the result": replace(with_steps(PRODUCT, GLU), logits="product"),
    "a scale that a step has computed": with_steps(replace(PRODUCT, inputs=(*PRODUCT.inputs[:5], "after")), GLU),
}


@pytest.mark.parametrize("reason", NEAR_MISSES)
def test_what_stays_as_it_is(reason: str) -> None:
    assert fuse_gates(NEAR_MISSES[reason]) is NEAR_MISSES[reason]
