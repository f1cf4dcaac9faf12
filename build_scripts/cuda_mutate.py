#!/usr/bin/env python3
"""Plants mistakes in the CUDA kernels, one at a time, and tells which ones their tests miss; see `mutate` below."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "plugins"
EQUAL = ROOT / "tests/cuda/equal_mutants.txt"
CHANGES = (
    ("barrier", r"__sync(?:threads|warp)\(\);|tile_barrier<THREADS>\(\);|team_barrier\(\);", ""),
    ("copies", r"cp_wait<0>\(\)", "cp_wait<1>()"),
    ("copies", r"cp_wait<1>\(\)", "cp_wait<2>()"),
    ("copies", r"cp_wait<G::STAGES - 2>\(\)", "cp_wait<G::STAGES - 1>()"),
    ("copies", r"cp_commit\(\);", ""),
    ("bounds", r"(?<=[\w)\]]) < (?=[\w(-])", " <= "),
    ("bounds", r"(?<=[\w)\]]) <= (?=[\w(-])", " < "),
    ("bounds", r"(?<=[\w)\]]) > (?=[\w(-])", " >= "),
    ("bounds", r" >= ", " > "),
    ("bounds", r"\bmin\(", "max("),
    ("bounds", r"\bmax\(", "min("),
    ("operators", r" \+ ", " - "),
    ("operators", r" - ", " + "),
    ("operators", r"(?<!%) \* ", " + "),
    ("operators", r" % ", " / "),
    ("operators", r" / ", " * "),
    ("operators", r" && ", " || "),
    ("operators", r" \|\| ", " && "),
    ("operators", r" == ", " != "),
    ("operators", r" != ", " == "),
    ("operators", r" \+= ", " = "),
    ("operators", r" \*= ", " = "),
    ("operators", r" & ", " | "),
    ("operators", r" >> ", " << "),
    ("operators", r" \? ", " ? 0 * "),
    ("offsets", r"(?<=[ (\[])(\d+)(?=[;,)\] ])", None),
    ("offsets", r"0\.0f", "1.0f"),
    ("offsets", r"1\.0f", "0.0f"),
    ("jumps", r"\b(?:return|continue);", ";"),
)
SMALL = "test_small_ops.py::test_agrees_with_the_reference"
QUICK_SOURCES = ("softmax",)
TESTS = {
    "csrc/cuda/activations.cuh": (f"{SMALL}[glu]", "test_small_ops.py::test_every_function_of_elementwise"),
    "csrc/cuda/device.cuh": (
        f"{SMALL}[softmax]",
        f"{SMALL}[norm]",
        "test_ptx.py::test_both_device_layers_give_the_same_bits",
        "test_attention_cuda.py",
    ),
    "csrc/cuda/gemm.cuh": ("test_products.py", "test_product_ops.py::test_experts"),
    "csrc/cuda/gemm_rows.cuh": ("test_products.py", "test_product_ops.py"),
    "csrc/cuda/gpu.cuh": ("test_ptx.py",),
    "csrc/cuda/sampling.cuh": ("test_sampling_cuda.py",),
    "csrc/cuda/strided.cuh": ("test_small_ops.py",),
    "elementwise/elementwise_cuda.cuh": ("test_small_ops.py::test_every_function_of_elementwise",),
    "embedding/embedding_cuda.cuh": ("test_product_ops.py::test_embedding",),
    "lora/lora_cuda.cuh": ("test_product_ops.py::test_lora",),
    "matmul/matmul_cuda.cuh": ("test_product_ops.py::test_matmul",),
    "moe/moe_cuda.cuh": ("test_product_ops.py::test_experts", "test_product_ops.py::test_tokens_have"),
    "paged_attention": ("test_attention_cuda.py",),
}
"""Of a file or folder, the quick ones first; else the one of its op in test_small_ops.py."""


@dataclass(frozen=True)
class Mutant:
    """A file with one mistake. ``number``: of the places in its line that the change fits."""

    source: str
    line: int
    kind: str
    before: str
    after: str
    text: str

    @property
    def name(self) -> str:
        """As equal_mutants.txt has it: without the number of the line, which moves."""
        return f"{self.source}: {self.before} -> {self.after}"


def mutants(source: str) -> Iterator[Mutant]:
    """Every mistake that can be planted in a file below plugins/."""
    lines = (PLUGINS / source).read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        code = line.split("//")[0]
        if code.lstrip().startswith(("#", "template", "static_assert", "using ")):
            continue
        for kind, pattern, replacement in CHANGES:
            for match in re.finditer(pattern, code):
                new = match.expand(replacement) if replacement is not None else str(int(match[1]) + 1)
                changed = line[: match.start()] + new + line[match.end() :]
                text = "".join([*lines[:number], changed, *lines[number + 1 :]])
                yield Mutant(source, number + 1, kind, line.strip(), changed.strip(), text)


def tests_of(source: str) -> list[str]:
    """Tests of a file, below tests/cuda."""
    folder = source.split("/")[0]
    return list(TESTS.get(source) or TESTS.get(folder) or (f"{SMALL}[{folder}]",))


def outcome(source: str, text: str, tests: list[str], seconds: float) -> str:
    """What the tests say with this text in place of the source: "" if they pass, else how they fail, in a line.

    They run in a copy of this process, so that what they import is there already.
    """
    read, write = os.pipe()
    if not (child := os.fork()):
        os.close(read)
        os.setsid()
        with os.fdopen(write, "w") as out:
            out.write(_run(source, text, tests))
        os._exit(0)
    os.close(write)
    os.set_blocking(read, False)
    end, said = time.monotonic() + seconds, b""
    with os.fdopen(read, "rb") as pipe:
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
            said += pipe.read() or b""
            time.sleep(0.02)
        if not ended[0]:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end within {seconds:.0f} s"
        said += pipe.read() or b""
    if os.WIFSIGNALED(ended[1]):
        return f"killed by {signal.Signals(os.WTERMSIG(ended[1])).name}"
    return said.decode()


def _run(source: str, text: str, tests: list[str]) -> str:
    """In the copy of the process."""
    import emulator
    import pytest

    said: list[str] = []

    class Plugin:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                lines = str(report.longrepr).splitlines()
                said.append(next((line for line in lines if line.startswith("E  ")), lines[-1])[1:].strip()[:150])

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / source
        place.parent.mkdir(parents=True)
        place.write_text(text)
        emulator.INCLUDES.insert(0, Path(folder))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        names = [f"tests/cuda/{test}" for test in tests]
        status = pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:terminal", *names], [Plugin()])
        return said[0] if said else f"pytest ends with {int(status)}" if status else ""


def equal_mutants() -> set[str]:
    """Names of mutants that change nothing, each with its reason in the file."""
    lines = EQUAL.read_text().splitlines()
    return {line for line in lines if line and not line.startswith(("#", "    "))}


def sources(names: tuple[str, ...]) -> list[str]:
    """Files of device code below plugins/ whose path holds one of these names."""
    found = sorted(path.relative_to(PLUGINS).as_posix() for path in PLUGINS.rglob("*.cuh"))
    chosen = [source for source in found if not names or any(name in source for name in names)]
    if not chosen:
        raise click.UsageError(f"no file of {', '.join(found)} has {' or '.join(names)} in its name")
    return chosen


@click.command()
@click.option("--count", default=20, show_default=True, help="Mistakes for each file.")
@click.option("--seed", default=1, show_default=True, help="Chooses them.")
@click.option("--quick", is_flag=True, help="One mistake in each of a few small files: what CI runs.")
@click.option("--least", default=0.95, show_default=True, help="The share that has to be found.")
@click.option("--seconds", default=600.0, show_default=True, help="For the tests of one mistake; it is found then.")
@click.argument("names", nargs=-1)
def mutate(count: int, seed: int, quick: bool, least: float, seconds: float, names: tuple[str, ...]) -> None:
    r"""Plant mistakes in the kernels (in files with NAMES in their paths), and see whether their tests find them.

    A mistake is a changed operator, bound or offset, a barrier or a wait that is missing, a jump left out. Those that
    change nothing are listed in tests/cuda/equal_mutants.txt, with the reason, and don't count.

    \b
    build_scripts/cuda_mutate.py --count 5                    # all files
    build_scripts/cuda_mutate.py --count 40 tile_cuda gemm    # some
    """
    sys.path[:0] = [str(ROOT / "tests/cuda"), str(ROOT / "tests"), str(ROOT / "tests/compiler")]
    os.chdir(ROOT)
    import contract  # noqa: F401  # torch and all that tests import: before the process is copied

    equal, found, missed, left = equal_mutants(), 0, 0, 0
    for source in sources(QUICK_SOURCES if quick else names):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["SIMT_CACHE"] = cache
            tests = tests_of(source)
            if error := outcome(source, (PLUGINS / source).read_text(), tests, seconds):
                raise click.ClickException(f"the tests of {source} fail without a mistake: {error}")
            chosen = list(mutants(source))
            random.Random(f"{seed} {source}").shuffle(chosen)
            for mutant in chosen[: 1 if quick else count]:
                if mutant.name in equal:
                    left += 1
                    continue
                kept = set(os.listdir(cache))
                said = outcome(source, mutant.text, tests, seconds)
                for name in set(os.listdir(cache)) - kept:  # builds of this mistake
                    (Path(cache) / name).unlink()
                found, missed = found + bool(said), missed + (not said)
                word = "found " if said else "MISSED"
                click.echo(f"{word} {source}:{mutant.line}: {mutant.before}  ->  {mutant.after}  {said}")
    score = found / max(found + missed, 1)
    click.echo(f"{found} of {found + missed} mistakes found ({score:.1%}); {left} more change nothing")
    sys.exit(score < least)


if __name__ == "__main__":
    mutate()
