"""Every decoder of the list builds and runs natively: logits and greedy tokens of transformers, packed in any way."""

from pathlib import Path

import engines
import numpy as np
import pytest
from configs import CONFIGS
from packed import MIXED, expected_logits, random_ids

from llmc import LLM, SamplingParams
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

WHOLE = ((("a", 29),),)
CHUNKED = ((("a", 7),), (("a", 16),), (("a", 5),), (("a", 1),))
DECODE = ((("b", 17),), (("b", 1),), (("b", 1),), (("b", 2),))
GREEDY = 32


@pytest.mark.parametrize("name", CONFIGS)
def test_runs_as_in_transformers(name: str, tmp_path: Path) -> None:
    entry = CONFIGS[name]
    config = entry.make()
    model, path = engines.build(config, tmp_path, entry.reference, max_seq_len=entry.max_len)
    ids = random_ids(config, a=29, b=21)
    expected = {key: expected_logits(model, x)[0].numpy() for key, x in ids.items()}
    tokens = {key: x[0].tolist() for key, x in ids.items()}
    engine = load_engine(path)
    for steps in (WHOLE, CHUNKED, DECODE, MIXED):
        packed = engines.Packed(CpuExecutor(engine, num_blocks=16, threads=2), tokens)
        for key, logits in packed.run(steps).items():
            np.testing.assert_allclose(logits, expected[key][: len(logits)], rtol=0, atol=1e-4)
    results = LLM(path, num_blocks=32, threads=2).generate(
        list(tokens.values()), SamplingParams(max_tokens=GREEDY, ignore_eos=True)
    )
    for result, prompt in zip(results, tokens.values(), strict=True):
        assert len(result.token_ids) == min(GREEDY, entry.max_len - len(prompt))
        assert engines.is_greedy(model, prompt, result.token_ids)
