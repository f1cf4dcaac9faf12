"""Some decoders of the list, compiled to plans that the references run: no kernel and no engine is involved.

All of them run natively in tests/test_coverage.py; a failure here as well is one of the compiler.
"""

import engines
import numpy as np
import pytest
from configs import CONFIGS
from lowered import CPU
from packed import MIXED, expected_logits, random_ids, random_model

from llmc.compiler.config import Limits
from llmc.compiler.lower import lower
from llmc.compiler.pipeline import make_graph
from llmc.compiler.reference_executor import ReferenceExecutor, stored_weights
from llmc.compiler.trace import trace
from llmc.compiler.weights import Array

WHOLE = ((("a", 29),),)
CHUNKED = ((("a", 7),), (("a", 16),), (("a", 5),), (("a", 1),))
SMOKE = ("llama_tied_bias", "gemma3n_text", "falcon_new", "deepseek_v3", "gpt_oss", "llama4_text")
"""A tied head, leftovers, index splits, latent attention, experts and sinks, chunks."""


@pytest.mark.parametrize("name", SMOKE)
def test_runs_as_in_transformers(name):
    entry = CONFIGS[name]
    config = entry.make()
    model = random_model(config, entry.reference)
    parameters = {key: Array(value.numpy()) for key, value in model.state_dict(keep_vars=False).items()}
    graph = make_graph(trace(config, max_seq_len=entry.max_len), parameters.__getitem__)
    lowered = lower(graph, CPU, Limits(entry.max_len, 32, 4), "float32")
    weights = stored_weights(lowered.weights)
    ids = random_ids(config, a=29, b=21)
    expected = {key: expected_logits(model, x)[0].numpy() for key, x in ids.items()}
    tokens = {key: x[0].tolist() for key, x in ids.items()}
    for steps in (WHOLE, CHUNKED, MIXED):
        executor = ReferenceExecutor(lowered.plan, weights, num_blocks=16)
        for key, logits in engines.Packed(executor, tokens).run(steps).items():
            np.testing.assert_allclose(logits, expected[key][: len(logits)], rtol=0, atol=1e-4)
