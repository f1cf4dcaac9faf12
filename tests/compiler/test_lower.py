import numpy as np
import onnx_ir as ir
import pytest
from lowered import HEADS, SIZE, VOCABULARY, Graph, check, f32

from llmc.compiler.lower import rules
from llmc.compiler.targets.base import ONNX_OPS
from llmc.plugins import all_ops

UNARY = (
    *(
        "Abs",
        "Ceil",
        "Cos",
        "Elu",
        "Erf",
        "Exp",
        "Floor",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Mish",
        "Neg",
        "Relu",
    ),
    *("Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Tanh"),
)


def scatter(g):
    return g.op("TopK", g.x, g.ints(2), outputs=2)[1], g.op("Slice", g.y, g.ints(0), g.ints(2), g.ints(2))


def indices(g):
    ids = g.reshape(g.op("Cast", g.ids, to=7), -1, 1)
    return ids, g.op("Mod", ids, g.ints(5))


def concat(g):
    return g.op("Concat", g.op("Neg", g.x), g.y, g.op("Slice", g.y, g.ints(0), g.ints(1), g.ints(1)), axis=1)


def cumsum(g):
    exclusive = g.op("CumSum", g.x, g.const(np.int64(2)), exclusive=1)
    return g.op("Add", g.op("CumSum", g.x, g.const(np.int64(1))), exclusive)


def one_hot(g):
    best = g.op("ArgMax", g.x, axis=2, keepdims=0)
    return g.op("OneHot", best, g.const(np.int64(SIZE)), g.const(np.array([2.0, 5.0], np.float32)))


def one_hot_negative(g):
    negative = g.op("Sub", g.op("ArgMax", g.x, axis=2, keepdims=0), g.ints(SIZE))
    return g.op("OneHot", negative, g.const(np.int64(SIZE)), g.ints(0, 1), axis=1)


def matmul_experts(g):
    y = g.op("MatMul", g.op("Transpose", g.x, perm=[1, 0, 2]), g.weight(HEADS, SIZE, 5))
    return g.op("Transpose", y, perm=[1, 0, 2])


def gemm_transposed(g):
    return g.op("Gemm", g.reshape(g.x, -1, 24), g.weight(7, 24), g.weight(1, 7), transB=1, alpha=0.5, beta=2.0)


def constant_of_shape(g):
    value = ir.tensor(np.array([2.5], np.float32))
    return g.op("Add", g.op("ConstantOfShape", g.op("Shape", g.x), value=value), g.x)


def token_numbers(g):
    count = g.op("Squeeze", g.op("Shape", g.ids))
    numbers = g.op("Range", g.const(np.int64(0)), count, g.const(np.int64(1)))
    return g.op("Add", g.x, g.reshape(g.cast(numbers), -1, 1, 1))


def positions(g):
    moved = g.op("Add", g.op("Cast", g.positions, to=7), g.ints(2))
    return g.op("Mul", g.x, g.reshape(g.cast(moved), -1, 1, 1))


REDUCTIONS = (
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"),
    *("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp"),
)
GRAPHS = {
    **{op: lambda g, op=op: g.op(op, g.op("Mul", g.x, g.number(2.5))) for op in UNARY},
    **{op: lambda g, op=op: g.op(op, g.op("Abs", g.x)) for op in ("Log", "Sqrt", "Reciprocal")},
    **{op: lambda g, op=op: g.op(op, g.x, g.y) for op in ("Add", "Sub", "Mul", "Div")},
    **{op: lambda g, op=op: g.op(op, g.x, g.y) for op in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")},
    "broadcast": lambda g: g.op("Add", g.op("Mul", g.x, g.weight(SIZE)), g.weight(HEADS, 1)),
    "Pow": lambda g: g.op("Pow", g.op("Abs", g.x), g.number(1.5)),
    "Max": lambda g: g.op("Max", g.x, g.y, g.number(0.1)),
    "Min": lambda g: g.op("Min", g.x, g.y),
    "Sum": lambda g: g.op("Sum", g.x, g.y, g.x),
    "Mean": lambda g: g.op("Mean", g.x, g.y, g.x),
    "Mod": lambda g: g.op("Mod", g.cast(g.op("Mul", g.x, g.number(9)), "INT64"), g.ints(-4)),
    "fmod": lambda g: g.op("Mod", g.x, g.number(0.7), fmod=1),
    "And": lambda g: g.op("And", g.op("Less", g.x, g.y), g.op("Less", g.x, g.number(0))),
    "Or": lambda g: g.op("Or", g.op("Less", g.x, g.y), g.op("Less", g.x, g.number(0))),
    "Xor": lambda g: g.op("Xor", g.op("Less", g.x, g.y), g.op("Less", g.x, g.number(0))),
    "Not": lambda g: g.op("Not", g.op("Less", g.x, g.y)),
    "IsNaN": lambda g: g.op("IsNaN", g.op("Log", g.x)),
    "Where": lambda g: g.op("Where", g.op("Less", g.x, g.y), g.x, g.number(7)),
    "Clip": lambda g: g.op("Clip", g.x, g.number(-0.3), g.number(0.4)),
    "Cast": lambda g: g.cast(g.op("Mul", g.x, g.number(5)), "INT32"),
    "CastLike": lambda g: g.op("CastLike", g.op("Mul", g.x, g.number(5)), g.ints(1)),
    "Gelu": lambda g: g.op("Add", g.op("Gelu", g.x), g.op("Gelu", g.y, approximate="tanh")),
    "Identity": lambda g: g.op("Identity", g.x),
    "Reshape": lambda g: g.reshape(g.op("Add", g.reshape(g.x, 0, 2, -1), g.number(1)), -1, 8, 3),
    "reshape_copies": lambda g: g.op("Neg", g.reshape(g.op("Transpose", g.x, perm=[0, 2, 1]), -1, HEADS * SIZE)),
    "Flatten": lambda g: g.op("Flatten", g.x, axis=1),
    "Transpose": lambda g: g.op("Neg", g.op("Transpose", g.x, perm=[0, 2, 1])),
    "Squeeze": lambda g: g.op("Squeeze", g.op("Unsqueeze", g.x, g.ints(0, 2)), g.ints(0)),
    "Unsqueeze": lambda g: g.op("Unsqueeze", g.x, g.ints(-1)),
    "Expand": lambda g: g.op(
        "Add", g.op("Expand", g.reshape(g.x, -1, 1, HEADS, SIZE), g.ints(3, 1, 1)), g.weight(3, 1, 1)
    ),
    "Slice": lambda g: g.op("Slice", g.x, g.ints(1, -5), g.ints(4, 100), g.ints(1, 2), g.ints(2, 3)),
    "slice_backwards": lambda g: g.op("Slice", g.x, g.ints(-1), g.ints(-100), g.ints(2), g.ints(-2)),
    "Split": lambda g: g.op("Mul", *g.op("Split", g.x, g.ints(2, 2), axis=1, outputs=2)),
    "split_equally": lambda g: g.op("Mul", *g.op("Split", g.x, axis=2, num_outputs=2, outputs=2)),
    "Concat": concat,
    "concat_twice": lambda g: g.op("Concat", g.x, g.op("Concat", g.y, g.x, axis=2), axis=2),
    "Tile": lambda g: g.op("Tile", g.x, g.ints(1, 2, 3)),
    "Pad": lambda g: g.op("Pad", g.op("Neg", g.x), g.ints(0, 1, 0, 0, 0, 2), g.number(2)),
    **{
        f"Reduce{op}": lambda g, op=op: g.op(f"Reduce{op}", g.x, g.ints(1))
        for op in ("Sum", "Mean", "Max", "Min", "Prod")
    },
    **{
        f"Reduce{op}": lambda g, op=op: g.op(f"Reduce{op}", g.x, g.ints(-1), keepdims=0)
        for op in ("L1", "L2", "SumSquare", "LogSumExp")
    },
    "reduce_two": lambda g: g.op("Sub", g.x, g.op("ReduceMean", g.x, g.ints(1, 2))),
    "reduce_any": lambda g: g.op("ReduceMax", g.op("Less", g.x, g.number(-1.5)), g.ints(2)),
    "ArgMax": lambda g: g.op("ArgMax", g.x, axis=1),
    "ArgMin": lambda g: g.op("ArgMin", g.x, axis=-1, keepdims=0),
    "Softmax": lambda g: g.op("Softmax", g.x),
    "softmax_1": lambda g: g.op("Softmax", g.x, axis=1),
    "LogSoftmax": lambda g: g.op("LogSoftmax", g.x, axis=-1),
    "CumSum": cumsum,
    "TopK": lambda g: g.op("Add", *(g.cast(v) for v in g.op("TopK", g.x, g.ints(3), outputs=2))),
    "topk_1": lambda g: g.op("Add", *(g.cast(v) for v in g.op("TopK", g.x, g.ints(2), axis=1, largest=0, outputs=2))),
    "Gather": lambda g: g.op("Gather", g.x, g.const(np.array([[0, -1], [5, 2]])), axis=2),
    "gather_one": lambda g: g.op("Gather", g.x, g.const(np.int64(-2)), axis=1),
    "gather_steps": lambda g: g.op("Gather", g.x, g.ints(1, 3, 5), axis=2),
    "gather_by_tokens": lambda g: g.op("Gather", g.weight(VOCABULARY, 3, 2), g.op("Cast", g.ids, to=7), axis=0),
    "GatherElements": lambda g: g.op("GatherElements", g.x, g.op("ArgMax", g.x, axis=2), axis=2),
    "gather_elements_1": lambda g: g.op("GatherElements", g.x, g.op("ArgMax", g.x, axis=1), axis=1),
    "ScatterElements": lambda g: g.op("ScatterElements", g.x, *scatter(g), axis=2),
    "scatter_add": lambda g: g.op("ScatterElements", g.x, *scatter(g), axis=2, reduction="add"),
    "GatherND": lambda g: g.op("GatherND", g.weight(VOCABULARY, 5, 3), g.op("Concat", *indices(g), axis=-1)),
    "OneHot": one_hot,
    "one_hot_negative": one_hot_negative,
    "MatMul": lambda g: g.op("MatMul", g.x, g.weight(SIZE, 9)),
    "matmul_activations": lambda g: g.op("MatMul", g.x, g.op("Transpose", g.y, perm=[0, 2, 1])),
    "matmul_experts": matmul_experts,
    "Gemm": lambda g: g.op("Gemm", g.reshape(g.x, -1, 24), g.weight(24, 7), g.weight(7)),
    "gemm_transposed": gemm_transposed,
    "Einsum": lambda g: g.op("Einsum", g.x, g.y, equation="thd,tgd->tgh"),
    "einsum_sum": lambda g: g.op("Einsum", g.x, g.y, equation="thd,tge->tg"),
    "ConstantOfShape": constant_of_shape,
    "Shape": lambda g: g.op("Reshape", g.x, g.op("Concat", g.op("Shape", g.x, start=0, end=1), g.ints(3, 8), axis=0)),
    "Constant": lambda g: g.op("Mul", g.x, g.op("Constant", value=ir.tensor(f32(SIZE)))),
    "Range": token_numbers,
    "positions": positions,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_equals_onnx(name):
    g = Graph()
    check(g.model(GRAPHS[name](g)))


def test_every_listed_op_has_a_rule_and_a_graph():
    assert set(ONNX_OPS) <= set(rules()) | {"Shape", "Constant"}
    assert {op for op in rules() if "::" not in op} <= set(ONNX_OPS)
    assert {f"llmc::{name}" for name, op in all_ops().items() if not op.plan_only} <= set(rules())
    assert set(ONNX_OPS) <= set(GRAPHS), "each is tested"
