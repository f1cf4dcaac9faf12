import json

import pytest

from llmc.errors import EngineError
from llmc.runtime import plan_file, strict
from llmc.runtime.manifest import Limits
from llmc.runtime.plan import Dim, KvSlot, Plan, Step, Storage, Value

LIMITS = Limits(64, 8, 4)
T, N = Dim(tokens=1), Dim(rows=1)
WEIGHTS = {"table": ("float32", (10, 6)), "head": ("float32", (1, 6, 16))}


def value(name, base, shape, strides, dtype="float32", storage=Storage.ARENA, offset=0):
    return Value(name, storage, base, dtype, shape, strides, Dim(offset))


VALUES = (
    value("ids", "input_ids", (T,), (Dim(1),), "int32", Storage.BATCH),
    value("rows", "logit_rows", (N,), (Dim(1),), "int32", Storage.BATCH),
    value("table", "table", (Dim(10), Dim(6)), (Dim(6), Dim(1)), storage=Storage.WEIGHT),
    value("head", "head", (Dim(1), Dim(6), Dim(16)), (Dim(96), Dim(16), Dim(1)), storage=Storage.WEIGHT),
    value("x", 0, (T, Dim(6)), (Dim(6), Dim(1))),
    value("picked", 192, (N, Dim(6)), (Dim(6), Dim(1))),
    value("logits", 384, (N, Dim(10)), (Dim(10), Dim(1))),
)
STEPS = (
    Step("embedding", ("ids", "table"), ("x",)),
    Step("gather", ("x", "rows"), ("picked",)),
    Step("linear", ("picked", "head", None), ("logits",), {}, "lm_head"),
)
PLAN = Plan(VALUES, STEPS, 704, "logits", (KvSlot(2, 8, 8, 4),))


def edited(**changes):
    """plan.json with some of its parts replaced; a function is applied to what is there."""
    data = json.loads(plan_file.to_bytes(PLAN))
    for key, change in changes.items():
        data[key] = change(data[key]) if callable(change) else change
    return json.dumps(data).encode()


def load(text):
    return plan_file.from_bytes(text, WEIGHTS, LIMITS, "engine/plan.json")


def test_a_plan_survives_the_file():
    text = plan_file.to_bytes(PLAN)
    assert load(text) == PLAN
    assert plan_file.to_bytes(load(text)) == text
    assert any(line.strip().startswith(b'{"attributes"') or b'"op"' in line for line in text.splitlines())


def change(index, **fields):
    return lambda items: [item | fields if i == index else item for i, item in enumerate(items)]


BAD = {
    "unknown key": (dict(extra=1), "extra"),
    "unknown key in a value": (dict(values=change(4, colour="red")), "colour"),
    "unknown storage": (dict(values=change(4, storage="disk")), "disk"),
    "name used twice": (dict(values=change(5, name="x")), "'x'"),
    "unknown dtype": (dict(values=change(4, dtype="float8")), "float8"),
    "too many axes": (dict(values=change(4, shape=[1] * 9, strides=[1] * 9)), "at most 8"),
    "strides missing": (dict(values=change(4, strides=[1])), "strides"),
    "out of the arena": (dict(values=change(6, base=448)), "'logits'"),
    "out of the arena in the largest step": (dict(values=change(4, base=640)), "'x'"),
    "out of a weight": (dict(values=change(2, offset=1)), "'table'"),
    "unknown weight": (dict(values=change(2, base="nothing")), "nothing"),
    "wrong dtype of a weight": (dict(values=change(2, dtype="bfloat16")), "'table'"),
    "unknown batch input": (dict(values=change(0, base="labels")), "labels"),
    "out of a batch input": (dict(values=change(0, shape=[{"T": 2}])), "'ids'"),
    "negative stride": (dict(values=change(4, strides=[-6, 1])), "'x'"),
    "size that is no size": (dict(values=change(4, shape=["T", 6])), "'T'"),
    "unknown op": (dict(steps=change(0, op="teleport")), "teleport"),
    "unknown value": (dict(steps=change(1, inputs=["x", "nobody"])), "nobody"),
    "missing input": (dict(steps=change(1, inputs=["x"])), "gather"),
    "absent input that is needed": (dict(steps=change(2, inputs=[None, "head", None])), "linear"),
    "writes a weight": (dict(steps=change(0, outputs=["table"])), "'table'"),
    "unknown attribute": (dict(steps=change(0, attributes={"speed": 2})), "speed"),
    "no logits": (dict(logits="nobody"), "nobody"),
    "logits of the wrong shape": (dict(logits="x"), "logits"),
    "slot without heads": (dict(kv_slots=change(0, kv_heads=0)), "kv_heads"),
    "arena of a negative size": (dict(arena_bytes=-1), "arena_bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_nonsense_is_refused_and_named(name):
    changes, message = BAD[name]
    with pytest.raises(EngineError, match=message):
        load(edited(**changes))


def test_sizes():
    dim = T * 64 + N * 2 + 3
    assert dim.at(10, 5) == 653
    assert Dim.from_json(dim.to_json()) == dim
    assert Dim(7).to_json() == 7
    assert (T * Dim(3), Dim(3) * T) == (Dim(tokens=3), Dim(tokens=3))
    with pytest.raises(ValueError, match="linear"):
        T * N
    for nonsense in (1.5, True, {"T": 1, "X": 2}, {"T": 1.0}, "T", None):
        with pytest.raises(EngineError, match="size"):
            Dim.from_json(nonsense)
    assert strict.dump(PLAN)["values"][0]["shape"] == [{"T": 1}]
