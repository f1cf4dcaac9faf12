"""The model that an engine was built from, run by transformers in float32: the yardstick."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.evaluation.subject import rows_at_once
from llmc.compiler.families.base import all_fixes
from llmc.compiler.model import build_model, model_class
from llmc.errors import ResourceError
from llmc.runtime import resources

MAX_ROWS = 512

COPY_BYTES = 64 << 20
"""Of a weight that is converted to float32 at once."""


def load_model(checkpoint: Checkpoint) -> Any:
    """The transformers model of a checkpoint (a directory or a GGUF file) in float32, in evaluation mode.

    Raises:
        ResourceError: there is not enough memory for its weights.
    """
    check_memory(checkpoint)
    fix = all_fixes().get(model_class(checkpoint.config).__name__)
    model = build_model(checkpoint.config, fix.reference if fix else "eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            _copy(checkpoint.weight(name), tensor)
    return model


def check_memory(checkpoint: Checkpoint) -> None:
    """Refuse before time is spent.

    Raises:
        ResourceError: there is not enough memory for the weights in float32.
    """
    needed, free = 4 * checkpoint.parameters, resources.available_memory()
    if needed > free:
        raise ResourceError(
            f"{checkpoint.path}: the source model takes {needed} bytes in float32, but only {free} are free. Compare "
            "with an engine instead, which takes less: llmc build MODEL -o SOURCE --dtype bfloat16, then "
            "llmc eval ENGINE --against SOURCE"
        )


class SourceModel:
    """Implements `Subject` for a checkpoint. Only the rows of logits that are asked for are ever computed."""

    def __init__(self, checkpoint: Checkpoint, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.name = str(checkpoint.path)
        self._model = load_model(checkpoint)
        head = self._model.get_output_embeddings()
        self.vocab_size: int = head.weight.shape[0]
        self.max_rows = rows_at_once(self.vocab_size, MAX_ROWS)
        body = getattr(self._model, self._model.base_model_prefix, self._model)
        self._body = _Once(None if body is self._model else body)
        self._rows: slice | None = None
        self._ids = torch.empty(1, 0, dtype=torch.long)
        head.register_forward_pre_hook(self._pick_rows)

    def begin(self, ids: Sequence[int]) -> None:
        """Start a window."""
        self._ids = torch.tensor([list(ids)])
        self._body.forget()

    def logits(self, start: int, stop: int) -> NDArray[np.float32]:
        """See Subject: the layers run once for the window, the head for these rows only."""
        self._rows = slice(start, stop)
        try:
            with torch.inference_mode(), self._body:
                found: Tensor = self._model(input_ids=self._ids, use_cache=False).logits[0]
        finally:
            self._rows = None
        return found.numpy()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, ends: Collection[int]) -> list[list[int]]:
        """See Subject: one prompt after the other, with the KV cache of transformers."""
        from transformers import GenerationConfig

        ids = [i for i in ends if i < self.vocab_size]
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=ids or None,
            pad_token_id=ids[0] if ids else 0,
            use_cache=True,
        )
        results = []
        with torch.inference_mode():
            for prompt in prompts:
                given = torch.tensor([list(prompt)])
                mask = torch.ones_like(given)
                out = self._model.generate(given, attention_mask=mask, generation_config=config)
                results.append(out[0, len(prompt) :].tolist())
        return results

    def _pick_rows(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return given if self._rows is None else (given[0][:, self._rows], *given[1:])


class _Once:
    """Within it, a module (or none) computes once and then gives the same output again, until ``forget``."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._forward: Any = getattr(module, "forward", None)
        self._output: Any = None

    def forget(self) -> None:
        self._output = None

    def __enter__(self) -> None:
        if self._module is not None:
            self._module.forward = self._call

    def __exit__(self, *error: object) -> None:
        if self._module is not None:
            self._module.forward = self._forward

    def _call(self, *arguments: Any, **options: Any) -> Any:
        if self._output is None:
            self._output = self._forward(*arguments, **options)
        return self._output


def _copy(source: Any, tensor: Tensor) -> None:
    """A part at a time, so that the weight is in memory once."""
    if not source.shape:
        tensor.copy_(torch.from_numpy(np.asarray(source.rows(0, 1), np.float32).reshape(())))
        return
    row = 4 * int(np.prod(source.shape[1:], dtype=np.int64))
    step = max(1, COPY_BYTES // max(1, row))
    for start in range(0, source.shape[0], step):
        stop = min(start + step, source.shape[0])
        tensor[start:stop].copy_(torch.from_numpy(np.asarray(source.rows(start, stop)).astype(np.float32)))
