"""llama4: its fix saves the experts that no token chose, and keeps it right."""

import torch
from packed import differences

from llmc.compiler.families import llama4
from llmc.compiler.trace import trace


def test_equals_transformers() -> None:
    assert max(differences(llama4.FIX.tiny())) < 1e-4


def test_only_the_chosen_experts_are_computed() -> None:
    config = llama4.FIX.tiny()
    module = trace(config, max_seq_len=64).module
    found = module.graph.find_nodes(op="call_function", target=torch.ops.llmc.moe.default)
    assert len(found) == config.num_hidden_layers * config.num_experts_per_tok
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
