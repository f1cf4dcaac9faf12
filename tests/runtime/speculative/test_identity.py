"""Engines say the same with drafts and without, to the last bit of a log-probability."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import engines
import pytest
from configs import CONFIGS

from llmc import LLM, SamplingParams
from llmc.runtime.sampling import Sampler
from llmc.runtime.scheduler import Scheduler
from llmc.runtime.speculative.base import Query, Tree
from llmc.runtime.speculative.ngram import NgramProposer
from llmc.runtime.speculative.speculator import Speculator

ENGINES = [
    ("llama", "bfloat16", "int8", "none"),
    ("gemma2", "float32", "auto", "none"),  # sliding windows and soft caps
    ("gpt_oss", "bfloat16", "float8_e4m3", "none"),  # sinks and experts
    ("deepseek_v3", "float32", "int4", "none"),  # MLA and experts
    ("bloom", "float16", "auto", "none"),  # ALiBi
    ("llama4_text", "bfloat16", "auto", "rtn:group=32"),  # chunked attention; int4 weights
]

Result = list[tuple[Any, ...]]


class Replay(NgramProposer):
    """Trees with the tokens that came without drafts, and wrong ones beside them."""

    def __init__(self, known: list[list[int]], vocab_size: int) -> None:
        super().__init__()
        self._known, self._vocab_size, self._rng = known, vocab_size, random.Random(5)

    def propose(self, queries: list[Query]) -> list[Tree]:
        return [self._tree(query) for query in queries]

    def _tree(self, query: Query) -> Tree:
        tokens = query.sequence.tokens
        (rest,) = [k[len(tokens) :] for k in self._known if k[: len(tokens)] == tokens][:1] or [[]]
        found: list[int] = []
        parents: list[int] = []
        right = -1
        for token in rest[: self._rng.randrange(5)]:
            for _ in range(self._rng.randrange(3)):  # some wrong ones, also below wrong ones
                place = self._rng.choice([right, len(found) - 1])
                wrong = self._rng.randrange(self._vocab_size)
                if wrong != token and (place, wrong) not in zip(parents, found, strict=True):
                    found.append(wrong)
                    parents.append(place)
            parents.append(right)
            found.append(token)
            right = len(found) - 1
        return Tree(tuple(found), tuple(parents))


def with_proposer(llm: LLM, proposer: Any) -> Speculator:
    """Lets an LLM use a proposer that has no name."""
    speculator = Speculator(proposer, llm.executor, vocab_size=llm.vocab_size, nodes=9)  # type: ignore[arg-type]
    free = llm.scheduler.kv_cache.on_free
    llm.scheduler = Scheduler(llm.executor, Sampler(), llm.scheduler.config, speculator=speculator)
    llm.scheduler.kv_cache.on_free = free
    return speculator


def mix(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(n)] for n in (1, 16, 31, 33, 70, 90)]
    prompts[3] = prompts[2] + prompts[3][:9]  # found in the prefix cache
    common: dict[str, Any] = {"ignore_eos": True, "logprobs": 2}
    params = [
        SamplingParams(max_tokens=30, **common),
        SamplingParams(max_tokens=25, repetition_penalty=1.2, presence_penalty=0.5, **common),
        SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=2, **common),
        SamplingParams(max_tokens=20, temperature=0.7, top_k=20, top_p=0.9, seed=4, **common),
        SamplingParams(max_tokens=24, logit_bias={5: 3.0}, stop_token_ids=list(range(40)), min_tokens=9, **common),
        SamplingParams(max_tokens=17, prompt_logprobs=1, **common),
    ]
    return prompts, params


def run(llm: LLM) -> Result:
    prompts, params = mix(llm.vocab_size)
    return [
        (result.prompt_logprobs, [(c.token_ids, c.logprobs, c.finish_reason, c.error) for c in result.choices])
        for result in llm.generate(prompts, params)
    ]


@pytest.fixture(scope="module", params=ENGINES, ids=lambda p: p[0])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, dtype, kv_dtype, quantization = request.param
    config = CONFIGS[name]
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "quantization": quantization}
    return engines.build(config.make(), tmp_path_factory.mktemp(name), config.reference, **options)[1]


def test_spc_09_drafts_change_nothing(path: Path) -> None:
    plain = LLM(path, threads=1)
    expected = run(plain)
    prompts, _ = mix(plain.vocab_size)
    known = [prompts[i] + list(c[0]) for i, (_, choices) in enumerate(expected) for c in choices]
    for proposer in (Replay(known, plain.vocab_size), NgramProposer()):
        for sizes in ({}, {"num_blocks": 10, "max_batch_tokens": 40, "max_sequences": 4}):
            llm = LLM(path, threads=2, check=True, **sizes)
            speculator = with_proposer(llm, proposer)
            assert run(llm) == expected
            if isinstance(proposer, Replay):
                assert speculator.acceptance.accepted > 30
