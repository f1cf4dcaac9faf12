"""What the device is told to choose tokens by: the sampler's parameters of each row, and random numbers of its place.

Random numbers are functions of the place of a token, hence known before its logits. What needs the logits on the host
(log-probabilities, rules for drafts other than exact, drafts on which penalties or constraints depend) stays with
`Sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.batch import Draws
from llmc.runtime.chunk import Chunk
from llmc.runtime.constraints.base import ConstraintError
from llmc.runtime.request import Sequence
from llmc.runtime.sampling import Sampler, penalty_state, uniform

Changes = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float64], NDArray[np.float32]]


def draws_of(
    chunks: ListOf[Chunk], vocab_size: int, most: tuple[int, int], sampler: Sampler, *, exact: bool
) -> Draws | None:
    """What a step's rows of logits want; None if the host needs all of them.

    Args:
        chunks: of the step.
        vocab_size: columns of logits.
        most: changes of single logits, and masks, in all rows; rows for which there is no room are the host's.
        sampler: of the host.
        exact: drafts are accepted if they are what the model draws.
    """
    count = sum(chunk.num_logits for chunk in chunks)
    wanted, numbers = np.zeros(count, bool), np.zeros(count)
    settings = np.zeros((3, count), np.float32)
    top_k = np.zeros(count, np.int32)
    settings[1] = 1
    sizes, changes, row, (room, most_masks) = np.zeros(count + 1, np.int32), [], 0, most
    mask_of, masks = np.full(count, -1, np.int32), [np.zeros((0, -(-vocab_size // 32)), np.uint32)]
    for chunk in chunks:
        begin, row = row, row + chunk.num_logits
        if begin == row or not _is_for_device(chunk, exact):
            continue
        sequence, params = chunk.sequence, chunk.sequence.request.params
        found = _changes(sequence, vocab_size)
        try:
            mask = sampler.mask(sequence, vocab_size)
        except ConstraintError:  # which the sampler meets, too, and reports
            continue
        if len(found[0]) > room or (mask is not None and len(masks) > most_masks):
            continue
        if mask is not None:
            mask_of[begin:row] = len(masks) - 1
            masks.append(mask[None])
        room -= len(found[0])
        changes.append(found)
        sizes[begin + 1] = len(found[0])
        wanted[begin:row] = True
        settings[:, begin:row] = np.array([[params.temperature], [params.top_p], [params.min_p]])
        top_k[begin:row] = params.top_k
        if params.temperature > 0:
            numbers[begin:row] = _random(chunk)
    if not wanted.any():
        return None
    ids, factors, penalties, biases = (np.concatenate(parts) for parts in zip(*changes, strict=True))
    return Draws(
        wanted,
        settings[0],
        top_k,
        settings[1],
        settings[2],
        numbers,
        bounds=np.cumsum(sizes, dtype=np.int32),
        ids=ids,
        factors=factors,
        penalties=penalties,
        biases=biases,
        mask_of=mask_of,
        masks=np.concatenate(masks),
    )


def _random(chunk: Chunk) -> list[float]:
    """Of the places after the last token and after each draft."""
    sequence, depths = chunk.sequence, (0,) if chunk.tree is None else (0, *chunk.tree.depths)
    place, seed = len(sequence.tokens), sequence.request.seed
    return [uniform(seed, sequence.choice, place + depth) for depth in depths]


def greedy_rows(chunks: ListOf[Chunk], *, exact: bool) -> list[bool]:
    """The rows of logits of a step of which nothing but the largest is wanted; ``exact`` as in `draws_of`."""
    wanted: list[bool] = []
    for chunk in chunks:
        count = chunk.num_logits
        plain = chunk.sequence.request.is_plain and chunk.completes and count == 1 + chunk.num_drafts
        if plain and (chunk.tree is not None or chunk.sequence.request.params.min_tokens):
            plain = (exact or chunk.tree is None) and not _is_changed(chunk.sequence)
        wanted += (plain,) * count
    return wanted


def _is_for_device(chunk: Chunk, exact: bool) -> bool:
    """Whether nobody but the sampler wants the logits, and what it does can be done there."""
    sequence, params = chunk.sequence, chunk.sequence.request.params
    if not chunk.completes or sequence.request.pool is not None or sequence.scored is not None:
        return False
    if params.logprobs is not None or params.num_choices != params.n:
        return False
    if chunk.tree is not None and (not exact or _is_changed(sequence) or params.bad_words or sequence.constraint):
        return False  # these depend on the drafts that are accepted
    return chunk.num_logits == 1 + chunk.num_drafts


def _is_changed(sequence: Sequence) -> bool:
    params = sequence.request.params
    return bool(params.needs_penalties or params.logit_bias or sequence.num_generated < params.min_tokens)


def _changes(sequence: Sequence, vocab_size: int) -> Changes:
    """Those of single logits, as `Sampler` makes them, of different tokens."""
    params = sequence.request.params
    if not _is_changed(sequence):
        return np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0), np.zeros(0, np.float32)
    repeated = used = np.zeros(0, np.intp)
    if params.needs_penalties:
        state = penalty_state(sequence, vocab_size)
        if params.repetition_penalty != 1:
            repeated = np.flatnonzero(state.seen)
        if params.presence_penalty or params.frequency_penalty:
            used = np.flatnonzero(state.counts)
    biased = np.array(list(params.logit_bias), np.intp)
    ends = sequence.end_token_ids if sequence.num_generated < params.min_tokens else ()
    banned = np.array(sorted(ends), np.intp)
    ids = np.unique(np.concatenate([repeated, used, biased, banned]))
    factors, biases = np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32)
    penalties = np.zeros(len(ids))
    factors[np.searchsorted(ids, repeated)] = params.repetition_penalty
    if len(used):
        penalties[np.searchsorted(ids, used)] = (
            np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * state.counts[used]
        )
    biases[np.searchsorted(ids, biased)] = np.fromiter(params.logit_bias.values(), np.float32, len(biased))
    biases[np.searchsorted(ids, banned)] = -np.inf
    return ids.astype(np.int32), factors, penalties, biases
