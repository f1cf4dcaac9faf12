"""jetmoe: its fix is needed, and makes it right."""

import torch
from packed import check_fix

from llmc.compiler.families import jetmoe
from llmc.compiler.trace import trace


def test_fix() -> None:
    check_fix(jetmoe.FIX)


def test_no_size_depends_on_data() -> None:
    module = trace(jetmoe.FIX.tiny(), max_seq_len=64).module
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.llmc.moe.default)) == 2
