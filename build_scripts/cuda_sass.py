#!/usr/bin/env python3
"""Checks the machine code of every CUDA kernel for every target, without a GPU; see `lint` below."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests/cuda"
HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
KV = ("bfloat16", "float16", "float8_e4m3", "int8")
FILES = ("small_ops", "products", "product_ops", "attention_cuda", "sampling_cuda", "wgmma")


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


def of_models(arch: str) -> dict[str, Any]:
    """Attention and products of the sizes that models have, as plans for a target ask for them; tests run few."""
    from sass import attention_instances, product_instances

    from llmc.plugins.cuda import capability_of

    made = [*attention_instances(HEADS, KV), *product_instances(capability_of(arch))]
    return {kernel.name: kernel for kernel in made}


def problems_of(kernel: Any, arch: str, folder: Path) -> list[str] | None:
    """What is wrong with a kernel for a target; None: plans for this target have another one."""
    from sass import disassemble, problems

    from llmc.compiler.cuda.nvrtc import compile_kernels
    from llmc.plugins.cuda import capability_of

    if kernel.name.startswith("wgmma") and arch != "sm_90a":
        return None
    ptx = compile_kernels([kernel], "compute_90a")[kernel.name].decode()
    if ".e4m3." in ptx and capability_of(arch) < 89:
        return None
    path = folder / f"{kernel.name}.{arch}.cubin"
    path.write_bytes(compile_kernels([kernel], arch)[kernel.name])
    code = disassemble(path)[kernel.name]
    path.unlink()
    return problems(kernel, code, ptx, arch)


def key_of(kernel: Any, arch: str) -> str:
    """Of a kernel as it is compiled now."""
    from llmc.compiler.cuda.nvrtc import PLUGINS, included, nvrtc_version

    parts = [arch, nvrtc_version(), kernel.source_text, *included(kernel.source_text, [PLUGINS]).values()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@click.command()
@click.option("--target", "targets", multiple=True, help="Such as sm_90; default: all that `llmc build` has.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Kernels at a time.")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), help="Kept there, and not done again.")
@click.argument("names", nargs=-1)
def lint(targets: tuple[str, ...], jobs: int, results: Path | None, names: tuple[str, ...]) -> None:
    """Compile all kernels (or those with NAMES in theirs) for all targets, and look at the machine code.

    There have to be the tensor-core instructions that the target has for the types that are multiplied, no accesses of
    local memory (spills), and registers for the blocks that are to fit on a multiprocessor. Kernels are those that the
    tests launch, and attention and products of the sizes that models have: for all targets some 2,000 runs of the
    compiler. The exit status is 1 if there are problems.
    """
    sys.path[:0] = [str(TESTS), str(ROOT / "tests")]
    os.chdir(ROOT)
    from llmc.compiler.targets.base import all_targets

    archs = targets or [name.removeprefix("cuda:") for name in all_targets() if name.startswith("cuda:")]
    launched = kernels()
    chosen = [
        (kernel, arch)
        for arch in archs
        for name, kernel in (launched | of_models(arch)).items()
        if not names or any(part in name for part in names)
    ]
    lines = results.read_text().splitlines() if results and results.exists() else []
    known: dict[str, list[str] | None] = {entry["key"]: entry["problems"] for entry in map(json.loads, lines)}
    jobs_left = [(kernel, arch, key_of(kernel, arch)) for kernel, arch in chosen]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        todo = [job for job in jobs_left if job[2] not in known]
        made = pool.map(lambda job: problems_of(*job[:2], Path(folder)), todo)
        with Progress(disable=not sys.stderr.isatty()) as progress:
            for (kernel, arch, key), found in progress.track(zip(todo, made, strict=True), total=len(todo)):
                known[key] = found
                if results:
                    with results.open("a") as out:
                        out.write(
                            json.dumps({"key": key, "kernel": kernel.name, "arch": arch, "problems": found}) + "\n"
                        )
    bad = [f"{arch} {kernel.name}: {problem}" for kernel, arch, key in jobs_left for problem in known[key] or ()]
    for problem in bad:
        click.echo(problem)
    click.echo("target  kernels  not for it  with problems")
    for arch in archs:
        found = [known[key] for _, of, key in jobs_left if of == arch]
        others = found.count(None)
        click.echo(f"{arch:6} {len(found) - others:8} {others:11} {sum(map(bool, found)):14}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    lint()
