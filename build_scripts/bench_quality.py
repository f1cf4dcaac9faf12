"""Measure what quantization costs: perplexity of engines, beside llm-compressor on the same tokens and settings.

    python build_scripts/bench_quality.py MODEL --text test.txt --calib train.txt --work /tmp/quality --json result.json
    python -m venv /tmp/peer && /tmp/peer/bin/pip install llmcompressor==0.14.0.1
    python build_scripts/bench_quality.py MODEL ... --llmcompressor /tmp/peer/bin/python

Engines are built and measured by `llmc build` and `llmc eval` of this environment, with the products that they run with
(int8, unless --compute says otherwise). llm-compressor's weights are measured in transformers, in float32; the rows
"bfloat16" show how far the two ways of measuring agree; the last column is the difference of the two perplexities,
with the standard error over windows. Its calibration windows are those of the engine (the hash that
the build recorded is checked), and its groups the same; where a group does not divide the columns, which it refuses,
it is given smaller groups. Results are kept in the work folder, so that a second run only adds what is missing.
"""

import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from llmc.errors import LlmcError
from llmc.quantization.base import Method, parse_method
from llmc.quantization.calibration import Calibration, CalibrationSettings, load

HERE = Path(__file__).parent
METHODS = "int8;w8a8;rtn:group=128;awq:group=128;gptq:group=128;rtn:group=64;awq:group=64;gptq:group=64"
PEER = ("rtn", "awq", "gptq")
Figures = dict[str, Any]


class Bench:
    """One model, one text to measure on and one to calibrate on."""

    def __init__(self, model: Path, text: Path, windows: int, context: int, settings: CalibrationSettings) -> None:
        self.model = model.resolve()
        self.text = text.resolve()
        self.windows = windows
        self.context = context
        self.settings = settings
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.prefix: list[int] = tokenizer.encode("").ids
        self.calibration: Calibration = load(
            settings,
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            lambda _: "",
            vocab_size=tokenizer.get_vocab_size(),
            prefix=self.prefix,
        )

    def llmc(self, method: str, engine: Path, options: list[str], threads: int) -> Figures:
        """Build an engine, unless it is there, and measure it."""
        calibration = ["--calib", self.settings.source, "--calib-samples", str(len(self.calibration.tokens))]
        calibration += ["--calib-length", str(self.settings.length), "--calib-seed", str(self.settings.seed)]
        quant = [] if method == "none" else ["--quant", method, *calibration, *options]
        command = [
            sys.executable,
            "-P",
            "-m",
            "llmc",
            "build",
            str(self.model),
            "-o",
            str(engine),
            "--force",
            "--quiet",
        ]
        _, seconds, wall = run([*command, "--dtype", "bfloat16", *quant])
        recipe = json.loads((engine / "recipe.json").read_text())
        used = (recipe.get("calibration") or {}).get("sha256")
        if used not in (None, self.calibration.sha256):
            raise click.ClickException(f"{engine}: was calibrated on other tokens than the peer is given")
        command = [
            sys.executable,
            "-P",
            "-m",
            "llmc",
            "eval",
            str(engine),
            "--eval",
            str(self.text),
            "--json",
            "--quiet",
        ]
        command += ["--windows", str(self.windows), "--context", str(self.context), "--tokens", "0"]
        output, _, _ = run([*command, "--threads", str(threads)])
        size = sum(file.stat().st_size for file in engine.glob("weights*"))
        figures = json.loads(output)
        losses = [math.log(perplexity) for perplexity in figures["window_perplexities"]]
        found = {"perplexity": figures["perplexity"], "losses": losses, "megabytes": size / 1e6}
        return {**found, "processor_seconds": seconds, "seconds": wall}

    def llmcompressor(self, python: Path, method: Method | None, threads: int) -> Figures:
        """The same with llm-compressor, in its own environment."""
        order = {
            "model": str(self.model),
            "method": "none" if method is None else method.name,
            "calibration": self.calibration.tokens.tolist(),
            "text": str(self.text),
            "context": self.context,
            "windows": self.windows,
            "prefix": self.prefix,
            "threads": threads,
        }
        if method is not None:
            weights = method.weights
            order |= {"bits": weights.bits, "group": weights.group, "symmetric": weights.symmetric}
        output, _, wall = run([str(python), "-m", "peers.llmcompressor_peer"], json.dumps(order))
        figures: Figures = json.loads(output.strip().splitlines()[-1])
        return {**figures, "seconds": wall}


def run(command: list[str], given: str = "") -> tuple[str, float, float]:
    """What a command prints, and the seconds of processor and wall time that it took."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, spent, time.perf_counter() - started


def kept(path: Path, make: Any) -> Figures:
    """The figures of an earlier run, or new ones."""
    if not path.exists():
        figures = make()
        path.write_text(json.dumps(figures))
    found: Figures = json.loads(path.read_text())
    return found


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--text", type=click.Path(path_type=Path, exists=True), required=True, help="To measure on.")
@click.option("--calib", required=True, help="To calibrate on: a .txt or .jsonl file, or builtin.")
@click.option("--samples", default=64, show_default=True, help="Pieces of it.")
@click.option("--length", default=512, show_default=True, help="Tokens of a piece.")
@click.option("--windows", default=8, show_default=True, help="Of the text.")
@click.option("--context", default=512, show_default=True, help="Tokens of a window.")
@click.option("--methods", default=METHODS, show_default=True, help="Values of --quant, with ; between them.")
@click.option("--compute", default="auto", show_default=True, help="Of the engines.")
@click.option("--llmcompressor", type=click.Path(path_type=Path, exists=True), help="A Python that has llmcompressor.")
@click.option("--threads", default=2, show_default=True, help="Of evaluation, and of llm-compressor.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Folder for engines and results.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all figures to this file.")
def main(
    model: Path,
    text: Path,
    calib: str,
    samples: int,
    length: int,
    windows: int,
    context: int,
    methods: str,
    compute: str,
    llmcompressor: Path | None,
    threads: int,
    work: Path,
    json_file: Path | None,
) -> None:
    """Measure the perplexity of MODEL as engines of several kinds."""
    work.mkdir(parents=True, exist_ok=True)
    try:
        bench = Bench(model, text, windows, context, CalibrationSettings(calib, samples, length))
        parsed: dict[str, Method | None] = {"none": None, **{name: parse_method(name) for name in methods.split(";")}}
    except LlmcError as error:
        raise click.ClickException(str(error)) from error
    facts = [str(bench.model), str(bench.text), windows, context, bench.calibration.sha256]
    results: dict[str, dict[str, Figures]] = {}
    for name, method in parsed.items():
        row = results[name] = {}
        options = ["--compute", compute] if method is not None and compute != "auto" else []
        key = hashlib.sha256(json.dumps([*facts, name, options]).encode()).hexdigest()[:12]
        engine = work / f"{key}.engine"
        row["llmc"] = kept(work / f"{key}.json", partial(bench.llmc, name, engine, options, threads))
        if llmcompressor and (method is None or method.name in PEER):
            peer = work / f"{key}.peer.json"
            row["llm-compressor"] = kept(peer, partial(bench.llmcompressor, llmcompressor, method, threads))
        if json_file:
            json_file.write_text(json.dumps({"model": model.name, "facts": facts[2:], "results": results}, indent=1))
    report(model.name, results)


def difference(own: Figures, other: Figures) -> str:
    """How much larger a perplexity is than another on the same windows, and the standard error of that.

    That of the mean of the differences of single windows, which is far smaller than that of a perplexity. It does not
    tell what other calibration tokens would change. Empty for figures of earlier runs that lack those of windows.
    """
    pairs = list(zip(own.get("losses", []), other.get("losses", []), strict=False))
    if len(pairs) < 2 or len(own["losses"]) != len(other["losses"]):
        return ""
    found = [a - b for a, b in pairs]
    return f"{math.expm1(statistics.mean(found)):+.2%} ± {statistics.stdev(found) / math.sqrt(len(found)):.2%}"


def report(model: str, results: dict[str, dict[str, Figures]]) -> None:
    """Print the table."""
    table = Table(title=f"{model}: perplexity, and processor seconds of quantizing")
    for column in ("--quant", "MB", "llmc", "", "s", "llm-compressor", "", "s", "difference"):
        table.add_column(column, justify="left" if column == "--quant" else "right")
    for name, row in results.items():
        cells = [f"{row['llmc']['megabytes']:.0f}"]
        for side in ("llmc", "llm-compressor"):
            if side in row:
                share = row[side]["perplexity"] / results["none"][side]["perplexity"] - 1
                cells += [f"{row[side]['perplexity']:.3f}", f"{share:+.2%}", f"{row[side]['processor_seconds']:.0f}"]
        if "llm-compressor" in row:
            cells.append(difference(row["llmc"], row["llm-compressor"]))
        table.add_row("bfloat16" if name == "none" else name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
