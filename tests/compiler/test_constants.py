import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from llmc.compiler import weights
from llmc.compiler.constants import Constants
from llmc.compiler.weights import Array, SourceTensor
from llmc.errors import CompileError


class Counting(Array):
    """Remembers which rows were read."""

    def __init__(self, array):
        super().__init__(array)
        object.__setattr__(self, "reads", [])

    def rows(self, start, stop):
        self.reads.append((start, stop))
        return super().rows(start, stop)


class Graph:
    def __init__(self):
        self.nodes, self.initializers = [], []
        self.x = ir.val("x", ir.DataType.FLOAT, ["T", 4])

    def weight(self, array):
        tensor = SourceTensor(Counting(np.asarray(array)), f"w{len(self.initializers)}")
        value = ir.val(tensor.name, tensor.dtype, tensor.shape, const_value=tensor)
        self.initializers.append(value)
        return value

    def op(self, op, *inputs, outputs=1, domain="", **attributes):
        node = ir.node(op, inputs, attributes, num_outputs=outputs, domain=domain)
        for i, value in enumerate(node.outputs):
            value.name = f"{op}_{len(self.nodes)}_{i}"
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def constants(self):
        graph = ir.Graph(
            [self.x], [], nodes=self.nodes, initializers=self.initializers, opset_imports={"": 23, "llmc": 1}
        )
        return Constants(graph)


W = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
VIEWS = {
    "Concat": (lambda g, w: g.op("Concat", w, g.weight(W[:2]), axis=0), np.concatenate([W, W[:2]])),
    "concat_1": (lambda g, w: g.op("Concat", w, w, axis=-1), np.concatenate([W, W], 1)),
    "Transpose": (lambda g, w: g.op("Transpose", w), W.T),
    "Reshape": (lambda g, w: g.op("Reshape", w, g.weight(np.array([2, -1, 4]))), W.reshape(2, 3, 4)),
    "Unsqueeze": (lambda g, w: g.op("Unsqueeze", w, g.weight(np.array([0, -1]))), W[None, ..., None]),
    "Squeeze": (lambda g, w: g.op("Squeeze", g.op("Unsqueeze", w, g.weight(np.array([1])))), W),
    "Flatten": (lambda g, w: g.op("Flatten", w, axis=0), W.reshape(1, 24)),
    "Identity": (lambda g, w: g.op("Identity", w), W),
    "Slice": (
        lambda g, w: g.op("Slice", w, *(g.weight(np.array(v)) for v in ([-1, 0], [-9, 3], [0, 1], [-2, 1]))),
        W[-1::-2, 0:3],
    ),
    "Split": (lambda g, w: g.op("Split", w, g.weight(np.array([1, 5])), outputs=2)[1], W[1:]),
    "split_equally": (lambda g, w: g.op("Split", w, axis=1, num_outputs=3, outputs=3)[1], W[:, 2:4]),
    "Gather": (lambda g, w: g.op("Gather", w, g.weight(np.array(-2)), axis=0), W[-2]),
    "Cast": (lambda g, w: g.op("Cast", w, to=int(ir.DataType.BFLOAT16)), W.astype(ml_dtypes.bfloat16)),
    "Stack": (
        lambda g, w: g.op("Concat", *(g.op("Unsqueeze", w, g.weight([0])) for _ in "ab"), axis=0),
        np.stack([W, W]),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_stay_lazy(name):
    make, expected = VIEWS[name]
    g = Graph()
    w = g.weight(W)
    value = make(g, w)
    constants = g.constants()
    assert value in constants
    source = constants.source(value)
    assert w.const_value.source.reads == [], "nothing is read before it is asked for"
    assert source.shape == expected.shape
    np.testing.assert_array_equal(weights.read(source), expected)


def test_arithmetic_is_done_in_float32():
    g = Graph()
    narrow = W.astype(ml_dtypes.bfloat16)
    value = g.op("Exp", g.op("Mul", g.weight(narrow), g.weight(np.float32(0.3))))
    result = g.constants().array(value)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, np.exp(narrow.astype(np.float32) * np.float32(0.3)), rtol=1e-6)


def test_our_own_ops_and_several_outputs():
    g = Graph()
    value = g.op("elementwise", g.weight(W), domain="llmc", function="silu")
    best, where = g.op("TopK", g.weight(W), g.weight(np.array([2])), outputs=2)
    constants = g.constants()
    np.testing.assert_allclose(constants.array(value), W / (1 + np.exp(-W)), rtol=1e-5)
    np.testing.assert_array_equal(np.take_along_axis(W, constants.array(where), -1), constants.array(best))


def test_what_depends_on_tokens_is_no_constant():
    g = Graph()
    w = g.weight(W)
    dependent, shape = g.op("Mul", g.x, w), g.op("Shape", g.x)
    fixed = g.op("Shape", w)
    constants = g.constants()
    assert g.x not in constants
    assert dependent not in constants
    assert shape not in constants, "T is not known"
    assert constants.array(fixed).tolist() == [6, 4]


def test_what_cannot_be_computed_is_named():
    g = Graph()
    value = g.op("MatMul", g.weight(W), g.weight(W))
    with pytest.raises(CompileError, match="MatMul"):
        g.constants().array(value)
