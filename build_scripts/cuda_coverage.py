#!/usr/bin/env python3
"""Lines of the CUDA kernels that their tests on the emulator never run, by gcov; see `coverage` below."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
TESTS = ("small_ops", "products", "product_ops", "attention_cuda", "sampling_cuda", "wgmma")
NEVER = {
    "plugins/csrc/cuda/gpu.cuh": "the branch for GPU compilers, which the emulator replaces; test_ptx.py runs it",
    "plugins/csrc/cuda/gpu_hopper.cuh": "the same of sm_90a; test_wgmma.py runs it",
}


def kernel_files() -> list[Path]:
    """Every file of device code."""
    return sorted((ROOT / "plugins").rglob("*.cuh"))


def measure(folder: Path, tests: Sequence[str]) -> dict[str, dict[int, int]]:
    """How often each line ran, by file; a line of a template counts as often as in all of its instances.

    Raises:
        click.ClickException: the tests fail.
    """
    variables = os.environ | {"SIMT_MODE": "coverage", "SIMT_CACHE": str(folder)}
    names = tests or [f"tests/cuda/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"the tests fail:\n{done.stdout[-4000:]}")
    found: dict[str, dict[int, int]] = {}
    for data in sorted(folder.glob("*.gcda")):
        text = subprocess.check_output(["gcov", "--json-format", "--stdout", str(data)], cwd=folder, text=True)
        for file in json.loads(text)["files"]:
            path = Path(file["file"])
            if path.is_relative_to(ROOT / "plugins"):
                lines = found.setdefault(path.relative_to(ROOT).as_posix(), {})
                for line in file["lines"]:
                    number = line["line_number"]
                    lines[number] = lines.get(number, 0) + line["count"]
    return found


def never_built(path: Path, lines: dict[int, int]) -> list[int]:
    """Functions, and branches of `if constexpr`, that no instance has: no line of theirs is in what gcov saw."""
    text, found = path.read_text().splitlines(), []
    for number, line in enumerate(text, 1):
        if not re.match(r"\s*(static )?DEV ", line) and "if constexpr" not in line:
            continue
        if line.endswith("\\"):  # of a macro: its lines are those of its uses
            continue
        if line.rstrip().endswith(";"):
            body = [number]
        else:
            indent = len(line) - len(line.lstrip())
            stop = next(
                (n for n in range(number, len(text)) if re.match(rf"\s{{{indent}}}\}}", text[n])), len(text) - 1
            )
            body = list(range(number, stop + 2))
        if not any(n in lines for n in body):
            found.append(number)
    return found


@click.command()
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Builds and counts go there, and stay.")
@click.argument("tests", nargs=-1)
def coverage(keep: Path | None, tests: tuple[str, ...]) -> None:
    """Run the kernel tests (or TESTS) on the emulator, and list the lines of plugins/**/*.cuh that they never run.

    Lines of templates that no instance has are listed too. The exit status is 1 if there are any.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        counts = measure(folder, tests)
    total = missed = 0
    for path in kernel_files():
        name = path.relative_to(ROOT).as_posix()
        if name in NEVER:
            continue
        lines, text = counts.get(name, {}), path.read_text().splitlines()
        bad = sorted({n for n, count in lines.items() if not count} | set(never_built(path, lines)))
        total, missed = total + len(lines), missed + len(bad)
        for number in bad:
            click.echo(f"{name}:{number}: {text[number - 1].strip()}")
    click.echo(f"{total - missed} of {total} lines of kernel code ran")
    sys.exit(missed > 0)


if __name__ == "__main__":
    coverage()
