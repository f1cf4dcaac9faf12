"""What plans look like: few copies, weights packed once, slots, and errors that name the node."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from lowered import CPU, HEADS, LIMITS, SIZE, Graph, batch, f32, run

from llmc.compiler.lower import lower
from llmc.compiler.reference_executor import ReferenceExecutor, stored_weights
from llmc.compiler.targets.base import find_target
from llmc.errors import CompileError, UsageError
from llmc.plugins.linear import packing
from llmc.runtime import plan_file
from llmc.runtime.manifest import Limits
from llmc.runtime.plan import KvSlot, Storage

WIDTH = HEADS * SIZE


def functions(lowered):
    return [step.attributes.get("function", step.op) for step in lowered.plan.steps]


def llmc(g, op, *inputs, outputs=1, **attributes):
    return g.op(op, *inputs, outputs=outputs, domain="llmc", **attributes)


def attention(g, q, k, v, **changes):
    plain = {"slot": 0, "write": 1, "scale": 0.5, "window": 0, "chunk": 0, "softcap": 0.0}
    return llmc(g, "paged_attention", q, k, v, **(plain | changes))


def compiled(g, y, dtype="float32", width=None):
    return lower(g.model(y, width), CPU, LIMITS, dtype)


def test_qkv_rope_and_attention_read_parts_of_one_product():
    g = Graph()
    merged = llmc(g, "linear", g.reshape(g.x, -1, WIDTH), g.weight(WIDTH * 2, WIDTH))
    parts = g.op("Split", merged, g.ints(WIDTH, WIDTH // 2, WIDTH // 2), axis=1, outputs=3)
    q, k, v = (g.reshape(part, -1, heads, SIZE) for part, heads in zip(parts, (4, 2, 2), strict=True))
    table, index = g.weight(64, 2), g.const(np.tile(np.arange(SIZE, dtype=np.int32) % 2, (4, 1)))
    q, k = (llmc(g, "rope", x, g.positions, table, index, g.weight(2, SIZE)) for x in (q, k))
    lowered = compiled(g, g.reshape(attention(g, q, k, v), -1, WIDTH))
    assert functions(lowered) == ["gather", "linear", "rope", "rope", "paged_attention", "gather"]
    assert lowered.plan.kv_slots == (KvSlot(2, SIZE, SIZE),)


def test_a_transposed_and_reshaped_result_is_written_like_that_at_once():
    g = Graph()
    y = g.reshape(g.op("Transpose", g.op("Neg", g.x), perm=[0, 2, 1]), -1, WIDTH)
    assert "copy" not in functions(compiled(g, llmc(g, "linear", y, g.weight(5, WIDTH))))


def test_a_result_that_is_read_in_two_orders_needs_one_copy():
    g = Graph()
    y = g.op("Neg", g.x)
    turned = g.reshape(g.op("Transpose", y, perm=[0, 2, 1]), -1, WIDTH)
    y = g.op("Add", llmc(g, "linear", turned, g.weight(WIDTH, WIDTH)), g.reshape(y, -1, WIDTH))
    assert functions(compiled(g, y)).count("copy") == 1


def test_producers_write_into_a_concatenation():
    g = Graph()
    parts = [g.op("Neg", g.x), g.op("Transpose", g.op("Sin", g.op("Transpose", g.x, perm=[1, 0, 2])), perm=[1, 0, 2])]
    lowered = compiled(g, g.op("Concat", *parts, axis=2))
    assert "copy" not in functions(lowered)


def test_a_tied_table_is_stored_once():
    rng = np.random.default_rng(0)
    for tied in (True, False):
        g = Graph()
        table = g.const(rng.standard_normal((20, WIDTH)).astype(np.float32))
        head = table if tied else g.const(rng.standard_normal((20, WIDTH)).astype(np.float32))
        hidden = llmc(g, "embedding", g.ids, table)
        lowered = compiled(g, llmc(g, "linear", hidden, head))
        packed = [weight for weight in lowered.weights.values() if weight.panels]
        assert len(packed) == 1
        assert len(lowered.weights) == (1 if tied else 2)
        ids = batch(5)
        expected = table.const_value.numpy()[ids.input_ids] @ head.const_value.numpy().T
        np.testing.assert_allclose(run(lowered, 5), expected[ids.logit_rows], rtol=1e-5, atol=1e-5)


def test_equal_constants_are_stored_once():
    g = Graph()
    y = g.op("Add", g.op("Mul", g.x, g.number(2)), g.number(2))
    y = g.op("Mul", g.op("Add", y, g.weight(SIZE, seed=3)), g.weight(SIZE, seed=3))
    assert len(compiled(g, y).weights) == 3, "the table, a number and a vector"


@pytest.mark.parametrize("dtype", packing.DTYPES)
def test_weights_of_linears_have_the_dtype_of_the_engine(dtype):
    g = Graph()
    weight = f32(7, WIDTH).astype(ml_dtypes.bfloat16)
    y = llmc(g, "linear", g.reshape(g.x, -1, WIDTH), g.const(weight), g.const(f32(7).astype(ml_dtypes.bfloat16)))
    lowered = compiled(g, y, dtype)
    stored = {w.name: w for w in lowered.weights.values() if w.panels}
    (packed,) = stored.values()
    assert packed.dtype == dtype
    whole = np.concatenate([chunk.reshape(-1) for chunk in packed.chunks()]).reshape(packed.shape)
    assert whole.nbytes == packed.nbytes
    np.testing.assert_array_equal(packing.unpack(whole, 7, WIDTH).astype(np.float32), weight.astype(np.float32))
    others = {w.dtype for w in lowered.weights.values() if not w.panels}
    assert others == {"float32"}, "biases are float32"


@pytest.mark.parametrize(("gated", "interleaved"), [(1, 0), (1, 1), (0, 0)])
def test_an_odd_number_of_inner_units_is_padded_for_bfloat16(gated, interleaved):
    results = []
    for dtype in ("float32", "bfloat16"):
        g = Graph()
        inner = 7
        x = g.reshape(g.x, -1, WIDTH)
        scores, ids = g.op("TopK", g.op("Softmax", llmc(g, "linear", x, g.weight(3, WIDTH))), g.ints(2), outputs=2)
        shapes = ((3, inner * (1 + gated), WIDTH), (3, WIDTH, inner), (3, inner * (1 + gated)), (3, WIDTH))
        parts = [g.const((f32(*shape) / 4).astype(ml_dtypes.bfloat16)) for shape in shapes]
        y = llmc(
            g,
            "moe",
            x,
            ids,
            scores,
            *parts,
            function="silu",
            gated=gated,
            interleaved=interleaved,
            alpha=0.0,
            limit=0.0,
        )
        results.append(run(compiled(g, y, dtype), 5))
    np.testing.assert_allclose(results[1], results[0], atol=0.05)


def test_slots_are_shared_and_remember_how_far_behind_is_read():
    g = Graph()
    part = g.op("Slice", g.x, g.ints(0), g.ints(2), g.ints(1))
    y = attention(g, g.x, part, part, slot=0, window=9)
    y = attention(g, y, part, part, slot=1, chunk=16, window=4)
    y = attention(g, y, part, part, slot=0, window=5, write=0)
    y = attention(g, y, part, part, slot=1, write=0)
    lowered = compiled(g, y)
    assert lowered.plan.kv_slots == (KvSlot(2, SIZE, SIZE, 9), KvSlot(2, SIZE, SIZE, 0))


def test_attention_stays_though_nobody_reads_it():
    g = Graph()
    part = g.op("Slice", g.x, g.ints(0), g.ints(2), g.ints(1))
    attention(g, g.x, part, part)
    assert "paged_attention" in functions(compiled(g, g.x))


def test_the_plan_is_loadable():
    g = Graph()
    lowered = compiled(g, llmc(g, "linear", g.op("Softmax", g.x), g.weight(3, SIZE)), width=12)
    weights = {name: (weight.dtype, weight.shape) for name, weight in lowered.weights.items()}
    limits = Limits(**vars(LIMITS))
    assert plan_file.from_bytes(plan_file.to_bytes(lowered.plan), weights, limits, "plan.json") == lowered.plan
    assert all(value.base % 64 == 0 for value in lowered.plan.values if value.storage is Storage.ARENA)


def test_a_chunked_prefill_equals_the_whole_and_blocks_can_be_copied():
    g = Graph()
    part = g.op("Slice", g.x, g.ints(1), g.ints(3), g.ints(1))
    lowered = compiled(g, attention(g, g.x, part, part, window=7), width=WIDTH)
    whole = run(lowered, 16)
    executor = ReferenceExecutor(lowered.plan, stored_weights(lowered.weights), num_blocks=4)
    full = batch(16, np.arange(16, dtype=np.int32))

    def step(start, stop, table):
        part = batch(stop - start, np.arange(stop - start, dtype=np.int32))
        changes = {
            "input_ids": full.input_ids[start:stop],
            "position_ids": full.position_ids[start:stop],
            "num_computed": np.array([start], np.int32),
            "block_tables": np.array([table], np.int32),
        }
        return executor.step(type(part)(**(vars(part) | changes)))

    pieces = [step(0, 6, [2]), step(6, 7, [2])]
    executor.copy_block(2, 1)
    pieces.append(step(7, 16, [1]))
    np.testing.assert_allclose(np.concatenate(pieces)[[4, 0, 2]], whole, rtol=1e-6, atol=1e-6)


BAD = {
    "mixes tokens": (lambda g: g.op("ReduceSum", g.x, g.ints(0)), "ReduceSum .*several requests"),
    "shifts tokens": (lambda g: g.op("Slice", g.x, g.ints(1), g.ints(99), g.ints(0)), "Slice .*several requests"),
    "runs over tokens": (lambda g: g.op("CumSum", g.x, g.const(np.int64(0))), "CumSum .*requests"),
    "unknown op": (lambda g: g.op("Det", g.x), "Det .*target cpu"),
    "unknown op of ours": (lambda g: g.op("teleport", g.x, domain="llmc"), "teleport"),
    "pairs of tokens": (
        lambda g: g.op("MatMul", g.reshape(g.x, -1, WIDTH), g.op("Transpose", g.reshape(g.x, -1, WIDTH), perm=[1, 0])),
        "not linear in the tokens",
    ),
    "a count of tokens as data": (lambda g: g.op("Mul", g.x, g.cast(g.op("Shape", g.ids))), "number of tokens"),
    "axes that depend on data": (lambda g: g.op("Squeeze", g.x, g.ids), "constant"),
    "slot read first": (lambda g: attention(g, g.x, g.x, g.x, write=0), "slot 0"),
    "slot written twice": (lambda g: attention(g, attention(g, g.x, g.x, g.x), g.x, g.x), "slot 0 is written twice"),
    "slot left out": (lambda g: attention(g, g.x, g.x, g.x, slot=1), "slots"),
    "sorts integers": (lambda g: g.op("TopK", g.cast(g.x, "INT64"), g.ints(2), outputs=2)[0], "TopK of int64"),
    "unsupported dtype": (lambda g: g.op("Cast", g.x, to=int(ir.DataType.UINT8)), "UINT8"),
    "attribute missing": (lambda g: llmc(g, "norm", g.x, epsilon=1e-5), "expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_lowered_is_named(name):
    make, message = BAD[name]
    g = Graph()
    y = make(g)
    with pytest.raises(CompileError, match=message):
        compiled(g, y)


def test_unknown_dtypes_and_targets():
    g = Graph()
    with pytest.raises(CompileError, match=r"int4.*known"):
        lower(g.model(g.x), CPU, LIMITS, "int4")
    with pytest.raises(UsageError, match="--target tpu: unknown; known: cpu"):
        find_target("tpu")
