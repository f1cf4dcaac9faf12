r"""Measure llmc beside its peers: the same weights, workloads and threads, interleaved (A B A B ...), as ratios.

    python build_scripts/bench_peers.py --work /tmp/peers --models smol135m --formats int4,bf16 --rounds 5 \
        --json result.json --plot result.svg

Makes what it needs in the work folder, each peer in an environment of its own. Run it with the Python of an
environment that has llmc[build]. Prints the median and the spread (minimum to maximum) of each figure, and of llmc's
ratio to the best peer in each round. A peer that can't be installed, converted or run is reported, with the reason.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from peers import kinds, synthetic
from peers.workloads import FRESH, MODELS, WORKLOADS

MOST_PEERS = {kind.name: kind for kind in kinds.PEERS}


class Worker:
    """A peer in a process group of its own, stopped while another one is measured: vLLM's workers spin as they wait."""

    def __init__(self, kind: kinds.Kind, python: Path, model: Path, threads: int, vocabulary: int) -> None:
        self.name, self.model, self.vocabulary = kind.name, model, vocabulary
        # -P: in a clone's root, llmc/ is not the package that is installed
        self.command = [str(python), "-P", "-m", f"peers.{kind.script}", str(model), str(threads)]
        self.process: subprocess.Popen[str] | None = None

    def measure(self, workload: str) -> float:
        """The figure, in the unit of the workload. Raises PeerError if the process ends."""
        if workload in FRESH:
            self.close()
        start = time.perf_counter()
        if self.process is None:
            environment = {**os.environ, "PYTHONPATH": str(kinds.HERE)}
            errors = self.model.with_name(self.model.name + ".log").open("w")
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen(self.command, text=True, env=environment, process_group=0, **pipes)
        else:
            os.killpg(self.process.pid, signal.SIGCONT)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{workload} {self.vocabulary}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        seconds = time.perf_counter() - start
        if not line:
            self.close()
            raise kinds.PeerError(f"it ended during {workload}, see {self.model}.log")
        if workload in FRESH:
            self.close()
        else:
            os.killpg(self.process.pid, signal.SIGSTOP)
        return seconds if workload == "load" else float(json.loads(line))

    def close(self) -> None:
        """End all its processes."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # they have ended by themselves
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None


def prepare(
    names: list[str], model: str, form: str, work: Path, threads: int, failures: dict[str, str]
) -> dict[str, Worker]:
    """A worker for each peer that has the format; what fails is put into ``failures``."""
    directory, _ = synthetic.write(model, work)
    workers = {}
    for kind in (kinds.LLMC, *(MOST_PEERS[name] for name in names)):
        if form not in kind.formats:
            continue
        try:
            python, path = kind.install(work), kind.convert(directory, form, work)
        except kinds.PeerError as error:
            if kind is kinds.LLMC:
                raise click.ClickException(str(error)) from error
            failures[f"{kind.name} {model} {form}"] = str(error)
        else:
            workers[kind.name] = Worker(kind, python, path, threads, MODELS[model].vocabulary)
    return workers


def measure(
    workers: dict[str, Worker], workloads: list[str], rounds: int, title: str, failures: dict[str, str]
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Each workload with {peer or "load average": a figure for each round}; what fails is put into ``failures``."""
    with Progress(transient=True) as progress, contextlib.ExitStack() as ending:
        for worker in workers.values():
            ending.callback(worker.close)
        task = progress.add_task(title, total=len(workloads) * (rounds + 1))
        for workload in workloads:
            row: dict[str, list[float]] = {peer: [] for peer in (*workers, "load average")}
            for turn in range(rounds + 1):  # the first turn warms up
                for peer, worker in workers.items():
                    key = f"{peer} {title} {workload}"
                    if key in failures:
                        continue
                    try:
                        figure = worker.measure(workload)
                    except kinds.PeerError as error:
                        failures[key] = str(error)
                        row[peer] = []
                    else:
                        row[peer] += [figure] if turn else []
                row["load average"] += [os.getloadavg()[0]] if turn else []
                progress.advance(task)
            yield workload, row


def best_peer(workload: str, row: dict[str, list[float]]) -> str | None:
    """The peer with the best median."""
    medians = {
        peer: statistics.median(values)
        for peer, values in row.items()
        if peer not in ("llmc", "load average") and values
    }
    if not medians:
        return None
    return (min if workload in FRESH else max)(medians, key=medians.__getitem__)


def ratios(workload: str, row: dict[str, list[float]]) -> list[float]:
    """How many times better llmc is than the best peer, in each round."""
    peer = best_peer(workload, row)
    if peer is None or not row["llmc"]:
        return []
    pairs = zip(row["llmc"], row[peer], strict=True)
    return [b / a if workload in FRESH else a / b for a, b in pairs]


def spread(values: list[float], digits: int) -> str:
    """Median (minimum to maximum)."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def report(results: dict[str, dict[str, Any]], failures: dict[str, str]) -> None:
    """Print the tables."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for model, formats in results.items():
        for form, figures in formats.items():
            peers = [peer for peer in next(iter(figures.values())) if peer != "load average"]
            table = Table(title=f"{model}, {form}: median (min-max)")
            for column in ("workload", "unit", *peers, "llmc / best peer", "load average"):
                table.add_column(column)
            for workload, row in figures.items():
                digits = 2 if workload == "load" else 0
                cells = [spread(row[peer], digits) for peer in peers]
                load = f"{statistics.median(row['load average']):.1f}"
                table.add_row(workload, WORKLOADS[workload], *cells, spread(ratios(workload, row), 2), load)
            console.print(table)
    for kind in (kinds.LLMC, *kinds.PEERS):
        console.print(f"{kind.name}: " + "; ".join(f"{ours} = {theirs}" for ours, theirs in kind.formats.items()))
    for what, why in failures.items():
        console.print(f"FAILED {what}: {why}", style="red", markup=False)


def choices(known: Any) -> Any:
    """A callback for comma-separated names."""

    def split(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in known]:
            raise click.BadParameter(f"{', '.join(unknown)}: unknown; known: {', '.join(known)}")
        return names

    return split


def option(name: str, known: Any, default: str) -> Any:
    """An option that takes several names."""
    return click.option(
        name, callback=choices(known), default=default, show_default=True, help=f"Of {', '.join(known)}."
    )


@click.command()
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for models and environments.",
)
@option("--models", MODELS, "smol135m,qwen05b")
@option("--formats", kinds.LLMC.formats, "int4,int8,bf16")
@option("--peers", MOST_PEERS, ",".join(MOST_PEERS))
@option("--workloads", WORKLOADS, ",".join(WORKLOADS))
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all figures to this file.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Also write a bar chart, .svg or .png.")
def main(
    work: Path,
    models: list[str],
    formats: list[str],
    peers: list[str],
    workloads: list[str],
    threads: int,
    rounds: int,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure llmc beside llama.cpp, OpenVINO GenAI and ONNX Runtime GenAI."""
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for model in models:
        for form in formats:
            workers = prepare(peers, model, form, work, threads, failures)
            figures = results.setdefault(model, {}).setdefault(form, {})
            for workload, row in measure(workers, workloads, rounds, f"{model} {form}", failures):
                figures[workload] = row
                if json_file:
                    found = {"figures": results, "failures": failures, "units": WORKLOADS}
                    json_file.write_text(json.dumps(found, indent=1))
    report(results, failures)
    if plot_file:
        python = kinds.environment(work / "venv-plot", "matplotlib", ("matplotlib>=3.9,<4",))
        data = work / "plot.json"
        data.write_text(json.dumps({"figures": results, "units": WORKLOADS}))
        kinds.run([python, kinds.HERE / "peers/plot.py", data, plot_file])


if __name__ == "__main__":
    main()
