"""What a quantized KV cache holds keys without: constants that are measured on the calibration text.

Post-rope keys have parts that hardly change from token to token (the bias of k, in the dims that turn slowly), which
would take most of the range of the codes. A softmax does not see a constant vector that all keys lack, so they are
stored less their means; see plugins/paged_attention/__init__.py. A key counts as much as attention would feel its
error: the token that takes most of the attention (the first one, often) has a key far from the others, and its error
would be the largest where it matters most.

Keys of fp8 also get the feedback of errors that storage.round_trip describes: of the ways to round a key that is taken
which queries, by their second moments, feel least.

Values are stored as they are, though the op could add their means back: the tokens that most attention goes to (the
first one, often) have values near zero, which are exact as they are and err as much as all others without the mean.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import View
from llmc.compiler.progress import Progress
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.quantize.build import describe, thread_count
from llmc.compiler.quantize.interpreter import Interpreter, make_chunks
from llmc.compiler.quantize.loader import Stored
from llmc.compiler.quantize.sites import stored_view
from llmc.compiler.safetensors_writer import Tensor
from llmc.compiler.weights import Array
from llmc.errors import CompileError
from llmc.plugins import all_ops, kernels
from llmc.plugins.paged_attention.storage import QUANTIZED, rotate
from llmc.quantization.calibration import Calibration, CalibrationSettings
from llmc.quantization.deterministic import single_threaded
from llmc.runtime.batch import Batch
from llmc.runtime.plan import KvSlot

SAMPLES = 8
"""Windows of the calibration text that are looked at."""

SEEN_ROWS = 256
"""Queries of a window, at most, whose attention is looked at."""

LEAST_SHARE = 0.25
"""Of the mean: what the keys count that get no attention. (Off-grid SmolLM2, KL of the keys of fp8: all alike 0.115 %;
shares of 0, 0.25 and 1: 0.075, 0.073 and 0.077 %.)"""

REACH = 16.0
"""Scales are within a factor of so much of their mean."""

DAMPING = 0.01
"""Of the second moments of queries: so much of their mean is added to each dim."""

FEEDBACK_BYTES = 128 << 20
"""The most that ``key_feedback`` may take in all slots together: heads * dim^2 float32 each. What measures it takes
twice as much, and its time grows alike. (A 13B model with a head of keys for each of its 40 heads: 105 MB. Heads of the
hundreds that latent attention has, with 192 dims: 19 MB for a layer, over 1 GB in all.)"""

EXPONENTS, FED_BACK_EXPONENTS = (0.5, 0.5), (0.15, 0.75)
"""Powers of what queries and keys have in a dim, by which scales go; see ``_scale``."""

INPUTS = all_ops()["paged_attention"].plan_inputs
"""Those of paged_attention."""

Floats = NDArray[np.float32]
Floats64 = NDArray[np.float64]


@dataclass(frozen=True)
class Centred:
    """A graph whose attention has constants, and what recipe.json and report.json say of them."""

    graph: LoweredGraph
    recipe: Mapping[str, Any]
    report: Mapping[str, Any]


def is_centred(kv_dtype: str) -> bool:
    """Whether a cache of that type gets constants."""
    return kv_dtype in QUANTIZED


def centre(
    graph: LoweredGraph,
    calibration: Calibration | None,
    settings: CalibrationSettings,
    *,
    kv_dtype: str,
    longest: int,
    folder: Path,
    progress: Progress,
) -> Centred:
    """Run the model as it will be, with a float cache, over some of the calibration text, and measure.

    Args:
        graph: with weights that can be read.
        calibration: the tokens; None if the model has no tokenizer to make them with.
        settings: how they were made.
        kv_dtype: what the cache is to hold.
        longest: positions of a sequence of the engine. Windows are spread over them, as keys that are turned are.
        folder: for large activations.
        progress: is told how far it is.

    Raises:
        CompileError: keys or queries are not finite.
    """
    if calibration is None:
        progress.note(
            "keys are stored as they are, not less their means: the model has no tokenizer to measure them with; "
            '--calib FILE takes token ids, a .jsonl file of {"tokens": [...]}'
        )
        return Centred(graph, {"calibration": None}, {"centred": False})
    tokens = calibration.tokens[:: max(1, len(calibration.tokens) // SAMPLES)][:SAMPLES]
    size = feedback_bytes(kv_dtype, graph.kv_slots.values())
    feeds_back = size > 0 and _has_room(size, progress)
    measured = _measure(graph, _spread(tokens, longest), feeds_back, thread_count(), folder, progress)
    views: dict[int, dict[str, View]] = {}
    weights: dict[str, Tensor] = dict(graph.weights)
    for slot, moments in measured.items():
        views[slot] = {}
        for name, array in moments.constants().items():
            tensor = PackedWeight(f"kv_cache.{slot}.{name}", Array(array))
            weights[tensor.name] = tensor
            views[slot][f"{name}?"] = stored_view(tensor.name, tensor.dtype, tensor.shape)
    steps = [_with_constants(step, views) for step in graph.steps]
    slots = [{"slot": slot, **moments.facts()} for slot, moments in sorted(measured.items())]
    return Centred(
        replace(graph, steps=steps, weights=weights),
        {"calibration": describe(calibration, settings), "isa": kernels.best_isa()},
        {"centred": True, "fed_back": feeds_back, "tokens": int(tokens.size), "slots": slots},
    )


def feedback_bytes(kv_dtype: str, slots: Iterable[KvSlot]) -> int:
    """What the feedback of errors takes of a cache of that type; more than FEEDBACK_BYTES: it is left out."""
    return sum(4 * slot.kv_heads * slot.key_dim**2 for slot in slots) if kv_dtype == "float8_e4m3" else 0


def _has_room(size: int, progress: Progress) -> bool:
    """Whether the feedback of errors is within its bound; says so if it is not."""
    if size > FEEDBACK_BYTES:
        progress.note(
            f"keys are rounded to nearest, without feedback of errors: it would take {size / 1e6:.0f} MB for the "
            f"heads of this model, and {FEEDBACK_BYTES / 1e6:.0f} MB is the most"
        )
    return size <= FEEDBACK_BYTES


def _with_constants(step: LoweredStep, views: Mapping[int, Mapping[str, View]]) -> LoweredStep:
    if step.op != "paged_attention":
        return step
    given = {**dict(zip(INPUTS, step.inputs, strict=False)), **views[int(step.attributes["slot"])]}
    last = max(INPUTS.index(name) for name in given)
    return replace(step, inputs=tuple(given.get(name) for name in INPUTS[: last + 1]))


def _spread(tokens: NDArray[np.int32], longest: int) -> list[Batch]:
    """Chunks whose windows start at positions from 0 to the last possible one, most of them among the first."""
    starts = [round((longest - tokens.shape[1]) * (i / max(1, len(tokens) - 1)) ** 3) for i in range(len(tokens))]
    chunks, first = [], 0
    for batch in make_chunks(list(tokens)):
        sizes = np.diff(batch.cu_seqlens)
        begin = np.repeat(starts[first : first + len(sizes)], sizes).astype(np.int32)
        chunks.append(replace(batch, position_ids=batch.position_ids + begin))
        first += len(sizes)
    return chunks


def _measure(
    graph: LoweredGraph, chunks: Sequence[Batch], feeds_back: bool, threads: int, folder: Path, progress: Progress
) -> dict[int, _Moments]:
    """Moments of each slot, by its number."""
    found: dict[int, _Moments] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        activations = Activations(Path(scratch), len(chunks))
        interpreter = Interpreter(graph, chunks, Stored(graph), activations, threads)
        positions = [n for n, step in enumerate(interpreter.steps) if step.op == "paged_attention"]
        progress.step("measuring keys", positions[-1] if positions else 0, "steps")
        begin = 0
        for position in positions:
            interpreter.run(begin, position)
            progress.advance(position - begin)
            begin, step = position, interpreter.steps[position]
            slot = int(step.attributes["slot"])
            moments = found.setdefault(slot, _Moments(graph.kv_slots[slot], step.module, feeds_back))
            first = partial(moments.add_keys, chunks, float(step.attributes["scale"]))
            interpreter.visit(position, moments.add_queries if moments.queries else first)
        activations.clear()
    return found


@dataclass
class _Moments:
    """Sums over tokens of the keys and queries of a slot, and of their squares; keys times what they count.

    Where errors are fed back also those of the products of two dims of a query.
    """

    slot: KvSlot
    module: str
    feeds_back: bool
    queries: int = 0
    sums: dict[str, Floats64] = field(default_factory=dict)

    def add_keys(
        self, chunks: Sequence[Batch], scale: float, chunk: int, inputs: Sequence[NDArray[Any] | None]
    ) -> None:
        """The inputs of the attention that writes them, whose scores are ``scale`` times products."""
        q, keys = inputs[:2]
        assert q is not None and keys is not None, "attention has queries and keys"
        self.add_queries(chunk, inputs)
        keys, grouped = keys.astype(np.float64), self._grouped(q)
        for begin, end in pairwise(chunks[chunk].cu_seqlens):
            counts = _importance(grouped[begin:end], keys[begin:end], scale)
            self._add("k", keys[begin:end], counts)
            self.sums["n"] = self.sums.get("n", 0.0) + counts.sum(0)

    def add_queries(self, chunk: int, inputs: Sequence[NDArray[Any] | None]) -> None:
        """Of every attention that reads them."""
        q = inputs[0]
        assert q is not None, "attention has queries"
        grouped = self._grouped(q)
        self._add("q", grouped.transpose(0, 2, 1, 3).reshape(-1, self.slot.kv_heads, self.slot.key_dim))
        if self.feeds_back:
            rows = grouped.transpose(1, 0, 2, 3).reshape(self.slot.kv_heads, -1, self.slot.key_dim)
            with single_threaded():
                self.sums["qq"] = self.sums.get("qq", 0.0) + rows.transpose(0, 2, 1) @ rows
        self.queries += q.shape[0] * grouped.shape[2]

    def _grouped(self, q: NDArray[Any]) -> Floats64:
        """Queries [tokens, kv_heads, heads of each, dim]."""
        return q.astype(np.float64).reshape(len(q), self.slot.kv_heads, -1, self.slot.key_dim)

    def _add(self, name: str, x: Floats64, counts: Floats64 | None = None) -> None:
        weighted = x if counts is None else x * counts[..., None]
        for key, value in ((name, weighted.sum(0)), (name + "2", (weighted * x).sum(0))):
            if not np.isfinite(value).all():
                raise CompileError(f"{self.module}: keys or queries are not finite on the calibration text")
            self.sums[key] = self.sums.get(key, 0.0) + value

    def constants(self) -> dict[str, Floats]:
        """key_center, key_scale (see ``_scale``), and key_feedback where it is wanted."""
        exponents = FED_BACK_EXPONENTS if self.feeds_back else EXPONENTS
        scale = _scale(np.sqrt(self.sums["q2"] / self.queries), self._deviation(), exponents)
        made = {"key_center": self._mean().astype(np.float32), "key_scale": scale}
        if self.feeds_back:
            made["key_feedback"] = _feedback(self.sums["qq"], scale)
        return made

    def facts(self) -> dict[str, float]:
        """The share of the energy of keys that is in their means."""
        energy = float(self._of_keys("k2").sum())
        rest = float((self._deviation() ** 2).sum())
        return {"key_mean_share": round(1 - rest / energy, 4) if energy else 0.0}

    def _mean(self) -> Floats64:
        return self._of_keys("k")

    def _deviation(self) -> Floats64:
        return np.sqrt(np.maximum(self._of_keys("k2") - self._mean() ** 2, 0))

    def _of_keys(self, name: str) -> Floats64:
        """The mean of a sum."""
        return np.asarray(self.sums[name] / self.sums["n"][:, None])


def _importance(queries: Floats64, keys: Floats64, scale: float) -> Floats64:
    """What each key of a sequence counts [tokens, kv_heads]: the sum of a (1 - a) over the attention a that it gets.

    That is how much the outcome of a softmax feels a small change of its score. Sinks, softcaps, slopes and windows are
    left out.
    """
    tokens, heads, group, _ = queries.shape
    rows = np.unique(np.linspace(0, tokens - 1, min(tokens, SEEN_ROWS)).astype(np.int64))
    hidden = np.arange(tokens) > rows[:, None]
    counts = np.zeros((tokens, heads))
    with single_threaded(), np.errstate(invalid="ignore"):
        for head, member in product(range(heads), range(group)):
            scores = queries[rows, head, member] @ keys[:, head].T * scale
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            counts[:, head] += (scores * (1 - scores)).sum(0)
    return np.asarray(counts + LEAST_SHARE * counts.mean(0) + 1e-9)


def _scale(weight: Floats64, deviation: Floats64, exponents: tuple[float, float]) -> Floats:
    """Factors [kv_heads, dim] by which the noise of codes does least harm: weight^a / deviation^b.

    Rotated, all dims get the same noise, in proportion to sum (deviation * s)^2; it then counts as much as the sum of
    (weight / s)^2. The product of the two is least where s^2 is weight / deviation. Where errors are fed back, noise
    counts by the determinant of the moments of queries, which scales do not change, and it is least where the
    deviations are alike; between the two is what was found to be best.
    """
    least = 1e-6 * max(float(deviation.max()), float(weight.max()), 1e-30)
    s = np.maximum(weight, least) ** exponents[0] / np.maximum(deviation, least) ** exponents[1]
    s /= np.exp(np.log(s).mean(-1, keepdims=True))
    return np.clip(s, 1 / REACH, REACH).astype(np.float32)


def _feedback(moments: Floats64, scale: Floats) -> Floats:
    """What dims take of the error of one before them [kv_heads, dim, dim], of second moments of queries.

    For each head the inverse of the moments, of queries as they meet stored keys, is U^T U with U upper triangular.
    Row d of U over U[d, d] is what the dims from d on have to lose for an error of 1 of dim d, if that is to change
    scores least: GPTQ's (Frantar et al., 2022) way to round a row of weights.
    """
    dims = scale.shape[-1]
    turn, s = rotate(np.eye(dims, dtype=np.float32)).astype(np.float64), scale.astype(np.float64)
    made = np.empty(moments.shape, np.float32)
    with single_threaded():
        for head, turned in enumerate(turn @ (moments / s[:, :, None] / s[:, None, :]) @ turn):
            mean = float(np.diagonal(turned).mean()) or 1.0
            factor = np.linalg.cholesky(np.linalg.inv(turned + DAMPING * mean * np.eye(dims))).T
            made[head] = factor / np.diagonal(factor)[:, None]
    return np.triu(made)
