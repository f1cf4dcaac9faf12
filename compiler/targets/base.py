"""What a target is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc import discover
from llmc.errors import UsageError

# fmt: off
ONNX_OPS = frozenset((
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Concat", "Constant",
    "ConstantOfShape", "Cos", "CumSum", "Div", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor",
    "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "Identity", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul", "Max", "Mean", "Min",
    "Mish", "Mod", "Mul", "Neg", "Not", "OneHot", "Or", "Pad", "Pow", "Range", "Reciprocal", "ReduceL1", "ReduceL2",
    "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu",
    "Reshape", "Round", "ScatterElements", "Shape", "Sigmoid", "Sign", "Sin", "Slice", "Softmax", "Softplus",
    "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Tile", "TopK", "Transpose", "Unsqueeze", "Where",
    "Xor",
))
# fmt: on
"""The standard ops that lowering turns into steps or views; tests/compiler/test_lower.py lowers each of them."""


@dataclass(frozen=True)
class Target:
    """A machine to build engines for.

    ``kernels`` are the suffixes of the kernel files ``plugins/<op>/<op>_<suffix>.*`` in the order in which they are
    looked for; an op without any is not legal. ``alignment``: bytes that buffers and weights are aligned to.
    """

    name: str
    device: str
    kernels: tuple[str, ...]
    alignment: int
    summary: str
    onnx_ops: frozenset[str] = ONNX_OPS


def all_targets() -> dict[str, Target]:
    """Every target in this folder, by name."""
    return {target.name: target for target in discover.instances("llmc.compiler.targets", Target)}


def find_target(name: str) -> Target:
    """The target of that name; ``cuda:sm_80,sm_90`` is several of one device in one engine.

    Raises:
        UsageError: there is none; lists the known ones.
    """
    targets = all_targets()
    if name in targets:
        return targets[name]
    device, _, archs = name.partition(":")
    parts = [targets.get(f"{device}:{arch}") for arch in archs.split(",")]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len(set(archs.split(","))) < len(parts):
        raise UsageError(f"--target {name}: unknown; known: {', '.join(targets)}, and several, as cuda:sm_80,sm_90")
    return replace(found[0], name=name)
