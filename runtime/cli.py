"""The commands that run engines: run and verify. What is heavy is imported when it is used."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmc.errors import GateError, LlmcError, UsageError
from llmc.runtime.constraints.base import KINDS
from llmc.runtime.terminal import INTERRUPTED, show, watched_interrupt

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM
    from llmc.runtime.output import RequestOutput
    from llmc.runtime.request import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

PROMPT_TOKENS = 256
"""Default of --max-tokens for -p; chats have the room left in the context."""

SAMPLING = (
    click.option("--max-tokens", type=int, help="Tokens to generate. [default: 256; chats: the room left]"),
    click.option("--min-tokens", type=int, help="Tokens before which nothing ends the text."),
    click.option("--temperature", type=float, help="0 takes the most likely token. [default: 0]"),
    click.option("--top-k", type=int, help="Draw from the k most likely tokens."),
    click.option("--top-p", type=float, help="Draw from the most likely tokens with this share of the probability."),
    click.option("--min-p", type=float, help="Draw from tokens at least this fraction as likely as the best."),
    click.option("--repetition-penalty", type=float, help="Above 1: against tokens of prompt and output."),
    click.option("--presence-penalty", type=float, help="Above 0: against tokens of the output."),
    click.option("--frequency-penalty", type=float, help="The same, for each time that a token occurs."),
    click.option("--seed", type=int, help="Makes draws reproducible."),
    click.option("-n", "n", type=int, help="Independent choices."),
    click.option("--stop", multiple=True, help="A string that ends the text before it. Repeatable."),
    click.option("--bad-word", "bad_words", multiple=True, help="A string that never occurs. Repeatable."),
    click.option("--logprobs", type=int, help="Log-probabilities of this many alternatives; for --json and --output."),
    click.option("--ignore-eos", is_flag=True, help="The model's end tokens do not end the text."),
)

CONSTRAINTS = (
    click.option("--json-object", is_flag=True, help="The text is a JSON object."),
    click.option("--json-schema", type=click.Path(path_type=Path), help="It is JSON of the schema in this file."),
    click.option("--regex", help="It matches this expression as a whole."),
    click.option("--grammar", type=click.Path(path_type=Path), help="It is of the grammar (llguidance's Lark) there."),
    click.option("--choice", multiple=True, help="It is one of these. Repeatable."),
)

RESOURCES = (
    click.option("--threads", type=click.IntRange(1), help="[default: the physical cores available]"),
    click.option("--kv-memory", help="Of the KV cache, such as 2GiB. [default: at most a quarter of what is free]"),
    click.option("--num-blocks", type=click.IntRange(1), help="The same, in blocks."),
    click.option(
        "--gpu-memory", help="What an engine for CUDA takes of its device: 0.9, 90% or 40GiB. [default: 0.9 of it]"
    ),
    click.option("--max-sequences", type=click.IntRange(1), help="That run at one time. [default: the engine's]"),
    click.option("--max-batch-tokens", type=click.IntRange(1), help="Tokens of a step. [default: the engine's]"),
    click.option("--isa", help="Instruction set. [default: the best of this machine]"),
    click.option("--no-prefix-cache", is_flag=True, help="Compute every prompt from its first token."),
)

SPECULATION = (
    click.option(
        "--spec",
        default="off",
        show_default=True,
        help="Draft tokens for the engine to verify: ngram, draft=DIR, medusa, eagle. Same text.",
    ),
    click.option("--spec-tokens", type=click.IntRange(1), help="Drafts of a step at most. [default: the drafter's]"),
    click.option(
        "--spec-sampling",
        type=click.Choice(["exact", "rejection", "typical"]),
        default="exact",
        show_default=True,
        help="exact: same text. rejection: same distribution, drafts of an engine or an EAGLE layer are accepted more "
        "often. typical: LOSSY, likely drafts are accepted; greedy texts stay the same.",
    ),
)


def options(group: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """A decorator that adds them in order."""

    def add(function: F) -> F:
        for option in reversed(group):
            function = option(function)
        return function

    return add


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", help="The text to continue, or with --chat to answer; - reads it from stdin.")
@click.option("--chat", is_flag=True, help="Use the model's chat template; without -p, a conversation.")
@click.option("--system", help="System message for --chat.")
@click.option("--input", "input_file", help="A JSONL file of requests; - is stdin.")
@click.option("-o", "--output", "output_file", help="Where the results go, as JSONL. [default: stdout]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--stats", is_flag=True, help="Print times and speed to stderr.")
@click.option("--lora", multiple=True, metavar="NAME=DIR", help="A LoRA adapter (PEFT) to run with. Repeatable.")
@options(SAMPLING)
@options(CONSTRAINTS)
@options(RESOURCES)
@options(SPECULATION)
@click.option("--parse-special-in-messages", is_flag=True, help="Control tokens in messages are parsed, not text.")
def run(
    engine: Path,
    prompt: str | None,
    chat: bool,
    system: str | None,
    input_file: str | None,
    output_file: str | None,
    as_json: bool,
    stats: bool,
    lora: tuple[str, ...],
    threads: int | None,
    kv_memory: str | None,
    num_blocks: int | None,
    gpu_memory: str | None,
    max_sequences: int | None,
    max_batch_tokens: int | None,
    isa: str | None,
    no_prefix_cache: bool,
    spec: str,
    spec_tokens: int | None,
    spec_sampling: str,
    parse_special_in_messages: bool,
    **sampling: Any,
) -> None:  # long: one parameter for each option
    """Generate text with an engine: one prompt, a chat, or a JSONL file.

    \b
    llmc run engine/ -p "The capital of France is"
    llmc run engine/ --chat                        a conversation
    llmc run engine/ --chat -p "What is 2 + 2?"    one answer
    llmc run engine/ --input in.jsonl --output out.jsonl

    Each line of a JSONL file is an object with "prompt" (text or token ids) or "messages", perhaps an "id", and any
    sampling values (max_tokens, temperature, ...); the options here are their defaults. Or lines of OpenAI's batch
    format: custom_id, method, url and body. A run that was interrupted or killed goes on where it was. With --lora, a
    line (or its body) has the name of its adapter as "model"; -p and --chat use the one that there is.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    if input_file is None and prompt is None and not chat:
        raise UsageError("say what to do: -p PROMPT, --chat, or --input FILE.jsonl")
    if input_file is not None and (prompt is not None or chat):
        raise UsageError("--input excludes -p and --chat; its lines have prompts or messages")
    if output_file is not None and input_file is None:
        raise UsageError("--output belongs to --input")
    if system is not None and not chat:
        raise UsageError("--system belongs to --chat")
    if as_json and chat and prompt is None:
        raise UsageError("--json belongs to -p; a conversation is for people")
    adapters = named_directories("--lora", lora, set())
    if len(adapters) > 1 and input_file is None:
        raise UsageError("-p and --chat use one adapter: give --lora once")
    adapter = next(iter(adapters), None)
    constraint = _constraint({name: sampling.pop(name) for name in KINDS})
    params = {name: value for name, value in sampling.items() if value not in (None, (), False)} | constraint
    checked = sampling_params(params)
    llm = load(
        engine,
        threads=threads,
        kv_memory=kv_memory,
        num_blocks=num_blocks,
        gpu_memory=gpu_memory,
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        isa=isa,
        prefix_cache=not no_prefix_cache,
        spec=spec,
        spec_tokens=spec_tokens,
        spec_sampling=spec_sampling,
        parse_special_in_messages=parse_special_in_messages,
        lora=adapters,
    )
    try:
        if input_file is not None:
            from llmc.runtime.batch_file import run_file

            sys.exit(run_file(llm, input_file, output_file, params))
        if prompt is None:
            from llmc.runtime.conversation import converse

            sys.exit(converse(llm, checked, system, adapter))
        text = _stdin() if prompt == "-" else prompt
        messages = None
        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": text})
        else:
            checked = sampling_params({"max_tokens": PROMPT_TOKENS} | params)
        sys.exit(_answer(llm, messages or text, checked, adapter, as_json, stats))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        llm.close()


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--expect-digest", help="sha256:... that engine.json must have.")
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores available]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(engine: Path, expect_digest: str | None, threads: int | None, as_json: bool) -> None:
    """Check an engine's files, and replay the golden prompts recorded at build.

    Exit code 3: the numbers differ; 4: a file is damaged, missing or not the expected one.
    """
    from llmc.runtime.verification import verify_engine

    report = verify_engine(engine, expect_digest=expect_digest, threads=threads)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        for line in report.lines():
            click.echo(line)
    if not report.passed:
        raise GateError(f"{engine}: the numbers differ from those recorded at build")


def load(
    engine: Path, *, spec: str = "off", spec_tokens: int | None = None, spec_sampling: str = "exact", **values: Any
) -> LLM:
    """The engine, ready to run; those of ``spec`` as of SPECULATION."""
    from llmc.runtime.llm import LLM
    from llmc.runtime.speculative.opening import Speculation

    return LLM(engine, speculative=Speculation(spec, spec_tokens, spec_sampling), **values)


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """From options.

    Raises:
        UsageError: a value is out of bounds.
    """
    from llmc.errors import RequestError
    from llmc.runtime.request import SamplingParams

    try:
        return SamplingParams(**values)
    except RequestError as problem:
        raise UsageError(f"--{problem}") from None


def named_directories(option: str, entries: tuple[str, ...], taken: set[str]) -> dict[str, Path]:
    """Directories by name.

    Raises:
        UsageError: an entry is not NAME=DIR, or the name is taken.
    """
    paths: dict[str, Path] = {}
    for entry in entries:
        name, separator, path = entry.partition("=")
        if not (name and separator and path):
            raise UsageError(f"{option} {entry}: expected NAME=DIR")
        if name in paths or name in taken:
            raise UsageError(f"{option} {entry}: the name is taken")
        paths[name] = Path(path)
    return paths


def _constraint(given: dict[str, Any]) -> dict[str, Any]:
    """The value for SamplingParams of the options in CONSTRAINTS."""
    values = {kind: value for kind, value in given.items() if value not in (None, (), False)}
    for kind in ("json_schema", "grammar"):
        if kind in values:
            try:
                values[kind] = values[kind].read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                raise UsageError(f"--{kind.replace('_', '-')}: {problem}") from None
    if "choice" in values:
        values["choice"] = list(values["choice"])
    return {"constraint": values} if values else {}


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as problem:
        raise UsageError(f"-p -: stdin is not UTF-8 (byte {problem.start})") from None


def _answer(llm: LLM, prompt: Any, params: SamplingParams, adapter: str | None, as_json: bool, stats: bool) -> int:
    """Print one result, as it comes if it is a single text; returns the exit code."""
    start = time.perf_counter()
    first: float | None = None
    is_chat = not isinstance(prompt, str)
    if as_json or params.num_choices > 1:
        (result,) = (llm.chat if is_chat else llm.generate)(prompt, params, adapter=adapter)
        if as_json:
            found = result.to_json()
            if (speculator := llm.scheduler.speculator) is not None:
                found["speculation"] = speculator.acceptance.to_json()
            click.echo(json.dumps(found, ensure_ascii=False))
        else:
            for choice in result.choices:
                show(f"[{choice.index}] {choice.text}\n")
        return _report_errors(result)
    generated, error = 0, None
    stream = llm.stream(prompt, params, adapter=adapter)
    with watched_interrupt() as interrupt:
        for delta in stream:
            first = first or time.perf_counter()
            generated += len(delta.token_ids)
            error = delta.error
            show(delta.text)
            if interrupt.pressed:
                stream.close()
                break
        click.echo()
    if interrupt.pressed:
        return INTERRUPTED
    if stats and first is not None:
        total = time.perf_counter() - start
        rate = (generated - 1) / (start + total - first) if generated > 1 else 0.0
        speculator = llm.scheduler.speculator
        drafts = "" if speculator is None else f"; {speculator.acceptance.line()}"
        click.echo(f"{generated} tokens, first after {first - start:.3f} s, then {rate:.1f} tokens/s{drafts}", err=True)
        if (memory := getattr(llm.executor, "memory", None)) is not None:
            click.echo(f"takes {memory}", err=True)
    if error is not None:
        raise LlmcError(error)
    return 0


def _report_errors(result: RequestOutput) -> int:
    errors = [choice.error for choice in result.choices if choice.error is not None]
    for error in errors:
        click.echo(f"llmc: error: {error}", err=True)
    return 1 if errors else 0
