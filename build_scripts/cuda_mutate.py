#!/usr/bin/env python3
"""Plants mistakes in the CUDA kernels, one at a time, and tells which ones their tests miss; see `mutate` below."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "plugins"
EQUAL = ROOT / "tests/cuda/equal_mutants.txt"
CHANGES = (
    (r"__sync(?:threads|warp)\(\);|tile_barrier<THREADS>\(\);|team_barrier\(\);", ""),
    (r"cp_wait<0>\(\)", "cp_wait<1>()"),
    (r"cp_wait<1>\(\)", "cp_wait<2>()"),
    (r"cp_wait<G::STAGES - 2>\(\)", "cp_wait<G::STAGES - 1>()"),
    (r"cp_commit\(\);", ""),
    (r"(?<=[\w)\]]) < (?=[\w(-])", " <= "),
    (r"(?<=[\w)\]]) <= (?=[\w(-])", " < "),
    (r"(?<=[\w)\]]) > (?=[\w(-])", " >= "),
    (r" >= ", " > "),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r"(?<!%) \* ", " + "),
    (r" % ", " / "),
    (r" / ", " * "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" \+= ", " = "),
    (r" \*= ", " = "),
    (r" & ", " | "),
    (r" >> ", " << "),
    (r" << ", " >> "),
    (r" \^ ", " & "),
    (r"(?<=[( ])!(?=[\w(])", ""),
    (r" \? ", " ? 0 * "),
    (r"(?<=[ (\[])(\d+)(?=[;,)\] ])", None),
    (r"0\.0f", "1.0f"),
    (r"1\.0f", "0.0f"),
    (r"\b(?:return|continue);", ";"),
)
PYTEST = ("--noconftest", "-p", "no:cacheprovider", "-p", "no:terminal")
SMALL = "test_small_ops.py::test_agrees_with_the_reference"
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
    "csrc/cuda/gemm_wgmma.cuh": ("test_wgmma.py",),
    "csrc/cuda/gpu.cuh": ("test_ptx.py",),
    "csrc/cuda/gpu_hopper.cuh": ("test_wgmma.py::test_ptx_gives_the_bits_of_the_emulator",),
    "csrc/cuda/sampling.cuh": ("test_sampling_cuda.py",),
    "csrc/cuda/strided.cuh": ("test_small_ops.py",),
    "elementwise/elementwise_cuda.cuh": ("test_small_ops.py::test_every_function_of_elementwise",),
    "embedding/embedding_cuda.cuh": ("test_product_ops.py::test_embedding",),
    "lora/lora_cuda.cuh": ("test_product_ops.py::test_lora",),
    "matmul/matmul_cuda.cuh": ("test_product_ops.py::test_matmul",),
    "moe/moe_cuda.cuh": (
        "test_product_ops.py::test_experts",
        "test_product_ops.py::test_tokens_have_the_same_bits_in_any_number",
    ),
    "paged_attention": ("test_attention_cuda.py",),
    "reduce": (f"{SMALL}[reduce]", "test_small_ops.py::test_the_place_in_a_row_without_numbers_is_the_first"),
}
"""Of a file or folder; else the one of its op in test_small_ops.py. Those that take the least time run first."""


@dataclass(frozen=True)
class Mutant:
    """A file with one mistake.

    ``name``: as equal_mutants.txt has it, without the number of the line, which moves; with (2) where the file has the
    same one before.
    """

    source: str
    line: int
    name: str
    text: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every mistake that can be planted in a file below plugins/."""
    lines = (PLUGINS / source).read_text().splitlines(keepends=True)
    seen: Counter[str] = Counter()
    for number, line in enumerate(lines):
        code = line.split("//")[0]
        if code.lstrip().startswith(("#", "template", "static_assert", "using ")):
            continue
        for pattern, replacement in CHANGES:
            for match in re.finditer(pattern, code):
                new = match.expand(replacement) if replacement is not None else str(int(match[1]) + 1)
                changed = line[: match.start()] + new + line[match.end() :]
                text = "".join([*lines[:number], changed, *lines[number + 1 :]])
                name = f"{source}: {line.strip()} -> {changed.strip()}"
                seen[name] += 1
                yield Mutant(source, number + 1, name + (f" ({seen[name]})" if seen[name] > 1 else ""), text)


def tests_of(source: str) -> list[str]:
    """Tests of a file."""
    folder = source.split("/")[0]
    names = TESTS.get(source) or TESTS.get(folder) or (f"{SMALL}[{folder}]",)
    return [f"tests/cuda/{name}" for name in names]


def outcome(source: str, text: str, tests: Mapping[str, float] | list[str]) -> dict[str, Any]:
    """What the tests say with this text in place of the source: ``said`` is "" if they pass, else how they fail.

    ``seconds``: of processor time that each of them took. They run in a copy of this process, so that what they import
    is there already. One that takes far longer than ``tests`` says, since it goes round and round, is killed.
    """
    read, write = os.pipe()
    if not (child := os.fork()):
        os.close(read)
        with os.fdopen(write, "w") as out:
            out.write(json.dumps(_run(source, text, tests)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"said": f"killed by {signal.Signals(os.WTERMSIG(status)).name}"}
    done: dict[str, Any] = json.loads(found)
    return done


def _run(source: str, text: str, tests: Mapping[str, float] | list[str]) -> dict[str, Any]:
    """In the copy of the process."""
    import emulator
    import pytest

    said: list[str] = []
    seconds: dict[str, float] = {}

    class Plugin:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            self.start = sum(os.times()[:4])
            if isinstance(tests, Mapping):
                most = 20 + 3 * int(tests[nodeid])
                resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + most, resource.RLIM_INFINITY))
                signal.alarm(60 * most)  # if it waits for something that never comes

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            seconds[report.nodeid] = sum(os.times()[:4]) - self.start
            if report.failed:
                lines = str(report.longrepr).splitlines()
                said.append(next((line for line in lines if line.startswith("E  ")), lines[-1])[1:].strip()[:150])

    kept, place_of = emulator.cache_folder(), emulator._place

    def place(kernel: Any, mode: str) -> Path:
        """Builds of this mistake vanish with it; what it is not part of is there already."""
        path = place_of(kernel, mode)
        return kept / path.name if (kept / path.name).exists() else path

    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) / source
        overlay.parent.mkdir(parents=True)
        overlay.write_text(text)
        emulator.INCLUDES.insert(0, Path(folder))
        if text != (PLUGINS / source).read_text():
            os.environ["SIMT_CACHE"] = os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            emulator._place = place  # type: ignore[assignment]
            emulator.Emulator.prepare = lambda *_: None  # type: ignore[method-assign]  # the first ones find most
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        status = pytest.main(["-x", *PYTEST, *tests], [Plugin()])
    return {"said": said[0] if said else f"pytest ends with {int(status)}" if status else "", "seconds": seconds}


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


def verdict(said: str) -> str:
    """What came of a mistake."""
    return "missed" if not said else "broken" if re.search(r"can't compile|does not compile", said) else "found"


def keep(results: Path | None, entry: Mapping[str, Any]) -> None:
    """Add a line to the results."""
    if results:
        with results.open("a") as out:
            out.write(json.dumps(entry) + "\n")


Seconds = dict[str, dict[str, float]]
"""Of processor time: names of tests, joined, to what each of their items takes."""


def plant(chosen: list[Mutant], known: dict[str, str], seconds: Seconds, results: Path | None) -> None:
    """Run the tests with each mistake that is not known yet, file by file."""
    import emulator
    import pytest

    emulator.runtime_library()
    todo = [mutant for mutant in chosen if mutant.name not in known]
    for source in sorted({mutant.source for mutant in todo}):
        tests = tests_of(source)
        pytest.main(["--collect-only", *PYTEST, *tests])  # imports them
        if (joined := " ".join(tests)) not in seconds:
            plain = outcome(source, (PLUGINS / source).read_text(), tests)
            if plain["said"]:
                raise click.ClickException(f"the tests of {source} fail without a mistake: {plain['said']}")
            seconds[joined] = plain["seconds"]
            keep(results, {"tests": joined, "seconds": plain["seconds"]})
        items = dict(sorted(seconds[joined].items(), key=lambda item: item[1]))
        for mutant in (mutant for mutant in todo if mutant.source == source):
            said = known[mutant.name] = outcome(source, mutant.text, items)["said"]
            click.echo(f"{verdict(said):6} {mutant.name}  {said}  [line {mutant.line}]")
            keep(results, {"name": mutant.name, "said": said})


@click.command()
@click.option("--count", default=100, show_default=True, help="Mistakes, of all that can be planted in the files.")
@click.option("--seed", default=1, show_default=True, help="Chooses them; a larger count has those of a smaller one.")
@click.option("--least", default=0.95, show_default=True, help="The share that has to be found.")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), help="Kept there, and not done again.")
@click.option("--again", is_flag=True, help="Do those of the results again that were missed.")
@click.argument("names", nargs=-1)
def mutate(count: int, seed: int, least: float, results: Path | None, again: bool, names: tuple[str, ...]) -> None:
    r"""Plant mistakes in the kernels (in files with NAMES in their paths), and see whether their tests find them.

    A mistake is a changed operator, bound or offset, a barrier or a wait that is missing, a jump left out. Those that
    change nothing are listed in tests/cuda/equal_mutants.txt, with the reason; they and what does not compile don't
    count. Results are of the kernels as they were: begin a new file where these have changed.

    \b
    build_scripts/cuda_mutate.py --count 400 --results mutants.jsonl    # all files
    build_scripts/cuda_mutate.py --count 40 tile_cuda gemm              # some
    """
    sys.path[:0] = [str(ROOT / "tests/cuda"), str(ROOT / "tests"), str(ROOT / "tests/compiler")]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds to import
    os.chdir(ROOT)
    import contract  # noqa: F401  # torch and all that tests import: before the process is copied

    lines = results.read_text().splitlines() if results and results.exists() else []
    known: dict[str, str] = {}
    seconds: Seconds = {}
    for entry in map(json.loads, lines):
        if "name" in entry:
            known[entry["name"]] = entry["said"]
        else:
            seconds[entry["tests"]] = entry["seconds"]
    known = {name: said for name, said in known.items() if said or not again}
    files = sources(names)
    chosen = [mutant for source in files for mutant in mutants(source)]
    total = len(chosen)
    random.Random(seed).shuffle(chosen)
    equal = equal_mutants()
    left = [mutant for mutant in chosen[:count] if mutant.name in equal]
    chosen = [mutant for mutant in chosen[:count] if mutant.name not in equal]
    plant(chosen, known, seconds, results)
    table = Counter((mutant.source, verdict(known[mutant.name])) for mutant in chosen)
    click.echo(f"{'file':45} found missed broken")
    for source in files:
        click.echo(f"{source:45}" + "".join(f"{table[source, word]:7}" for word in ("found", "missed", "broken")))
    found, missed = (sum(table[source, word] for source in files) for word in ("found", "missed"))
    score = found / max(found + missed, 1)
    click.echo(f"{found} of {found + missed} mistakes found ({score:.1%}), of {total} that can be planted", nl=False)
    click.echo(f"; {len(left)} more change nothing, {len(chosen) - found - missed} do not compile")
    sys.exit(score < least)


if __name__ == "__main__":
    mutate()
