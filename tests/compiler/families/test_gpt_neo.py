"""gpt_neo: its fix is needed, and makes it right."""

import torch
from packed import check_fix

from llmc.compiler.families import gpt_neo
from llmc.compiler.trace import trace


def test_fix() -> None:
    check_fix(gpt_neo.FIX)


def test_local_layers_have_a_window() -> None:
    module = trace(gpt_neo.FIX.tiny(), max_seq_len=64).module
    found = module.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default)
    assert [node.kwargs["window"] for node in found] == [0, 8]
