import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from llmc.compiler.config import Limits
from llmc.compiler.lower import lower, rules
from llmc.compiler.reference_executor import ReferenceExecutor, stored_weights
from llmc.compiler.targets.base import ONNX_OPS, find_target
from llmc.errors import CompileError
from llmc.plugins import all_ops
from llmc.runtime.batch import Batch
from llmc.runtime.plan import Storage

CPU = find_target("cpu")
LIMITS = Limits(64, 16, 4)
VOCABULARY, HEADS, SIZE = 13, 4, 6
ROWS = np.array([4, 0, 2], np.int32)


class Graph:
    """Builds a graph over x [T, 4, 6], which an embedding of the tokens gives."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.nodes, self.initializers = [], []
        self.ids, self.positions = (self.input(name, "T") for name in ("input_ids", "position_ids"))
        self.rows = self.input("logit_rows", "N")
        table = self.const(self.rng.standard_normal((VOCABULARY, HEADS * SIZE)).astype(np.float32))
        self.x = self.reshape(self.op("Gather", table, self.ids, axis=0), -1, HEADS, SIZE)
        self.y = self.op("Sin", self.op("Mul", self.x, self.const(np.float32(3))))

    def input(self, name, size):
        return ir.val(name, ir.DataType.INT32, [size])

    def const(self, array):
        value = ir.val(f"c{len(self.initializers)}", const_value=ir.tensor(np.asarray(array)))
        value.const_value.name = value.name
        value.dtype, value.shape = value.const_value.dtype, value.const_value.shape
        self.initializers.append(value)
        return value

    def ints(self, *numbers):
        return self.const(np.array(numbers, np.int64))

    def op(self, op, *inputs, outputs=1, domain="", **attributes):
        node = ir.node(op, inputs, attributes, domain=domain, num_outputs=outputs)
        for i, value in enumerate(node.outputs):
            value.name = f"{op}_{len(self.nodes)}_{i}"
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else list(node.outputs)

    def reshape(self, x, *sizes):
        return self.op("Reshape", x, self.ints(*sizes))

    def cast(self, x, dtype="FLOAT"):
        return self.op("Cast", x, to=int(ir.DataType[dtype]))

    def model(self, y, width=None):
        """Some rows of y, one row for each token, as the logits."""
        flat = self.reshape(self.cast(y), -1, width) if width else self.op("Flatten", self.cast(y), axis=1)
        logits = self.op("Gather", flat, self.rows, axis=0)
        logits.name = "logits"
        inputs = [self.ids, self.positions, self.rows]
        graph = ir.Graph(
            inputs, [logits], nodes=self.nodes, initializers=self.initializers, opset_imports={"": 23, "llmc": 1}
        )
        return ir.Model(graph, ir_version=11)


def batch(tokens, rows=ROWS):
    ids = (np.arange(tokens, dtype=np.int32) * 5) % VOCABULARY
    rows = rows[rows < tokens]
    return Batch(
        input_ids=ids,
        position_ids=np.arange(tokens, dtype=np.int32) + 3,
        logit_rows=rows,
        cu_seqlens=np.array([0, tokens], np.int32),
        num_computed=np.zeros(1, np.int32),
        block_tables=np.arange(4, dtype=np.int32)[None],
    )


def run(lowered, tokens, **options):
    executor = ReferenceExecutor(lowered.plan, stored_weights(lowered.weights), num_blocks=4, **options)
    return executor.step(batch(tokens))


def expected(model, tokens):
    for output in model.graph.outputs:
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["N", None])
    given = batch(tokens)
    feeds = {name: getattr(given, name) for name in ("input_ids", "position_ids", "logit_rows")}
    return ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)[0]


def check(model, dtype="float32"):
    lowered = lower(model, CPU, LIMITS, dtype)
    for tokens in (5, 1, 16):
        np.testing.assert_allclose(run(lowered, tokens), expected(model, tokens), rtol=2e-5, atol=2e-5)
    return lowered


def f32(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ops(lowered):
    return [step.attributes.get("function", step.op) for step in lowered.plan.steps]


UNARY = "Abs Ceil Cos Elu Erf Exp Floor HardSigmoid HardSwish LeakyRelu Mish Neg Relu Round Sigmoid Sign Sin Softplus Softsign Tanh"
GRAPHS = {
    **{op: lambda g, op=op: g.op(op, g.op("Mul", g.x, g.const(np.float32(2.5)))) for op in UNARY.split()},
    **{op: lambda g, op=op: g.op(op, g.op("Abs", g.x)) for op in ("Log", "Sqrt", "Reciprocal")},
    **{op: lambda g, op=op: g.op(op, g.x, g.y) for op in ("Add", "Sub", "Mul", "Div")},
    **{op: lambda g, op=op: g.op(op, g.x, g.y) for op in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")},
    "broadcast": lambda g: g.op("Add", g.op("Mul", g.x, g.const(f32(SIZE))), g.const(f32(HEADS, 1))),
    "Pow": lambda g: g.op("Pow", g.op("Abs", g.x), g.const(np.float32(1.5))),
    "Max": lambda g: g.op("Max", g.x, g.y, g.const(np.float32(0.1))),
    "Min": lambda g: g.op("Min", g.x, g.y),
    "Sum": lambda g: g.op("Sum", g.x, g.y, g.x),
    "Mean": lambda g: g.op("Mean", g.x, g.y, g.x),
    "Mod": lambda g: g.op("Mod", g.cast(g.op("Mul", g.x, g.const(np.float32(9))), "INT64"), g.ints(-4)),
    "fmod": lambda g: g.op("Mod", g.x, g.const(np.float32(0.7)), fmod=1),
    "And": lambda g: g.op("And", g.op("Less", g.x, g.y), g.op("Less", g.x, g.const(np.float32(0)))),
    "Or": lambda g: g.op("Or", g.op("Less", g.x, g.y), g.op("Less", g.x, g.const(np.float32(0)))),
    "Xor": lambda g: g.op("Xor", g.op("Less", g.x, g.y), g.op("Less", g.x, g.const(np.float32(0)))),
    "Not": lambda g: g.op("Not", g.op("Less", g.x, g.y)),
    "IsNaN": lambda g: g.op("IsNaN", g.op("Log", g.x)),
    "Where": lambda g: g.op("Where", g.op("Less", g.x, g.y), g.x, g.const(np.float32(7))),
    "Clip": lambda g: g.op("Clip", g.x, g.const(np.float32(-0.3)), g.const(np.float32(0.4))),
    "Cast": lambda g: g.cast(g.op("Mul", g.x, g.const(np.float32(5))), "INT32"),
    "CastLike": lambda g: g.op("CastLike", g.op("Mul", g.x, g.const(np.float32(5))), g.ints(1)),
    "Gelu": lambda g: g.op("Add", g.op("Gelu", g.x), g.op("Gelu", g.y, approximate="tanh")),
    "Identity": lambda g: g.op("Identity", g.x),
    "Reshape": lambda g: g.reshape(g.op("Add", g.reshape(g.x, 0, 2, -1), g.const(np.float32(1))), -1, 8, 3),
    "reshape_copies": lambda g: g.op("Neg", g.reshape(g.op("Transpose", g.x, perm=[0, 2, 1]), -1, HEADS * SIZE)),
    "Flatten": lambda g: g.op("Flatten", g.x, axis=1),
    "Transpose": lambda g: g.op("Neg", g.op("Transpose", g.x, perm=[0, 2, 1])),
    "Squeeze": lambda g: g.op("Squeeze", g.op("Unsqueeze", g.x, g.ints(0, 2)), g.ints(0)),
    "Unsqueeze": lambda g: g.op("Unsqueeze", g.x, g.ints(-1)),
    "Expand": lambda g: g.op("Add", g.op("Expand", g.reshape(g.x, -1, 1, HEADS, SIZE), g.ints(3, 1, 1)), g.const(f32(3, 1, 1))),
    "Slice": lambda g: g.op("Slice", g.x, g.ints(1, -5), g.ints(4, 100), g.ints(1, 2), g.ints(2, 3)),
    "slice_backwards": lambda g: g.op("Slice", g.x, g.ints(-1), g.ints(-100), g.ints(2), g.ints(-2)),
    "Split": lambda g: g.op("Mul", *g.op("Split", g.x, g.ints(2, 2), axis=1, outputs=2)),
    "split_equally": lambda g: g.op("Mul", *g.op("Split", g.x, axis=2, num_outputs=2, outputs=2)),
    "Concat": lambda g: g.op("Concat", g.op("Neg", g.x), g.y, g.op("Slice", g.y, g.ints(0), g.ints(1), g.ints(1)), axis=1),
    "concat_twice": lambda g: g.op("Concat", g.x, g.op("Concat", g.y, g.x, axis=2), axis=2),
    "Tile": lambda g: g.op("Tile", g.x, g.ints(1, 2, 3)),
    "Pad": lambda g: g.op("Pad", g.op("Neg", g.x), g.ints(0, 1, 0, 0, 0, 2), g.const(np.float32(2))),
    **{f"Reduce{op}": lambda g, op=op: g.op(f"Reduce{op}", g.x, g.ints(1)) for op in ("Sum", "Mean", "Max", "Min", "Prod")},
    **{f"Reduce{op}": lambda g, op=op: g.op(f"Reduce{op}", g.x, g.ints(-1), keepdims=0) for op in ("L1", "L2", "SumSquare", "LogSumExp")},
    "reduce_two": lambda g: g.op("Sub", g.x, g.op("ReduceMean", g.x, g.ints(1, 2))),
    "reduce_any": lambda g: g.op("ReduceMax", g.op("Less", g.x, g.const(np.float32(-1.5))), g.ints(2)),
    "ArgMax": lambda g: g.op("ArgMax", g.x, axis=1),
    "ArgMin": lambda g: g.op("ArgMin", g.x, axis=-1, keepdims=0),
    "Softmax": lambda g: g.op("Softmax", g.x),
    "softmax_1": lambda g: g.op("Softmax", g.x, axis=1),
    "LogSoftmax": lambda g: g.op("LogSoftmax", g.x, axis=-1),
    "CumSum": lambda g: g.op("Add", g.op("CumSum", g.x, g.const(np.int64(1))), g.op("CumSum", g.x, g.const(np.int64(2)), exclusive=1)),
    "TopK": lambda g: g.op("Add", *(g.cast(v) for v in g.op("TopK", g.x, g.ints(3), outputs=2))),
    "topk_1": lambda g: g.op("Add", *(g.cast(v) for v in g.op("TopK", g.x, g.ints(2), axis=1, largest=0, outputs=2))),
    "Gather": lambda g: g.op("Gather", g.x, g.const(np.array([[0, -1], [5, 2]])), axis=2),
    "gather_one": lambda g: g.op("Gather", g.x, g.const(np.int64(-2)), axis=1),
    "gather_steps": lambda g: g.op("Gather", g.x, g.ints(1, 3, 5), axis=2),
    "gather_by_tokens": lambda g: g.op("Gather", g.const(f32(VOCABULARY, 3, 2)), g.op("Cast", g.ids, to=7), axis=0),
    "GatherElements": lambda g: g.op("GatherElements", g.x, g.op("ArgMax", g.x, axis=2), axis=2),
    "gather_elements_1": lambda g: g.op("GatherElements", g.x, g.op("ArgMax", g.x, axis=1), axis=1),
    "ScatterElements": lambda g: g.op("ScatterElements", g.x, *scatter(g), axis=2),
    "scatter_add": lambda g: g.op("ScatterElements", g.x, *scatter(g), axis=2, reduction="add"),
    "GatherND": lambda g: g.op("GatherND", g.const(f32(VOCABULARY, 5, 3)), g.op("Concat", *indices(g), axis=-1)),
    "OneHot": lambda g: g.op("OneHot", g.op("ArgMax", g.x, axis=2, keepdims=0), g.const(np.int64(SIZE)), g.const(np.array([2.0, 5.0], np.float32))),
    "one_hot_negative": lambda g: g.op("OneHot", g.op("Sub", g.op("ArgMax", g.x, axis=2, keepdims=0), g.ints(SIZE)), g.const(np.int64(SIZE)), g.ints(0, 1), axis=1),
    "MatMul": lambda g: g.op("MatMul", g.x, g.const(f32(SIZE, 9))),
    "matmul_activations": lambda g: g.op("MatMul", g.x, g.op("Transpose", g.y, perm=[0, 2, 1])),
    "matmul_experts": lambda g: g.op("Transpose", g.op("MatMul", g.op("Transpose", g.x, perm=[1, 0, 2]), g.const(f32(HEADS, SIZE, 5))), perm=[1, 0, 2]),
    "Gemm": lambda g: g.op("Gemm", g.reshape(g.x, -1, 24), g.const(f32(24, 7)), g.const(f32(7))),
    "gemm_transposed": lambda g: g.op("Gemm", g.reshape(g.x, -1, 24), g.const(f32(7, 24)), g.const(f32(1, 7)), transB=1, alpha=0.5, beta=2.0),
    "Einsum": lambda g: g.op("Einsum", g.x, g.y, equation="thd,tgd->tgh"),
    "einsum_sum": lambda g: g.op("Einsum", g.x, g.y, equation="thd,tge->tg"),
    "ConstantOfShape": lambda g: g.op("Add", g.op("ConstantOfShape", g.op("Shape", g.x), value=ir.tensor(np.array([2.5], np.float32))), g.x),
    "Shape": lambda g: g.op("Reshape", g.x, g.op("Concat", g.op("Shape", g.x, start=0, end=1), g.ints(3, 8), axis=0)),
    "Constant": lambda g: g.op("Mul", g.x, g.op("Constant", value=ir.tensor(f32(SIZE)))),
    "Range": lambda g: g.op("Add", g.x, g.reshape(g.cast(g.op("Range", g.const(np.int64(0)), g.op("Squeeze", g.op("Shape", g.ids)), g.const(np.int64(1)))), -1, 1, 1)),
    "positions": lambda g: g.op("Mul", g.x, g.reshape(g.cast(g.op("Add", g.op("Cast", g.positions, to=7), g.ints(2))), -1, 1, 1)),
}  # fmt: skip


def scatter(g):
    return g.op("TopK", g.x, g.ints(2), outputs=2)[1], g.op("Slice", g.y, g.ints(0), g.ints(2), g.ints(2))


def indices(g):
    ids = g.reshape(g.op("Cast", g.ids, to=7), -1, 1)
    return ids, g.op("Mod", ids, g.ints(5))


@pytest.mark.parametrize("name", GRAPHS)
def test_equals_onnx(name):
    g = Graph()
    check(g.model(GRAPHS[name](g)))


def test_every_listed_op_has_a_rule_and_a_graph():
    assert set(ONNX_OPS) <= set(rules()) | {"Shape", "Constant"}
    assert {op for op in rules() if "::" not in op} <= set(ONNX_OPS)
    assert {f"llmc::{name}" for name in all_ops()} <= set(rules())
    assert set(ONNX_OPS) <= set(GRAPHS), "each is tested"
