"""falcon: its fix is needed, and makes it right."""

import pytest
import torch
from configs import CONFIGS
from packed import check_fix

from llmc.compiler.families import falcon
from llmc.compiler.trace import trace


def test_fix() -> None:
    check_fix(falcon.FIX)


@pytest.mark.parametrize("name", ["falcon_rotary", "falcon_new", "falcon_alibi"])
def test_keys_and_values_are_kept_once_a_group(name: str) -> None:
    """The new decoder repeats keys and values for its groups of queries; the cache needs them once."""
    config = CONFIGS[name].make()
    module = trace(config, max_seq_len=64).module
    heads = {"falcon_rotary": 1, "falcon_new": 2, "falcon_alibi": 4}[name]
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default):
        assert node.args[1].meta["val"].shape[1] == heads
