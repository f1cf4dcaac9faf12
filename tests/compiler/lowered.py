"""Builds small graphs, lowers them, and runs the plan with the references."""

import mmap
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from llmc.compiler.config import Limits
from llmc.compiler.lower import lower
from llmc.compiler.reference_executor import ReferenceExecutor, stored_weights
from llmc.compiler.targets.base import find_target
from llmc.runtime import manifest
from llmc.runtime.batch import Batch
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import Engine, Weight
from llmc.runtime.manifest import KvCacheSpec, Manifest, ModelFacts

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

    def number(self, value):
        return self.const(np.float32(value))

    def weight(self, *shape, seed=1):
        return self.const(f32(*shape, seed=seed))

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


def in_memory_engine(lowered):
    """The engine that a lowered model would become, without its files."""
    facts = ModelFacts("TestForCausalLM", "test", 0, "float32", VOCABULARY, None, (), None, None, False, False)
    limits = manifest.Limits(**vars(LIMITS))
    made = Manifest(1, "0", "cpu", limits, facts, KvCacheSpec("float32", 16), {}, "")
    weights = {
        name: Weight(name, lowered.weights[name].dtype, array.shape, _aligned(array))
        for name, array in stored_weights(lowered.weights).items()
    }
    return Engine(Path("test-engine"), made, lowered.plan, weights, "", {}, mmap.mmap(-1, 64))


def _aligned(array):
    """The bytes at a multiple of 64, as in a mapped file."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memory[start : start + array.nbytes]


def expected(model, tokens):
    for output in model.graph.outputs:
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["N", None])
    given = batch(tokens)
    feeds = {name: getattr(given, name) for name in ("input_ids", "position_ids", "logit_rows")}
    return ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)[0]


def check(model, dtype="float32"):
    """References and kernels give what ONNX's own evaluator gives."""
    lowered = lower(model, CPU, LIMITS, dtype)
    native = CpuExecutor(in_memory_engine(lowered), num_blocks=4, threads=2, poison=True)
    for tokens in (5, 1, 16):
        wanted = expected(model, tokens)
        np.testing.assert_allclose(run(lowered, tokens), wanted, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(native.step(batch(tokens)), wanted, rtol=2e-5, atol=2e-5)
    return lowered


def f32(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ops(lowered):
    return [step.attributes.get("function", step.op) for step in lowered.plan.steps]
