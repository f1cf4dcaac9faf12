"""`llmc bench`: how fast an engine reads prompts, writes tokens and serves a mixed batch; what the machine allows."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.errors import UsageError
from llmc.runtime.cli import SPECULATION, load, options

if TYPE_CHECKING:
    from rich.table import Table

    from llmc.runtime.llm import LLM

BATCH16 = (
    *((430, 128), (91, 17), (78, 249), (512, 222), (330, 24), (375, 193), (74, 41), (424, 106)),
    *((153, 20), (47, 217), (40, 104), (363, 175), (279, 173), (269, 54), (78, 62), (397, 45)),
)
"""(prompt, generated) tokens of 16 requests that are submitted at once."""

NEW_TOKENS = 128
LOAD_PROMPT = 16

WORKLOADS = {
    "prefill512": "prompt tokens/s until the first token, prompt of 512",
    "prefill2048": "the same, prompt of 2,048",
    "decode128": "tokens/s of one sequence, 128 new ones after a prompt of 128",
    "decode2048": "the same after a prompt of 2,048",
    "batch16": "generated tokens/s of 16 requests submitted at once: 3,940 prompt and 1,830 generated tokens",
    "load": "seconds from the start of a process to the first token of a 16-token prompt",
}


@dataclass(frozen=True)
class Figure:
    """One workload: a value for each round."""

    workload: str
    unit: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "unit": self.unit}


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), help="[default: all]")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of all workloads, interleaved.")
@click.option("--ceilings", is_flag=True, help="Measure memory bandwidth and arithmetic of this machine beside them.")
@click.option("--profile", is_flag=True, help="Share of each op, against the bytes and operations that it needs.")
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores available]")
@click.option("--isa", help="Instruction set. [default: the best of this machine]")
@click.option("--max-batch-tokens", type=click.IntRange(1), help="Tokens of a step. [default: the engine's]")
@options(SPECULATION)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def bench(  # long: one parameter for each option
    engine: Path,
    names: tuple[str, ...],
    rounds: int,
    ceilings: bool,
    profile: bool,
    threads: int | None,
    isa: str | None,
    max_batch_tokens: int | None,
    spec: str,
    spec_tokens: int | None,
    spec_sampling: str,
    as_json: bool,
) -> None:
    """Measure prefill, decode and mixed batches of an engine.

    Token ids in, token ids out, greedy, no early stop. Machines are noisy: compare ratios of figures from one run only.
    """
    # Rounds repeat their prompts, so they must not find what the first one has computed.
    sizes: dict[str, Any] = {"threads": threads, "isa": isa, "max_batch_tokens": max_batch_tokens}
    drafts: dict[str, Any] = {"spec": spec, "spec_tokens": spec_tokens, "spec_sampling": spec_sampling}
    llm = load(engine, prefix_cache=False, **drafts, **sizes)
    wanted = names or tuple(WORKLOADS)
    fitting = [name for name in wanted if longest(name) <= llm.scheduler.config.context]
    if not fitting:
        raise UsageError(f"no workload fits the engine's context of {llm.scheduler.config.context} tokens")
    skipped = {name: f"needs a context of {longest(name)} tokens" for name in wanted if name not in fitting}
    loads = [os.getloadavg()[0]]
    run(llm, [(prompt(LOAD_PROMPT, llm.vocab_size), 2)])  # first touch of weights and memory
    limits: dict[str, list[float]] = {}
    peak = 0
    values: dict[str, list[float]] = {name: [] for name in fitting}
    for number in range(rounds):
        for name in fitting:
            if sys.stderr.isatty():
                click.echo(f"\rround {number + 1} of {rounds}: {name:<12}", nl=False, err=True)
            values[name].append(load_time(engine, llm.threads) if name == "load" else measure(llm, name))
        if number == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # without the memory of the next line
        for name, value in measure_ceilings(llm.threads).items() if ceilings else ():
            limits.setdefault(name, []).append(value)
    if sys.stderr.isatty():
        click.echo("\r" + " " * 40 + "\r", nl=False, err=True)
    loads.append(os.getloadavg()[0])
    report = {
        "engine": str(engine),
        "digest": f"sha256:{llm.engine.digest}" if llm.engine else "",
        "isa": getattr(llm.executor, "isa", "reference"),
        "threads": llm.threads,
        "rounds": rounds,
        "load_average": loads,
        "peak_rss_bytes": peak,
        "weight_bytes": llm.engine.weight_bytes if llm.engine else 0,
        "figures": {name: Figure(name, unit(name), v).to_json() for name, v in values.items()},
        "skipped": skipped,
    }
    if (speculator := llm.scheduler.speculator) is not None:
        report["speculation"] = speculator.acceptance.to_json() | {"summary": speculator.acceptance.line()}
    if profile:
        report["profile"] = {name: measure_profile(llm, name) for name in fitting if name != "load"}
    if ceilings:
        report["ceilings"] = {name: Figure(name, unit(name), v).to_json() for name, v in limits.items()}
    click.echo(json.dumps(report, indent=1)) if as_json else _print(report)


def prompt(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Token ids that stand in for a text."""
    offset = 280 if vocabulary > 1000 else 3
    return [(seed * 7919 + i * 104729 + 17) % (vocabulary - offset - 20) + offset for i in range(length)]


def longest(name: str) -> int:
    """Tokens of context that a workload needs."""
    if name == "batch16":
        return max(a + b for a, b in BATCH16)
    if name == "load":
        return LOAD_PROMPT + 1
    length = int(name.removeprefix("prefill").removeprefix("decode"))
    return length + (NEW_TOKENS if name.startswith("decode") else 1)


def unit(name: str) -> str:
    """Of a workload or ceiling."""
    units = {"load": "s", "read_bandwidth": "GB/s", "int8": "GOP/s", "amx_int8": "GOP/s"}
    return units.get(name, "tokens/s" if name in WORKLOADS else "GFLOP/s")


def measure(llm: LLM, name: str) -> float:
    """One round of a workload; see WORKLOADS for what is returned."""
    vocabulary = llm.vocab_size
    start = time.perf_counter()
    if name == "batch16":
        times = run(llm, [(prompt(length, vocabulary, i), new) for i, (length, new) in enumerate(BATCH16)])
        return sum(new for _, new in BATCH16) / (max(t[-1] for t in times) - start)
    length = int(name.removeprefix("prefill").removeprefix("decode"))
    new = 1 if name.startswith("prefill") else NEW_TOKENS
    (stamps,) = run(llm, [(prompt(length, vocabulary), new)])
    if new == 1:
        return length / (stamps[0] - start)
    return (new - 1) / (stamps[-1] - stamps[0])


def run(llm: LLM, requests: Sequence[tuple[list[int], int]]) -> list[list[float]]:
    """Generate so many tokens after each prompt, all in flight; when each token came."""
    from llmc.runtime.request import SamplingParams

    stamps: dict[int, list[float]] = {}
    for ids, new in requests:
        stamps[llm.add_request(ids, SamplingParams(max_tokens=new, ignore_eos=True))] = []
    while llm.has_unfinished:
        deltas = llm.step()
        now = time.perf_counter()
        for delta in deltas:
            stamps[delta.request_id] += [now] * len(delta.token_ids)
    return list(stamps.values())


def load_time(engine: Path, threads: int) -> float:
    """Start another process and wait for its first token."""
    code = (
        "import sys\nfrom llmc.runtime import bench\nfrom llmc.runtime.llm import LLM\n"
        "llm = LLM(sys.argv[1], threads=int(sys.argv[2]))\n"
        f"bench.run(llm, [(bench.prompt({LOAD_PROMPT}, llm.vocab_size), 1)])\nprint('x', flush=True)"
    )
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(engine), str(threads)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None, "there is a pipe"
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if not line:
        raise UsageError(f"{engine}: another process can't run it")
    return seconds


def measure_ceilings(threads: int) -> dict[str, float]:
    """What the machine can do, in units of 10**9: bytes read, and operations of the instructions that it has."""
    from llmc.plugins import kernels
    from llmc.runtime import resources

    return kernels.ceilings(threads, min(1 << 31, resources.available_memory() // 4))


def measure_profile(llm: LLM, name: str) -> dict[str, Any]:
    """One more round of a workload, op by op; of decode workloads without the prompt."""
    from llmc.runtime.devices.cpu import CpuExecutor
    from llmc.runtime.profiling import Profile

    executor = llm.executor
    if not isinstance(executor, CpuExecutor) or llm.engine is None:
        raise UsageError("--profile: only engines for the CPU tell when their steps ran")
    watch = Profile(
        executor.plan,
        llm.engine.kv_cache.dtype,
        measure_ceilings(llm.threads),
        decodes_only=name.startswith("decode"),
    )
    executor.observe(watch)
    try:
        measure(llm, name)
    finally:
        executor.forget(watch)
    return watch.to_json()


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading, justify in (
        ("workload", "left"),
        ("median", "right"),
        ("min", "right"),
        ("max", "right"),
        ("", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    form: Callable[[float], str] = lambda v: f"{v:.1f}" if v >= 10 else f"{v:.2f}"  # noqa: E731
    for name, f in {**report["figures"], **report.get("ceilings", {})}.items():
        table.add_row(name, form(f["median"]), form(f["min"]), form(f["max"]), f["unit"])
    for name, reason in report["skipped"].items():
        table.add_row(name, "-", "", "", reason)
    console = Console()
    console.print(table)
    for name, found in report.get("profile", {}).items():
        console.print(_profile_table(name, found))
    if "speculation" in report:
        console.print(report["speculation"]["summary"], highlight=False)
    load = ", ".join(f"{v:.1f}" for v in report["load_average"])
    console.print(
        f"{report['isa']}, {report['threads']} threads, {report['rounds']} rounds, load average {load}, "
        f"peak memory {report['peak_rss_bytes'] / 2**20:.0f} MiB",
        highlight=False,
    )


def _profile_table(name: str, found: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=name, box=None, header_style="bold", title_justify="left")
    table.add_column("op")
    for heading in ("share", "each", "GB/s", "GOP/s", "of roofline"):
        table.add_column(heading, justify="right")
    for op, f in found["ops"].items():
        work = f["gigabytes_per_second"], f["giga_operations_per_second"]
        each = f"{f['seconds'] / f['steps'] * 1e6:.1f} us"
        table.add_row(op, f"{f['share']:.1%}", each, *(f"{v:.1f}" for v in work), f"{f['of_roofline']:.0%}")
    table.add_row("outside the plan", f"{found['outside']:.1%}")
    if (steps := found["decodes"]) is not None:
        name = f"the same, {steps['sequences']} sequences that decode"
        table.add_row(name, f"{steps['outside']:.1%}", f"{steps['seconds'] * steps['outside'] * 1e6:.1f} us")
    table.add_row("all", "", "", "", "", f"{found['of_roofline']:.0%}")
    return table
