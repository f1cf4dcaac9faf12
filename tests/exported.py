"""Small modules, exported as the tracer exports models."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from llmc.compiler.torch_ops import register_ops
from llmc.passes.fx import MAX_SEQ_LEN
from llmc.passes.fx.clean_up import CleanUp
from llmc.passes.fx.functionalize import Functionalize

MAX_LEN = 300


@dataclass(frozen=True)
class Program:
    """What emission asks of a traced program."""

    module: fx.GraphModule
    parameter_names: Mapping[str, str]
    buffers: Mapping[str, Tensor]


def export(module: nn.Module) -> fx.GraphModule:
    """The graph of a module of (input_ids [1, T], position_ids [1, T], logit_rows [N])."""
    register_ops()
    ids, rows = torch.arange(16)[None], torch.arange(3)
    tokens, wanted = torch.export.Dim("T", min=1, max=1 << 20), torch.export.Dim("N", min=1, max=1 << 16)
    with torch.no_grad():
        program = torch.export.export(
            module.eval(),
            (ids, ids.clone(), rows),
            dynamic_shapes=({1: tokens}, {1: tokens}, {0: wanted}),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    graph = program.module(check_guards=False)
    assert isinstance(graph, fx.GraphModule)
    for node in list(graph.graph.nodes):
        if node.op == "call_module" or "assert" in str(node.target):
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    graph.meta[MAX_SEQ_LEN] = MAX_LEN
    return graph


def program_of(module: nn.Module) -> Program:
    """The exported module, functional and clean, with its parameters under their own names."""
    graph = export(module)
    for fx_pass in (Functionalize(), CleanUp()):
        fx_pass(graph)
    parameters = dict(graph.named_parameters(remove_duplicate=False))
    targets = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    buffers = {target: operator.attrgetter(target)(graph) for target in targets - set(parameters)}
    return Program(graph, {name: name for name in parameters if name in targets}, buffers)
