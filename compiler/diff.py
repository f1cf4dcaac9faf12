"""llmc diff: an engine beside its Hugging Face model, or beside another engine of it, module by module.

Names the first step that differs, and where a quantization does most damage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.errors import GateError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmc.runtime.engine import Engine

TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
"""Largest difference that passes, as a share of the largest number of the module's output, by the weights' dtype."""

RANKED = 10
"""Places that are shown of a quantized engine, which is not held to a tolerance unless one is given."""

LINEAR = ("linear", "quantized_linear")

DECODED = 2
"""So many of the last tokens are run one by one, after the others in one chunk."""


@dataclass(frozen=True)
class Difference:
    """One output of a plan step against what the module of that name computed in the model, or in the other engine."""

    step: int
    op: str
    module: str
    value: str
    phase: str
    """prefill or decode."""
    difference: float
    """Largest absolute difference."""
    magnitude: float
    """Largest absolute number of the reference."""
    share: float
    """Euclidean length of the difference as a share of that of the reference."""

    @property
    def relative(self) -> float:
        """The difference as a share of the magnitude."""
        return self.difference / max(self.magnitude, 1e-30)


@dataclass(frozen=True)
class Damage:
    """What a part of the model adds to the error of the sums that run through it (prefill)."""

    module: str
    """The module that was added to the sum."""
    share: float
    """Error of the sum afterwards, as a share of it."""
    added: float
    """So much more than before."""


def compare(engine: Engine, against: Path | str | Engine, ids: Sequence[int]) -> Iterator[Difference]:
    """Run a prompt through both, and yield each output that has a counterpart, in the order of the plan.

    All but the last DECODED tokens run as one chunk (prefill), those one by one (decode). A module has a counterpart
    where its output survives as a value of the plan: linears (merged ones as a whole), norms, embeddings, and the sums
    that norms read. Where a quantization has moved factors between weights, only sums and logits do.

    Args:
        engine: the one that is looked at.
        against: a model, or another engine of the same one.
        ids: the prompt.

    Raises:
        UsageError: the prompt is too short or too long for an engine, or the engines are of different models.
    """
    reference: _Reference = _Model(against, ids) if isinstance(against, Path | str) else _Other(against, ids, engine)
    rescaled = reference.rescaled or _is_rescaled(engine)
    from llmc.runtime.devices.cpu import CpuExecutor

    executor = CpuExecutor(engine, num_blocks=_blocks(engine, ids))
    for phase, begin, end in _runs(engine, ids):
        batch = _batch(ids, begin, end, _blocks(engine, ids))
        for number, step in enumerate(engine.plan.steps):
            counterparts = list(reference.outputs_of(step.op, step.module, len(step.outputs)))
            if rescaled and step.outputs[-1] != engine.plan.logits:
                counterparts = [found for found in counterparts if step.op == "add_norm" and found[0] == 0]
            if not counterparts:
                continue
            executor.run(batch, number + 1)
            for position, expected in counterparts:
                name = step.outputs[position]
                found = executor.read(name).reshape(end - begin, -1)
                if (rows := reference.matching(expected, found.shape[1], step.module)) is None:
                    continue
                rows = rows[begin:end]
                yield Difference(
                    step=number,
                    op=step.op,
                    module=step.module,
                    value=name,
                    phase=phase,
                    difference=float(abs(found - rows).max()),
                    magnitude=float(abs(rows).max()),
                    share=_length(found - rows) / max(_length(rows), 1e-30),
                )
        executor.run(batch)


def rank(engine: Engine, differences: Sequence[Difference]) -> list[Damage]:
    """The parts of the model by the error that they add, the worst first."""
    makers = {name: number for number, step in enumerate(engine.plan.steps) for name in step.outputs}
    result, before = [], 0.0
    for d in differences:
        step = engine.plan.steps[d.step]
        if d.phase == "prefill" and step.op == "add_norm" and d.value == step.outputs[0]:
            names = [str(name).partition(":")[0] for name in step.inputs[:2]]  # of a view, what it looks at
            made = [makers[name] for name in names if name in makers]
            new = [number for number in made if engine.plan.steps[number].op not in ("add_norm", "gather")]
            module = engine.plan.steps[max(new or made, default=d.step)].module
            result.append(Damage(module, d.share, d.share - before))
            before = d.share
    return sorted(result, key=lambda damage: -damage.added)


def _is_rescaled(engine: Engine) -> bool:
    """Whether factors were moved from inputs into weights, so that values in between are not those of the model."""
    report = json.loads(engine.read("report.json") or b"{}")
    return any("scales" in weight for weight in report.get("quantization", {}).get("weights", ()))


def _runs(engine: Engine, ids: Sequence[int]) -> list[tuple[str, int, int]]:
    """Phases with their tokens. Raises UsageError."""
    limit = min(engine.limits.max_seq_len, engine.limits.max_batch_tokens)
    if not DECODED < len(ids) <= limit:
        raise UsageError(f"the prompt has {len(ids)} tokens; expected {DECODED + 1} to {limit}")
    decoded = range(len(ids) - DECODED, len(ids))
    return [("prefill", 0, len(ids) - DECODED), *(("decode", start, start + 1) for start in decoded)]


def _blocks(engine: Engine, ids: Sequence[int]) -> int:
    return -(-len(ids) // engine.kv_cache.block_size)


def _length(values: NDArray[np.float32]) -> float:
    return float(sum((values.astype("float64") ** 2).sum(1)) ** 0.5)


def _batch(ids: Sequence[int], begin: int, end: int, blocks: int) -> Any:
    import numpy as np

    from llmc.runtime.batch import Batch

    count = end - begin
    return Batch(
        input_ids=np.array(ids[begin:end], np.int32),
        position_ids=np.arange(begin, end, dtype=np.int32),
        logit_rows=np.arange(count, dtype=np.int32),
        cu_seqlens=np.array([0, count], np.int32),
        num_computed=np.array([begin], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
    )


class _Reference:
    """What modules read and wrote: [tokens, width] by module path."""

    rescaled = False
    """Whether factors were moved between weights."""

    def __init__(self) -> None:
        self._read: dict[str, NDArray[np.float32]] = {}
        self._wrote: dict[str, NDArray[np.float32]] = {}
        self._linears: set[str] = set()

    def outputs_of(self, op: str, module: str, count: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(output of the step, what the module has for it)."""
        if op == "add_norm" and module in self._read:
            yield 0, self._read[module]
        if op in (*LINEAR, "norm", "add_norm", "embedding") and module in self._wrote:
            yield count - 1, self._wrote[module]

    def matching(self, first: NDArray[np.float32], width: int, module: str) -> NDArray[np.float32] | None:
        """The reference of that width: the module's own output, or for a merged linear those of it and its siblings."""
        if first.shape[1] == width:
            return first
        import numpy as np

        parent = module.rsplit(".", 1)[0]
        siblings = [path for path in self._wrote if path in self._linears and path.rsplit(".", 1)[0] == parent]
        if module not in siblings:
            return None
        parts: list[NDArray[np.float32]] = []
        for path in siblings[siblings.index(module) :]:
            parts.append(self._wrote[path])
            if sum(part.shape[1] for part in parts) == width:
                return np.concatenate(parts, 1)
        return None


class _Model(_Reference):
    """Modules without children in transformers, in float32."""

    def __init__(self, model: Path | str, ids: Sequence[int]) -> None:
        super().__init__()
        import torch

        from llmc.compiler.checkpoint import Checkpoint
        from llmc.compiler.evaluation.source_model import load_model

        module = load_model(Checkpoint.open(model))
        for path, part in module.named_modules():
            if not list(part.children()):
                part.register_forward_hook(self._hook(path, len(ids)))
            if getattr(getattr(part, "weight", None), "ndim", 0) == 2:
                self._linears.add(path)
        with torch.no_grad():
            module(input_ids=torch.tensor([list(ids)]), use_cache=False)

    def _hook(self, path: str, tokens: int) -> Any:
        import torch

        def keep(target: dict[str, Any], value: Any) -> None:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() % tokens == 0:
                target[path] = value.detach().float().reshape(tokens, -1).numpy().copy()

        def hook(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
            keep(self._read, inputs[0] if inputs else None)
            keep(self._wrote, output)

        return hook


class _Other(_Reference):
    """The same steps of another engine."""

    def __init__(self, other: Engine, ids: Sequence[int], engine: Engine) -> None:
        super().__init__()
        import numpy as np

        from llmc.runtime.devices.cpu import CpuExecutor

        one, two = (e.plan.value(e.plan.logits).shape[1].constant for e in (engine, other))
        if engine.model.architecture != other.model.architecture or one != two:
            raise UsageError(
                f"{engine.path} is of {engine.model.architecture} with {one} tokens, {other.path} of "
                f"{other.model.architecture} with {two}: they are not engines of one model"
            )
        self.rescaled = _is_rescaled(other)
        executor = CpuExecutor(other, num_blocks=_blocks(other, ids))
        read: dict[str, list[NDArray[np.float32]]] = {}
        wrote: dict[str, list[NDArray[np.float32]]] = {}
        for _, begin, end in _runs(other, ids):
            batch = _batch(ids, begin, end, _blocks(other, ids))
            for number, step in enumerate(other.plan.steps):
                if step.op not in (*LINEAR, "norm", "add_norm", "embedding"):
                    continue
                self._linears |= {step.module} if step.op in LINEAR else set()
                executor.run(batch, number + 1)
                for kept, position in ((read, 0), (wrote, -1)):
                    if kept is wrote or step.op == "add_norm":
                        value = executor.read(step.outputs[position]).reshape(end - begin, -1).copy()
                        kept.setdefault(step.module, []).append(value)
            executor.run(batch)
        for target, found in ((self._read, read), (self._wrote, wrote)):
            for module, parts in found.items():
                rows = sum(len(part) for part in parts)
                if rows == len(ids):  # a module that several steps are of has no one output
                    target[module] = np.concatenate(parts)


def report(differences: Sequence[Difference], ranking: Sequence[Damage], tolerance: float | None) -> Mapping[str, Any]:
    """What is printed as JSON. ``tolerance`` None: nothing counts as different."""
    first = None if tolerance is None else next((d for d in differences if not d.relative <= tolerance), None)
    return {
        "tolerance": tolerance,
        "ranking": [asdict(damage) for damage in ranking],
        "compared": [asdict(d) | {"relative": d.relative} for d in differences],
        "first_difference": None if first is None else asdict(first) | {"relative": first.relative},
    }


@click.command()
@click.argument("engine_dir", metavar="ENGINE", type=click.Path(path_type=Path))
@click.argument("against", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", default="The quick brown fox jumps over the lazy dog", show_default=True)
@click.option("--ids", help="Token ids instead of a text, separated by commas.")
@click.option(
    "--tolerance", type=float, help="Of the largest number of each output. [default: by dtype; quantized: none]"
)
@click.option("--rank", "ranked", type=click.IntRange(0), help="Show where most error is added. [quantized: 10 places]")
@click.option("--all", "show_all", is_flag=True, help="Print every comparison, not the worst of each phase only.")
@click.option("--json", "as_json", is_flag=True, help="Print every comparison as JSON.")
def diff(
    engine_dir: Path,
    against: Path,
    prompt: str,
    ids: str | None,
    tolerance: float | None,
    ranked: int | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Compare an engine with the Hugging Face model that it was built from, or with another engine of that model.

    Module by module, in float32; AGAINST is a model directory, a GGUF file or an engine.

    Exit status 3 if they differ; the first step that does is named. A quantized engine always differs: the parts that
    add most error are shown.
    """
    from llmc.runtime import manifest
    from llmc.runtime.engine import load_engine

    engine = load_engine(engine_dir).for_cpu()
    other = load_engine(against).for_cpu() if (against / manifest.NAME).exists() else None
    dtypes = {engine.model.dtype} if other is None else {engine.model.dtype, other.model.dtype}
    is_quantized = any(e.model.quantization for e in (engine, other) if e is not None)
    if tolerance is None and not is_quantized:
        tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    found = list(compare(engine, against if other is None else other, _token_ids(engine, prompt, ids)))
    ranking = rank(engine, found)
    result = report(found, ranking, tolerance)
    if as_json:
        json.dump(result, sys.stdout, indent=1)
        click.echo()
    else:
        _print(found, tolerance, show_all)
        _print_ranking(ranking[: ranked if ranked is not None else RANKED if is_quantized else 0])
    if first := result["first_difference"]:
        raise GateError(
            f"step {first['step']}, llmc::{first['op']} of {first['module']} ({first['phase']}): differs by "
            f"{first['difference']:.3g}, {first['relative']:.2g} of the largest number; tolerance {tolerance:g}"
        )


def _token_ids(engine: Engine, prompt: str, ids: str | None) -> list[int]:
    if ids is None:
        from tokenizers import Tokenizer

        return list(Tokenizer.from_str(engine.tokenizer_json).encode(prompt).ids)
    try:
        return [int(part) for part in ids.split(",")]
    except ValueError:
        raise UsageError(f"--ids {ids}: expected numbers separated by commas") from None


def _print(found: Sequence[Difference], tolerance: float | None, show_all: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    limit = "no tolerance" if tolerance is None else f"tolerance {tolerance:g}"
    table = Table(title=f"{len(found)} outputs compared, {limit}")
    for column in ("phase", "step", "op", "module", "difference", "largest", "relative"):
        table.add_column(column, overflow="fold")
    shown = (
        found
        if show_all
        else [max(part, key=lambda d: d.relative) for p in ("prefill", "decode") if (part := _of(found, p))]
    )
    for d in shown:
        cells = (d.phase, str(d.step), d.op, d.module, f"{d.difference:.3g}", f"{d.magnitude:.3g}", f"{d.relative:.2g}")
        table.add_row(
            *map(escape, cells), style="red" if tolerance is not None and not d.relative <= tolerance else None
        )
    Console().print(table)


def _print_ranking(ranking: Sequence[Damage]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if not ranking:
        return
    table = Table(title="where most error is added")
    for column in ("module", "error added", "error then"):
        table.add_column(column, overflow="fold", justify="left" if column == "module" else "right")
    for damage in ranking:
        table.add_row(escape(damage.module), f"{damage.added * 100:+.3g} %", f"{damage.share * 100:.3g} %")
    Console().print(table)


def _of(found: Sequence[Difference], phase: str) -> list[Difference]:
    return [d for d in found if d.phase == phase]
