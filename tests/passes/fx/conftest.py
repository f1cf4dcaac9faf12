"""Small modules, exported as the tracer exports models."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from llmc.compiler.torch_ops import register_ops
from llmc.passes.fx import MAX_SEQ_LEN

Export = Callable[[nn.Module], fx.GraphModule]


@pytest.fixture(scope="session")
def export() -> Export:
    """Exports a module of (input_ids [1, T], position_ids [1, T], logit_rows [N])."""
    register_ops()

    def run(module: nn.Module) -> fx.GraphModule:
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
        graph.meta[MAX_SEQ_LEN] = 300
        return graph

    return run


@pytest.fixture
def run() -> Callable[[fx.GraphModule], list[Tensor]]:
    """Runs a graph on 23 tokens at odd positions."""

    def call(module: fx.GraphModule) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)
        ids, positions = (torch.randint(0, limit, (1, 23), generator=generator) for limit in (32, 300))
        with torch.no_grad():
            found = module(ids, positions, torch.tensor([4, 0]))
        return [found] if isinstance(found, Tensor) else list(found)

    return call
