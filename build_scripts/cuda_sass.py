#!/usr/bin/env python3
"""Checks the machine code of every CUDA kernel for every target, without a GPU; see `lint` below."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests/cuda"
FILES = ("small_ops", "products", "product_ops", "attention_cuda", "sampling_cuda")


def templates() -> set[str]:
    """Every kernel template, as plugins/**/*.cuh declare them."""
    texts = [path.read_text() for path in sorted((ROOT / "plugins").rglob("*.cuh"))]
    return {name for text in texts for name in re.findall(r"^DEV void (\w+)\(const \w+& p\) \{", text, re.M)}


def kernels() -> dict[str, Any]:
    """Every instance that the kernel tests launch, by name. Nothing runs, so that most of these tests fail.

    Raises:
        click.ClickException: a template has no instance.
    """
    import contract
    import emulator
    import pytest
    from sass import Recorder

    found: dict[str, Any] = {}

    class Shared(Recorder):
        def __init__(self, mode: str = "plain", order: int = 0, seed: int = 1) -> None:
            super().__init__()
            self.kernels = found

    emulator.Emulator, contract.Emulator = Shared, Shared  # type: ignore[misc]
    contract.compare = lambda *_: None
    silent = ["-p", "no:terminal", "-p", "no:cacheprovider"]
    pytest.main([*silent, *(str(TESTS / f"test_{name}.py") for name in FILES)])
    missing = templates() - {kernel.function.split("<")[0] for kernel in found.values()}
    if missing:
        raise click.ClickException(f"no test launches {', '.join(sorted(missing))}")
    return dict(sorted(found.items()))


def problems_of(kernel: Any, archs: Sequence[str], folder: Path) -> Iterator[str]:
    """What is wrong with a kernel, and for which target."""
    from sass import disassemble, problems

    from llmc.compiler.cuda.nvrtc import compile_kernels

    ptx = compile_kernels([kernel], "compute_90")[kernel.name].decode()
    for arch in archs:
        if ".e4m3." in ptx and int(arch.removeprefix("sm_")) < 89:
            continue  # plans for these targets have other kernels
        path = folder / f"{kernel.name}.{arch}.cubin"
        path.write_bytes(compile_kernels([kernel], arch)[kernel.name])
        for problem in problems(kernel, disassemble(path)[kernel.name], ptx, arch):
            yield f"{arch} {kernel.name}: {problem}"
        path.unlink()


@click.command()
@click.option("--target", "targets", multiple=True, help="Such as sm_90; default: all that NVRTC knows from sm_80 on.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Kernels at a time.")
@click.argument("names", nargs=-1)
def lint(targets: tuple[str, ...], jobs: int, names: tuple[str, ...]) -> None:
    """Compile all kernels (or those with NAMES in theirs) for all targets, and look at the machine code.

    There have to be the tensor-core instructions that the target has for the types that are multiplied, no accesses of
    local memory (spills), and registers for the blocks that are to fit on a multiprocessor. Results of the compiler are
    kept in ~/.cache/llmc/cuda. The exit status is 1 if there are problems.
    """
    sys.path[:0] = [str(TESTS), str(ROOT / "tests")]
    os.chdir(ROOT)
    from llmc.compiler.cuda.nvrtc import known_archs

    archs = targets or [f"sm_{number}" for number in known_archs() if number >= 80]
    chosen = [kernel for name, kernel in kernels().items() if not names or any(part in name for part in names)]
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder, Progress(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("kernels", total=len(chosen))
        with ThreadPoolExecutor(jobs) as pool:
            for found in pool.map(lambda kernel: list(problems_of(kernel, archs, Path(folder))), chosen):
                bad += found
                progress.advance(task)
    for problem in bad:
        click.echo(problem)
    click.echo(f"{len(chosen)} kernels for {', '.join(archs)}: {len(bad)} problems")
    sys.exit(bool(bad))


if __name__ == "__main__":
    lint()
