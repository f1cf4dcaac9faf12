"""Measure llmc beside its peers: the same weights, workloads and threads, interleaved (A B A B ...), as ratios.

    python build_scripts/bench_peers.py --work /tmp/peers --models smol135m --rounds 5 --json result.json

Makes what it needs in the work folder, each peer in an environment of its own. Run it with the Python of an
environment that has llmc[build]. Prints the median and the spread (minimum to maximum) of each figure and of the ratio
of each round.
"""

import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from peers import synthetic
from peers.workloads import MODELS, WORKLOADS

HERE = Path(__file__).parent


class Worker:
    """A peer in its own process; it sleeps while another one is measured."""

    def __init__(self, python: Path | str, script: str, model: Path, threads: int) -> None:
        command = [str(python), "-m", f"peers.{script}", str(model), str(threads)]
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def measure(self, workload: str) -> float:
        """Tokens a second."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException(f"{self.process.args} ended during {workload}")
        return float(json.loads(line))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def llama_cpp_python(work: Path) -> Path:
    """The Python of an environment with llama-cpp-python, built for this machine."""
    folder = work / "venv-llama-cpp"
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
        subprocess.run([python, "-m", "pip", "install", "-q", "llama-cpp-python", "numpy"], env=environment, check=True)
    return python


def build_engine(model: Path, engine: Path) -> None:
    """`llmc build` with the command's defaults."""
    if not engine.exists():
        subprocess.run([sys.executable, "-m", "llmc", "build", str(model), "-o", str(engine)], check=True)


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Folder for models and environments.")
@click.option("--models", default="smol135m,qwen05b", show_default=True, help=f"Of {', '.join(MODELS)}.")
@click.option("--workloads", default=",".join(WORKLOADS), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all figures to this file.")
def main(work: Path, models: str, workloads: str, threads: int, rounds: int, json_file: Path | None) -> None:
    """Measure llmc beside llama.cpp in bfloat16."""
    work.mkdir(parents=True, exist_ok=True)
    peer_python = llama_cpp_python(work)
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in models.split(","):
        directory, gguf_file = synthetic.write(name, work)
        engine = work / f"{name}.engine"
        build_engine(directory, engine)
        workers = {
            "llmc": Worker(sys.executable, "llmc_peer", engine, threads),
            "llama.cpp": Worker(peer_python, "llama_cpp_peer", gguf_file, threads),
        }
        figures = results[name] = {w: {peer: [] for peer in (*workers, "load")} for w in workloads.split(",")}
        with Progress(transient=True) as progress:
            task = progress.add_task(name, total=len(figures) * (rounds + 1))
            for workload, row in figures.items():
                for turn in range(rounds + 1):  # the first turn warms up
                    for peer, worker in workers.items():
                        figure = worker.measure(workload)
                        if turn:
                            row[peer].append(figure)
                    if turn:
                        row["load"].append(os.getloadavg()[0])
                    progress.advance(task)
        for worker in workers.values():
            worker.close()
    report(results)
    if json_file:
        json_file.write_text(json.dumps(results, indent=1))


def spread(values: list[float], digits: int) -> str:
    """Median (minimum to maximum)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def report(results: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    """Print the table."""
    table = Table(title="tokens/s, median (min-max)")
    for column in ("model", "workload", "llmc", "llama.cpp", "ratio", "load"):
        table.add_column(column)
    for model, figures in results.items():
        for workload, row in figures.items():
            ratios = [a / b for a, b in zip(row["llmc"], row["llama.cpp"], strict=True)]
            cells = [spread(row[peer], 0) for peer in ("llmc", "llama.cpp")]
            table.add_row(model, workload, *cells, spread(ratios, 2), f"{statistics.median(row['load']):.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
