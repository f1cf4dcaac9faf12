import numpy as np
import onnx_ir as ir
import pytest

from llmc.passes.fold_layout import FoldLayout

Steps = list[tuple[str, list[int]]]
SHAPES = {"T": 7}


def chain(shape: list[int | str], steps: Steps, *, inner_is_read: bool = False) -> ir.Model:
    """Abs(x), the layout ops, Abs; the shapes are found by running them."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=shape)
    first = ir.node("Abs", [x])
    current, sizes, nodes, constants = first.outputs[0], shape, [first], []
    current.type, current.shape, current.name = x.type, x.shape, "first"
    for i, (op, argument) in enumerate(steps):
        if op == "Transpose":
            node = ir.node(op, [current], {"perm": argument})
            sizes = [sizes[axis] for axis in argument]
        else:
            constant = ir.val(f"c{i}", const_value=ir.tensor(np.array(argument, np.int64), name=f"c{i}"))
            constants.append(constant)
            node = ir.node(op, [current, constant])
            if op == "Reshape":
                sizes = ["T" if size == -1 else size for size in argument]
            elif op == "Squeeze":
                sizes = [size for axis, size in enumerate(sizes) if axis not in argument]
            else:
                sizes = list(sizes)
                for axis in argument:
                    sizes.insert(axis, 1)
        current = node.outputs[0]
        current.type, current.shape, current.name = x.type, ir.Shape(sizes), f"v{i}"
        nodes.append(node)
    last = ir.node("Abs", [current])
    last.outputs[0].type, last.outputs[0].shape, last.outputs[0].name = x.type, current.shape, "y"
    outputs = [last.outputs[0], *([nodes[1].outputs[0]] if inner_is_read else [])]
    graph = ir.Graph([x], outputs, nodes=[*nodes, last], initializers=constants, opset_imports={"": 23})
    return ir.Model(graph, ir_version=11)


def run(model: ir.Model) -> list[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    shape = [SHAPES.get(str(d), d) if not isinstance(d, int) else d for d in map(_plain, model.graph.inputs[0].shape)]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})


def _plain(size: int | ir.SymbolicDim) -> int | str:
    return size if isinstance(size, int) else str(size.value)


def layout(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.op_type != "Abs"]


ATTENTION: Steps = [("Reshape", [1, -1, 4, 8]), ("Transpose", [0, 2, 1, 3]), ("Squeeze", [0]), ("Transpose", [1, 0, 2])]
BACK: Steps = [("Transpose", [1, 0]), ("Unsqueeze", [0]), ("Transpose", [0, 2, 1]), ("Squeeze", [0])]
SWAP: Steps = [
    ("Reshape", [1, -1, 4, 8]),
    ("Transpose", [0, 2, 1, 3]),
    ("Unsqueeze", [0]),
    ("Squeeze", [0]),
    ("Reshape", [4, -1, 8]),
]
INTERLEAVED: Steps = [("Reshape", [-1, 4, 2]), ("Transpose", [0, 2, 1]), ("Reshape", [-1, 8]), ("Reshape", [-1, 2, 4])]


@pytest.mark.parametrize(
    ("shape", "steps", "left"),
    [
        pytest.param(["T", 16], BACK, [], id="rule 1"),
        pytest.param([1, "T", 32], ATTENTION, ["Reshape"], id="rule 2"),
        pytest.param(["T", 32], SWAP, ["Reshape", "Transpose"], id="rule 3"),
        pytest.param(["T", 8], INTERLEAVED, ["Reshape", "Transpose"], id="rule 3, without the last"),
    ],
)
def test_folds(shape: list[int | str], steps: Steps, left: list[str]) -> None:
    model = chain(shape, steps)
    before = run(model)
    assert FoldLayout()(model).modified
    assert layout(model) == left
    np.testing.assert_array_equal(run(model)[0], before[0])
    assert model.graph.outputs[0].name == "y"
    assert not FoldLayout()(model).modified, "a second run changes nothing"


def test_keeps_what_others_read() -> None:
    model = chain([1, "T", 32], ATTENTION, inner_is_read=True)
    before = run(model)
    assert FoldLayout()(model).modified
    assert layout(model) == ["Reshape", "Reshape"]
    for a, b in zip(run(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        pytest.param(["T", 16], [("Reshape", [-1, 4, 4])], id="rule 1: another shape"),
        pytest.param(["T", 4, 8], [("Transpose", [1, 0, 2]), ("Unsqueeze", [0])], id="rule 3: not fewer"),
        pytest.param(["T", 4, 4], [("Transpose", [0, 2, 1]), ("Reshape", [-1, 2, 8])], id="rule 1: axes change places"),
    ],
)
def test_leaves_near_misses_alone(shape: list[int | str], steps: Steps) -> None:
    model = chain(shape, steps)
    before = layout(model)
    assert not FoldLayout()(model).modified
    assert layout(model) == before
