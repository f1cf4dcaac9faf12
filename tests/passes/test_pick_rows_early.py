import numpy as np
import onnx_ir as ir
import pytest

from llmc.compiler import verify
from llmc.compiler.graph_builder import FLOAT, INT32, INT64, OPSETS, GraphBuilder
from llmc.compiler.reference_run import run_graph
from llmc.passes.pick_rows_early import PickRowsEarly
from llmc.runtime.plan import Dim

T, N, ONE = Dim(tokens=1), Dim(rows=1), Dim(1)
WIDTH = 6
X = (ONE, T, Dim(WIDTH))
NORM = {"epsilon": 1e-5, "kind": "rms", "offset": 0.0}
ATTENTION = {"slot": 0, "write": 1, "scale": 1.0, "window": 0, "chunk": 0, "softcap": 0.0}


class Graph(GraphBuilder):
    """The end of a model: ``make`` says what comes after an embedding [1, T, 6]."""

    def __init__(self, make):
        super().__init__()
        self.rng = np.random.default_rng(0)
        inputs = [self.value(name, INT32, (T,)) for name in ("input_ids", "position_ids")]
        inputs.append(self.value("logit_rows", INT32, (N,)))
        self.tokens, self.rows = inputs[0], inputs[2]
        self.picked = self.cast(inputs[2], INT64)
        ids = self.unsqueeze(inputs[0], 0)
        x = self.node("embedding", [ids, self.weight(11, WIDTH)], [(FLOAT, X)], domain="llmc")[0]
        logits = self.reshape(make(self, x), (N, Dim(WIDTH)))
        graph = ir.Graph(
            inputs,
            [logits],
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports=OPSETS,
        )
        self.model = ir.Model(graph, ir_version=11)

    def weight(self, *shape):
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def times(self, x, rows=WIDTH, columns=WIDTH):
        return self.linear(x, self.weight(rows, columns), None)

    def rows_of(self, x, axis=1):
        return self.gather(x, self.picked, axis)

    def add_norm(self, a, b):
        return self.node("add_norm", [a, b, self.weight(WIDTH), None], [(FLOAT, X), (FLOAT, X)], NORM, "llmc")

    def attention(self, x):
        heads = (T, Dim(2), Dim(3))
        x = self.reshape(x, heads)
        y = self.node("paged_attention", [x, x, x, None, None], [(FLOAT, heads)], ATTENTION, "llmc")[0]
        return self.reshape(y, X)


def block(g, x):
    """What follows the last attention: a projection, a residual, a gated unit."""
    total, y = g.add_norm(x, g.times(g.attention(g.times(x))))
    gate, up = g.split(g.times(y), 2, [Dim(3), Dim(3)])
    y = g.times(g.binary("Mul", g.unary("Sigmoid", gate), up), WIDTH, 3)
    return g.times(g.rows_of(g.add_norm(total, y)[1]))


def results(model, rows=(5, 0, 3)):
    ids = np.array([3, 1, 4, 1, 5, 9, 2], np.int32)
    given = {"input_ids": ids, "position_ids": np.arange(7, dtype=np.int32), "logit_rows": np.array(rows, np.int32)}
    (logits,) = run_graph(model, given).values()
    return logits


def gathered(model):
    return [node.inputs[0].producer().op_type for node in model.graph if node.op_type == "Gather"]


def test_all_after_the_last_attention_is_done_for_the_picked_rows():
    model = Graph(block).model
    before = results(model)
    assert PickRowsEarly()(model).modified
    assert gathered(model) == ["paged_attention", "embedding"]
    verify.emitted(model)
    np.testing.assert_allclose(results(model), before, rtol=1e-6, atol=1e-6)
    assert results(model, ()).shape == (0, WIDTH)
    assert not PickRowsEarly()(model).modified, "a second run changes nothing"


def test_what_someone_else_reads_stays():
    """Rule 1: attention reads the linear, too."""

    def make(g, x):
        y = g.times(x)
        return g.rows_of(g.unary("Tanh", g.binary("Add", g.attention(y), g.times(g.unary("Tanh", y)))))

    model = Graph(make).model
    before = results(model)
    assert PickRowsEarly()(model).modified
    assert gathered(model) == ["paged_attention", "linear"]
    np.testing.assert_allclose(results(model), before, rtol=1e-6)


def turned(g, x):
    """Scores of tokens beside each other: an axis of tokens is worked along."""
    y = g.transpose(g.times(x), (0, 2, 1))
    return g.transpose(g.rows_of(g.softmax(y, 2), 2), (0, 2, 1))


NEAR_MISSES = {
    "rule 2: attention": lambda g, x: g.rows_of(g.attention(g.times(x))),
    "rule 2: along the tokens": turned,
    "rule 3: no linear": lambda g, x: g.rows_of(g.unary("Tanh", g.attention(g.times(x)))),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    model = Graph(NEAR_MISSES[name]).model
    before = results(model)
    assert not PickRowsEarly()(model).modified
    np.testing.assert_array_equal(results(model), before)
