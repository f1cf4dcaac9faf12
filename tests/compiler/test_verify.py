import copy

import numpy as np
import onnx_ir as ir
import pytest
from configs import CONFIGS
from lowered import CPU, LIMITS

from llmc.compiler import verify
from llmc.compiler.lower import lower
from llmc.compiler.pipeline import make_graph
from llmc.compiler.trace import trace
from llmc.compiler.weights import Array
from llmc.errors import CompileError
from llmc.runtime.plan import Dim, Plan, Step


@pytest.fixture(scope="module")
def program():
    return trace(CONFIGS["qwen2"].make(), max_seq_len=64)


@pytest.fixture
def module(program):
    return copy.deepcopy(program.module)


@pytest.fixture(scope="module")
def shapes(program):
    return {name: program.module.get_buffer(target).shape for target, name in program.parameter_names.items()}


@pytest.fixture
def model(program, module, shapes):
    fresh = type(program)(module, program.parameter_names, program.buffers, program.config)
    return make_graph(fresh, lambda name: Array(np.zeros(shapes[name], np.float32)))


def known(program):
    return {*program.parameter_names, *program.buffers}


def test_a_traced_graph(program, module):
    verify.traced(module, known(program))
    with pytest.raises(CompileError, match="neither a weight nor a buffer"):
        verify.traced(module, {*known(program)} - {next(iter(program.parameter_names))})


def test_a_mask_is_found(program, module):
    norm = next(node for node in module.graph.nodes if str(node.target) == "llmc.norm.default")
    tokens = norm.meta["val"].shape[1]
    norm.meta["val"] = norm.meta["val"].new_empty(1, tokens, tokens)
    with pytest.raises(CompileError, match=f"{norm.name}.*only attention"):
        verify.traced(module, known(program))


def test_slots_out_of_order_are_found(module):
    verify.fused(module)
    attention = [node for node in module.graph.nodes if "paged_attention" in str(node.target)]
    attention[1].kwargs = {**attention[1].kwargs, "slot": 2}
    with pytest.raises(CompileError, match=r"paged_attention.*slot 2 after 1"):
        verify.fused(module)


def test_an_emitted_graph(model):
    verify.emitted(model)
    verify.legal(model, CPU)


def first(model, op):
    return next(node for node in model.graph if node.op_type == op)


def unknown_op(model):
    first(model, "norm").op_type = "teleport"


def unknown_domain(model):
    first(model, "norm").domain = "com.example"


def attribute_missing(model):
    del first(model, "norm").attributes["epsilon"]


def no_dtype(model):
    first(model, "linear").outputs[0].type = None


def no_shape(model):
    value = first(model, "linear").outputs[0]
    value.shape, value.meta["dims"] = None, None


def same_name(model):
    first(model, "linear").outputs[0].name = "input_ids"


def loaded(model):
    value = next(iter(model.graph.initializers.values()))
    value.const_value = ir.LazyTensor(lambda: None, ir.DataType.FLOAT, ir.Shape([1 << 30]))


def out_of_order(model):
    nodes = list(model.graph)
    model.graph.remove(nodes[0])
    model.graph.append(nodes[0])


def wrong_logits(model):
    model.graph.outputs[0].meta["dims"] = (Dim(tokens=1), Dim(128))


BAD = {
    unknown_op: "no such op",
    unknown_domain: "domain 'com.example'",
    attribute_missing: "norm .*layers.0.*attributes",
    no_dtype: "no exact dtype",
    no_shape: "no exact dtype and shape",
    same_name: "two values have the name 'input_ids'",
    loaded: "is loaded",
    out_of_order: "before anything computes it",
    wrong_logits: r"\[T, 128\], expected logits",
}


@pytest.mark.parametrize("break_it", BAD)
def test_a_broken_graph_is_found(model, break_it):
    break_it(model)
    with pytest.raises(CompileError, match=BAD[break_it]):
        verify.emitted(model)


def test_ops_that_the_target_lacks(model):
    first(model, "norm").domain = ""
    with pytest.raises(CompileError, match=r"norm .*target cpu"):
        verify.legal(model, CPU)


def test_a_plan_without_kernels_or_weights(model):
    lowered = lower(model, CPU, LIMITS, "float32")
    verify.lowered(lowered.plan, lowered.weights, CPU)
    name = next(iter(lowered.weights))
    with pytest.raises(CompileError, match=f"disagree on {name}"):
        verify.lowered(lowered.plan, set(lowered.weights) - {name}, CPU)
    other = Plan((), (Step("teleport", (), ()),), 0, "", ())
    with pytest.raises(CompileError, match="no kernel for teleport"):
        verify.lowered(other, (), CPU)
