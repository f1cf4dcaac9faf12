"""What a step gives to a sequence: scores of its prompt, its next tokens, or its embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.batch import Chosen
from llmc.runtime.chunk import Chunk
from llmc.runtime.request import FinishReason, Sequence
from llmc.runtime.sampling import Sampled, Sampler
from llmc.runtime.speculative.speculator import Speculator

NOT_FINITE = "the model computed numbers that are not finite"


class Outcome:
    """Takes what was computed for a chunk. ``speculator``: the one that has added drafts to chunks."""

    def __init__(self, sampler: Sampler, speculator: Speculator | None) -> None:
        self._sampler, self._speculator = sampler, speculator

    def take(
        self,
        chunk: Chunk,
        rows: NDArray[np.float32] | None,
        logits: NDArray[np.float32] | None,
        first: int,
        chosen: Chosen | None = None,
    ) -> None:
        """Record it; ``rows`` before the head, and logits, are those of the step, the chunk's from ``first`` on.

        Rows for which a token was ``chosen`` by the device have no logits.
        """
        sequence, request, stop = chunk.sequence, chunk.sequence.request, first + chunk.num_logits
        if stop == first:
            return
        if request.pool is not None:
            assert rows is not None, "the step had an embedding"
            request.pool.add(rows[first:stop])
            if chunk.completes:
                finite = request.pool.result is not None and bool(np.isfinite(request.pool.result).all())
                sequence.finish(*((FinishReason.STOP,) if finite else (FinishReason.ERROR, None, NOT_FINITE)))
            return
        assert logits is not None, "somebody needs them"
        if sequence.scored is not None:
            self._sampler.score_prompt(sequence, chunk.stop - chunk.num_logits, logits[first:stop])
        if chunk.completes:
            path = self._take_tokens(chunk, logits, stop - 1 - chunk.num_drafts, chosen)
            if self._speculator is not None:
                self._speculator.take(chunk, path, None if rows is None else rows[first:stop])

    def _take_tokens(self, chunk: Chunk, logits: NDArray[np.float32], row: int, chosen: Chosen | None) -> list[int]:
        """The model's own tokens as long as they are drafts, and one more; returns the nodes of these drafts.

        ``row`` is that of the last token before the drafts. Each token is chosen as if it came in a step of its own,
        unless another rule was asked for.
        """
        path: list[int] = []
        node: int | None = -1
        while node is not None:
            if chosen is not None and chosen.wanted[row + 1 + node]:
                sampled = self._sampler.take(chosen, row + 1 + node, chunk.sequence)
            else:
                draw = None if self._speculator is None else self._speculator.rule.draw(chunk.tree, node)
                sampled = self._sampler.sample_row(logits[row + 1 + node], chunk.sequence, draw)
            if not _append(chunk.sequence, sampled) or chunk.tree is None:
                break
            if (node := chunk.tree.find(node, sampled.token)) is not None:
                path.append(node)
        return path


def _append(sequence: Sequence, sampled: Sampled) -> bool:
    """Take the next token, or what there is instead; whether the sequence goes on."""
    if sampled.error is not None:
        sequence.finish(FinishReason.ERROR, error=sampled.error)
    elif sequence.request.max_tokens == 0:
        sequence.finish(FinishReason.LENGTH)
    elif sampled.ends:
        sequence.end()
    else:
        sequence.append(sampled.token, sampled.logprob)
    return sequence.finish_reason is None
