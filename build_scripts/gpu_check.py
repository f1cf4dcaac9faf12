#!/usr/bin/env python3
"""Checks everything for CUDA on the GPU of this machine; see `check` below. No other file has to be prepared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests/cuda"
PAGE = ROOT / "docs/cuda.md"
CONTRACT = (
    "test_small_ops.py",
    "test_products.py",
    "test_product_ops.py",
    "test_attention_cuda.py",
    "test_sampling_cuda.py",
)
HOPPER = ("test_wgmma.py",)
"""Of kernels that run on compute capability 9.0 alone."""
QUICK = ("test_small_ops.py", "test_attention_cuda.py::test_head_sizes", "test_products.py::test_linear")
PARITY = (
    "test_executor.py::test_a_llama_gives_the_numbers_of_transformers",
    "test_executor.py::test_the_driver_gives_the_tokens_of_transformers",
)
SANITIZED = (
    "test_small_ops.py::test_agrees_with_the_reference[softmax]",
    "test_small_ops.py::test_agrees_with_the_reference[topk]",
    "test_products.py::test_linear[bfloat16]",
    "test_attention_cuda.py::test_head_sizes[heads1-bfloat16]",
)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECTIONS = ("contract", "parity", "sanitizer", "bench")
FIGURES = 20  # 11 on GPUs that are no Hopper
NO_GPU = 3
LOST = 9  # of gpu.py: the process can't use the device any more
MARK = "<!-- verified: written by build_scripts/gpu_check.py --record -->"

Report = dict[str, Any]


def environment(record: Path) -> dict[str, str]:
    """For processes that run tests on the device."""
    paths = [str(TESTS), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "GPU_RECORD": str(record)}
    return os.environ | variables | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those of others take seconds to import


def pytest_command(tests: Sequence[str]) -> list[str]:
    """Runs tests on the device. Ids of tests are relative to the root."""
    options = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-q", "-p", "gpu", "-p", "no:cacheprovider"]
    return [sys.executable, "-P", "-m", "pytest", *options, *tests]


def collect(tests: Sequence[str]) -> list[str]:
    """The ids of tests, for each file or test below tests/cuda.

    Raises:
        click.ClickException: they can't be collected; with what pytest says.
    """
    command = [*pytest_command([str(TESTS / test) for test in tests]), "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, env=environment(Path(os.devnull)), capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"the tests can't be collected:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def run_tests(ids: Sequence[str], workers: int, progress: Progress) -> list[Report]:
    """What happened to each test. A fault of a kernel ends a process: another one takes what it has left."""
    task = progress.add_task("tests", total=len(ids))
    with tempfile.TemporaryDirectory() as folder:
        shares = [list(ids[place::workers]) for place in range(min(workers, len(ids)))]
        records = [Path(folder) / f"{place}.jsonl" for place in range(len(shares))]
        running = dict(enumerate(_start(share, record) for share, record in zip(shares, records, strict=True)))
        while running:
            time.sleep(0.2)
            progress.update(task, completed=sum(len(_lines(record)) for record in records))
            for place, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[place]
                done = [line["test"] for line in _lines(records[place])]
                left = [test for test in shares[place] if test not in done]
                if left and len(left) < len(shares[place]) and process.returncode == LOST:
                    shares[place] = left
                    running[place] = _start(left, records[place])
                elif left:
                    _note(records[place], left, (Path(f"{records[place]}.log")).read_text()[-2000:])
        progress.update(task, completed=len(ids))
        return [line for record in records for line in _lines(record)]


def _start(tests: Sequence[str], record: Path) -> subprocess.Popen[bytes]:
    with open(f"{record}.log", "ab") as log:
        return subprocess.Popen(pytest_command(tests), cwd=ROOT, env=environment(record), stdout=log, stderr=log)


def _lines(record: Path) -> list[Report]:
    text = record.read_text() if record.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _note(record: Path, tests: Sequence[str], error: str) -> None:
    with record.open("a") as file:
        for test in tests:
            line = {"test": test, "outcome": "not run", "seconds": 0.0, "error": error, "kernels": {}}
            file.write(json.dumps(line) + "\n")


def templates(results: Sequence[Report]) -> dict[str, bool]:
    """Whether all tests passed that launched a kernel, by file:template."""
    found: dict[str, bool] = {}
    for result in results:
        for template in set(result["kernels"].values()):
            found[template] = found.get(template, True) and result["outcome"] == "passed"
    return found


def sanitizer() -> str | None:
    """The program compute-sanitizer, if it is installed."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitize(program: str, tests: Sequence[str], progress: Progress) -> Iterator[Report]:
    """The tests below each tool of compute-sanitizer."""
    task = progress.add_task("compute-sanitizer", total=len(TOOLS))
    for tool in TOOLS:
        start = time.monotonic()
        command = [program, "--tool", tool, "--error-exitcode", "8", *pytest_command([str(TESTS / t) for t in tests])]
        with tempfile.TemporaryDirectory() as folder:
            env = environment(Path(folder) / "record.jsonl")
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        progress.advance(task)
        outcome = "passed" if done.returncode == 0 else "failed"
        error = "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-1000:]
        yield {"test": tool, "outcome": outcome, "seconds": time.monotonic() - start, "error": error, "kernels": {}}


def bench(progress: Progress) -> list[Report]:
    """Figures; needs torch with CUDA."""
    sys.path[:0] = [str(TESTS), str(ROOT / "tests"), str(ROOT / "build_scripts")]
    from gpu_bench import Bench, Sizes

    task, rows = progress.add_task("bench", total=FIGURES), []
    for row in Bench(Sizes()).rows():
        rows.append(asdict(row))
        progress.advance(task)
    return rows


def record(report: Report) -> None:
    """Write to the table of the page which kernels this run has verified."""
    now = f"{report['date'][:10]}, {report['device']} (compute capability {report['capability'] / 10})"
    text = PAGE.read_text()
    for template, passed in report["kernels"].items():
        source, function = template.split(":")
        row = rf"^\| `{re.escape(function)}` \| `{re.escape(source)}` \|.*\|$"
        if not re.search(row, text, re.M):
            raise click.ClickException(f"{PAGE.name} has no row for {function} of {source}")
        new = f"| `{function}` | `{source}` | {now if passed else f'failed: {now}'} |"
        text = re.sub(row, lambda _, new=new: new, text, flags=re.M)
    PAGE.write_text(text)


def show(report: Report, console: Console) -> None:
    """Tables of what happened."""
    table = Table("section", "passed", "failed", "not run", "seconds", title=f"{report['device']}, {report['date']}")
    for name, results in report["tests"].items():
        counts = [sum(r["outcome"] == outcome for r in results) for outcome in ("passed", "failed", "not run")]
        table.add_row(name, *map(str, counts), f"{sum(r['seconds'] for r in results):.0f}")
    for name, why in report["left_out"].items():
        table.add_row(name, "", "", why, "")
    console.print(table)
    for results in report["tests"].values():
        for result in results:
            if result["outcome"] != "passed":
                console.print(f"{result['outcome']}: {result['test']}: {result['error'].strip()}", markup=False)
    if report["bench"]:
        table = Table("", "us", "", "of the ceiling", "times as fast as")
        for row in report["bench"]:
            share = f"{row['of']:.0%} of {row['ceiling']}" if row["ceiling"] else ""
            peer = f"{row['ratio']:.2f} {row['peer']}" if row["peer"] else ""
            table.add_row(row["name"], f"{row['seconds'] * 1e6:.1f}", f"{row['value']:.1f} {row['unit']}", share, peer)
        console.print(table)


def open_device() -> Any:
    """The GPU, or the end of the program."""
    from llmc.errors import LlmcError
    from llmc.runtime.devices.cuda.driver import CudaDevice

    try:
        return CudaDevice()
    except LlmcError as error:
        click.echo(f"gpu_check: no GPU to check: {error}", err=True)
        sys.exit(NO_GPU)


@click.command(epilog="Exit status: 0 all passed, 1 something failed, 3 there is no GPU that can be used.")
@click.option("--quick", is_flag=True, help="A subset of the kernels, the parity of one model, nothing else: 1 minute.")
@click.option("--only", multiple=True, type=click.Choice(SECTIONS), help="This section; may be given several times.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all results there.")
@click.option("--record", "recorded", is_flag=True, help="Write date and GPU to the table of docs/cuda.md.")
@click.option("--tests", multiple=True, help="Kernel tests below tests/cuda instead of all, such as test_products.py.")
@click.option("--workers", type=click.IntRange(1), default=min(8, os.cpu_count() or 1), help="Processes that share it.")
def check(
    quick: bool, only: tuple[str, ...], json_path: Path | None, recorded: bool, tests: tuple[str, ...], workers: int
) -> None:
    r"""Check everything that llmc has for CUDA on the GPU of this machine, in less than 8 minutes.

    \b
    contract   the tests of all kernels against their references, which CI runs on an emulator
    parity     engines of small models, built here, give the numbers and tokens of transformers
    sanitizer  some of the kernel tests below compute-sanitizer, where it is installed
    bench      kernels beside the bandwidth and the product of this GPU, and beside torch

    Run it in a clone, with what `pip install '.[build,cuda-build,dev]'` brings, torch with CUDA for bench, and a driver
    that knows CUDA 13. Machine code is compiled here; the second run is quicker.

    \b
    build_scripts/gpu_check.py --quick
    build_scripts/gpu_check.py --json gpu.json --record    # then commit docs/cuda.md
    build_scripts/gpu_check.py --only contract --tests test_attention_cuda.py
    """
    device = open_device()
    sections = only or (("contract", "parity") if quick else SECTIONS)
    report: Report = {
        "device": device.name, "capability": device.capability, "date": datetime.now(UTC).isoformat("T", "seconds"),
        "tests": {}, "bench": [], "left_out": {},
    }  # fmt: skip
    console = Console()
    with Progress(console=console) as progress:
        every = (*CONTRACT, *(HOPPER if device.capability == 90 else ()))
        wanted = list(tests or (QUICK if quick else every)) if "contract" in sections else []
        wanted += PARITY[: 1 if quick else None] if "parity" in sections else []
        for result in run_tests(collect(wanted), workers, progress) if wanted else ():
            section = "parity" if any(name in result["test"] for name in PARITY) else "contract"
            report["tests"].setdefault(section, []).append(result)
        if "sanitizer" in sections:
            if program := sanitizer():
                report["tests"]["sanitizer"] = list(sanitize(program, tests or SANITIZED, progress))
            else:
                report["left_out"]["sanitizer"] = "compute-sanitizer is not installed"
        if "bench" in sections:
            try:
                report["bench"] = bench(progress)
            except (ImportError, AssertionError, RuntimeError) as error:
                report["left_out"]["bench"] = f"{type(error).__name__}: {error}"
    results = [result for part in report["tests"].values() for result in part]
    report["kernels"] = templates(results)
    if json_path:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if recorded:
        record(report)
    show(report, console)
    sys.exit(any(result["outcome"] != "passed" for result in results) or "bench" in report["left_out"])


if __name__ == "__main__":
    check()
