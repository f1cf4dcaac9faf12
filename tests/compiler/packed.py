"""Runs a traced module and its Hugging Face model on the same tokens: one sequence, and two requests packed."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from llmc.compiler import trace as tracer
from llmc.compiler.families.base import Fix, all_fixes
from llmc.compiler.trace import TracedProgram, bind, build_model, trace
from llmc.errors import CompileError
from llmc.plugins.paged_attention.step import Cache, Step

MIXED = (
    (("a", 10),),
    (("a", 1), ("b", 12)),
    (("b", 8), ("a", 17)),
    (("a", 1), ("b", 1)),
)
"""Steps of (request, tokens): a prefill chunk, a decode beside a prefill, two chunks, two decodes."""


def random_model(config: Any, attention: str = "eager", seed: int = 0) -> Any:
    """A model with random weights in which norms, biases and soft caps matter."""
    torch.manual_seed(seed)
    model = build_model(config, attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() >= 2:
                p.copy_(noise * (1.2 / math.sqrt(p.shape[-1])))
            else:
                size = float(p.abs().mean())
                p.add_(noise * 0.15 * (size if size > 0 else 1.0))
    return model


def random_ids(config: Any, **lengths: int) -> dict[str, Tensor]:
    """Token ids [1, n] of each request."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = config.get_text_config().vocab_size
    return {name: torch.randint(3, vocabulary, (1, n), generator=generator) for name, n in lengths.items()}


def expected_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """[1, n, V] of transformers, without a cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def one_sequence(module: fx.GraphModule, ids: Tensor) -> Tensor:
    """[1, n, V] of the traced module for a whole sequence."""
    n = ids.shape[1]
    with torch.no_grad():
        logits: Tensor = module(ids, torch.arange(n)[None], torch.arange(n))
    return logits


def packed(module: fx.GraphModule, ids: dict[str, Tensor], steps: Any = MIXED) -> dict[str, Tensor]:
    """Logits of each request when the rows of several share each call; one cache for all steps."""
    cache: Cache = {}
    done = dict.fromkeys(ids, 0)
    logits: dict[str, list[Tensor]] = {name: [] for name in ids}
    for rows in steps:
        tokens = torch.cat([ids[name][:, done[name] : done[name] + n] for name, n in rows], 1)
        positions = torch.cat([torch.arange(done[name], done[name] + n) for name, n in rows])[None]
        with torch.no_grad(), Step(rows, cache):
            out = module(tokens, positions, torch.arange(tokens.shape[1]))
        for (name, n), part in zip(rows, out.split([n for _, n in rows], 1), strict=True):
            logits[name].append(part)
            done[name] += n
    return {name: torch.cat(parts, 1) for name, parts in logits.items()}


def traced(config: Any, model: nn.Module, max_len: int) -> tuple[TracedProgram, fx.GraphModule]:
    """The program of a config, and its module with the weights of a model."""
    program = trace(config, max_seq_len=max_len)
    return program, bind(program, model.state_dict())


def differences(config: Any, attention: str = "eager", max_len: int = 256) -> tuple[float, float]:
    """Largest difference of logits from transformers: one sequence, and two packed requests."""
    model = random_model(config, attention)
    ids = random_ids(config, a=29, b=21)
    expected = {name: expected_logits(model, x) for name, x in ids.items()}
    _, module = traced(config, model, max_len)
    alone = float((one_sequence(module, ids["a"]) - expected["a"]).abs().max())
    together = packed(module, ids)
    return alone, max(float((together[name] - expected[name]).abs().max()) for name in ids)


def check_fix(fix: Fix) -> None:
    """A family's small model equals transformers with its fix, and can't be traced or is wrong without."""
    config = fix.tiny()
    assert max(differences(config, fix.reference)) < 1e-4
    others = {name: found for name, found in all_fixes().items() if found is not fix}
    with mock.patch.object(tracer, "all_fixes", lambda: others):
        try:
            wrong = max(differences(config, fix.reference)) > 1e-4
        except CompileError:
            wrong = True
    assert wrong, "the fix is not needed"
