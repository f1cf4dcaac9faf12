"""`llmc verify`: every file as it was written, and the golden prompts with the numbers recorded at build."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError
from llmc.runtime import resources, selftest
from llmc.runtime.devices import open_device
from llmc.runtime.engine import Engine, load_engine
from llmc.runtime.fusing import fuse_gates
from llmc.runtime.safetensors_file import read_header
from llmc.runtime.selftest import Golden

if TYPE_CHECKING:
    from llmc.runtime.devices.cpu import CpuExecutor
    from llmc.runtime.devices.cuda.executor import CudaExecutor

RECORDED_ISA = "scalar"
"""The portable kernels, which golden prompts are recorded with: the same bits on every machine."""

TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""By dtype of the weights: distance of the logits on another instruction set, relative to their standard deviation.

Sums are rounded differently there, and activations then to 16 bits with 16-bit weights (bfloat16: 2**-9 each time).
"""

KV_TOLERANCES = {"float8_e4m3": 0.4, "int8": 0.1, "int4": 0.6}
"""By type of the KV cache, where that is more: what differs in a last bit before it is stored may get another code.

So two instruction sets are about as far apart as either is from a cache in bfloat16. A wrong number gives 1 or more.
"""


ROUNDED = ("int8", "fp8")
"""Ways to compute that round inputs to 8 bits: the smallest difference before can then be one of a whole step."""

ROUNDED_TOLERANCE = 1.0
"""For those. Numbers that have nothing to do with each other are further apart."""


@dataclass(frozen=True)
class Replay:
    """The golden prompts on one instruction set. ``error``: the largest relative distance of logits."""

    isa: str
    error: float
    tolerance: float
    equal_tokens: int
    tokens: int

    @property
    def passed(self) -> bool:
        """Recorded kernels give the same bits; others the same numbers within the tolerance."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Report:
    """What was checked."""

    engine: Engine
    replays: Sequence[Replay]
    prompts: int

    @property
    def passed(self) -> bool:
        """Whether all numbers are right."""
        return all(replay.passed for replay in self.replays)

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        files = self.engine.manifest.files
        return {
            "passed": self.passed,
            "digest": f"sha256:{self.engine.digest}",
            "files": len(files),
            "bytes": sum(entry.size for entry in files.values()),
            "prompts": self.prompts,
            "replays": [
                {
                    "isa": r.isa,
                    "passed": r.passed,
                    "error": r.error,
                    "tolerance": r.tolerance,
                    "equal_tokens": r.equal_tokens,
                    "tokens": r.tokens,
                }
                for r in self.replays
            ],
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        files = self.engine.manifest.files
        size = sum(entry.size for entry in files.values())
        yield f"digest  sha256:{self.engine.digest}"
        yield f"files   {len(files)} files, {size / 2**20:.1f} MiB: ok"
        for r in self.replays:
            exact = "bit-equal" if r.error == 0 else f"largest relative error {r.error:.2g} (limit {r.tolerance:.2g})"
            verdict = "ok" if r.passed else "WRONG"
            yield (
                f"numbers {self.prompts} prompts on {r.isa}: {exact}, {r.equal_tokens} of {r.tokens} tokens equal: "
                f"{verdict}"
            )


def verify_engine(path: Path, *, expect_digest: str | None = None, threads: int | None = None) -> Report:
    """Check the files and replay the prompts, with the kernels they were recorded with and with this machine's best.

    On a device: with those of the engine. The numbers they are compared with were recorded on a CPU.

    Raises:
        EngineError: a file is missing or damaged, or engine.json is not the expected one.
    """
    engine = load_engine(path, expect_digest=expect_digest)
    goldens = _goldens(engine)
    steps = max(len(golden.continuation) for golden in goldens)
    blocks = selftest.blocks_needed([golden.prompt for golden in goldens], engine.kv_cache.block_size, steps)
    replays = [
        _replay(engine, executor, goldens)
        for executor in _executors(engine, blocks, threads or resources.physical_cores())
    ]
    return Report(engine, replays, len(goldens))


def _executors(engine: Engine, blocks: int, threads: int) -> Iterator[CpuExecutor | CudaExecutor]:
    """Those that the prompts are replayed with, one after the other."""
    if (device := open_device(engine)) is not None:
        from llmc.runtime.devices.cuda.executor import CudaExecutor

        with closing(device):
            yield CudaExecutor(replace(engine, plan=fuse_gates(engine.plan)), device, num_blocks=blocks)
        return
    from llmc.plugins import kernels
    from llmc.runtime.devices.cpu import CpuExecutor

    for isa in dict.fromkeys([RECORDED_ISA, kernels.best_isa()]):
        yield CpuExecutor(engine, num_blocks=blocks, threads=threads, isa=isa)


def _replay(engine: Engine, executor: CpuExecutor | CudaExecutor, goldens: Sequence[Golden]) -> Replay:
    size = engine.kv_cache.block_size
    found = [selftest.record(executor, g.prompt, size, len(g.continuation)) for g in goldens]
    tolerance = max(TOLERANCES[engine.model.dtype], KV_TOLERANCES.get(engine.kv_cache.dtype, 0))
    if any(step.attributes.get("compute") in ROUNDED for step in engine.plan.steps):
        tolerance = max(tolerance, ROUNDED_TOLERANCE)
    return compare(executor.isa, goldens, found, 0.0 if executor.isa == RECORDED_ISA else tolerance)


def compare(isa: str, expected: Sequence[Golden], found: Sequence[Golden], tolerance: float) -> Replay:
    """The largest distance, over all prompts."""
    error, equal, total = 0.0, 0, 0
    for a, b in zip(expected, found, strict=True):
        if not np.array_equal(a.logits, b.logits):
            difference = float(np.sqrt(np.mean((a.logits.astype(np.float64) - b.logits) ** 2)))
            spread = float(a.logits.std(dtype=np.float64))
            error = max(error, difference / spread if np.isfinite(difference) and spread else float("inf"))
        equal += sum(x == y for x, y in zip(a.continuation, b.continuation, strict=True))
        total += len(a.continuation)
    return Replay(isa, error, tolerance, equal, total)


def _goldens(engine: Engine) -> list[Golden]:
    where = str(engine.path / selftest.NAME)
    content = engine.read(selftest.NAME)
    if content is None:
        raise EngineError(f"{where}: the engine has no golden prompts")
    arrays: dict[str, NDArray[Any]] = {}
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        header = read_header(file.fileno(), where)
    for tensor in header.tensors.values():
        data = content[tensor.begin : tensor.end]
        arrays[tensor.name] = np.frombuffer(data, np.dtype(tensor.dtype)).reshape(tensor.shape)
    return _checked(engine, arrays, where)


def _checked(engine: Engine, arrays: dict[str, NDArray[Any]], where: str) -> list[Golden]:
    try:
        goldens = selftest.from_arrays(arrays)
    except KeyError as problem:
        raise EngineError(f"{where}: there is no tensor {problem}") from None
    room = min(engine.limits.max_batch_tokens, engine.limits.max_seq_len)
    for golden in goldens:
        ids = (*golden.prompt, *golden.continuation)
        sized = len(golden.prompt) >= 1 and len(golden.continuation) >= 1 and len(ids) <= room
        if not sized or golden.logits.shape != (engine.model.vocab_size,):
            raise EngineError(f"{where}: a prompt of {len(golden.prompt)} tokens does not suit the engine")
        if any(not 0 <= i < engine.model.vocab_size for i in ids):
            raise EngineError(f"{where}: a token id is beyond the vocabulary")
    if not goldens:
        raise EngineError(f"{where}: there is no prompt")
    return goldens
