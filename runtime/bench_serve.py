"""`llmc bench serve`: load on a server that speaks OpenAI's API, and how it bears it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from llmc.errors import LlmcError, UsageError

if TYPE_CHECKING:
    import httpx

WORDS = "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by"
QUANTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Work:
    """One request: when it is sent (seconds from the start), its prompt and how many tokens are wanted."""

    arrival: float
    prompt: str
    max_tokens: int


@dataclass
class Outcome:
    """What became of one. Times are of the clock of the start; ``chunks``: when each piece of text came."""

    arrival: float
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    problem: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first text, from the moment at which the request was due."""
        return self.chunks[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def whole(self) -> float:
        """Seconds to the end."""
        return self.end - self.arrival


@click.command("serve")
@click.option("--url", required=True, help="Of the server, such as http://127.0.0.1:8000")
@click.option("--model", help="[default: the first that the server lists]")
@click.option("--api-key", envvar="LLMC_API_KEY", help="Sent as a bearer token. [env: LLMC_API_KEY]")
@click.option("--requests", "count", type=click.IntRange(1), default=100, show_default=True, help="To send.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Per second, Poisson. [default: all at once]")
@click.option("--concurrency", type=click.IntRange(1), help="Requests on their way at most. [default: no limit]")
@click.option("--input-tokens", default="128", show_default=True, help="Words of prompts: N, or LOW-HIGH, or N,N,...")
@click.option("--output-tokens", default="64", show_default=True, help="Of answers: N, or LOW-HIGH, or N,N,...")
@click.option("--prompts", type=click.Path(path_type=Path), help="A file with a prompt a line instead of words.")
@click.option("--chat", is_flag=True, help="Chats instead of completions.")
@click.option("--no-ignore-eos", is_flag=True, help="Answers may end early; for servers without ignore_eos.")
@click.option("--slo-ttft", type=float, help="Bound for the first text, in ms, that good requests keep.")
@click.option("--slo-itl", type=float, help="Bound for the mean time between pieces, in ms.")
@click.option("--slo-e2e", type=float, help="Bound for the whole answer, in ms.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Of one request, in seconds.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals, lengths and prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write the distributions as .svg or .html.")
def serve(
    url: str,
    count: int,
    rate: float | None,
    input_tokens: str,
    output_tokens: str,
    prompts: Path | None,
    seed: int,
    as_json: bool,
    plot: Path | None,
    slo_ttft: float | None,
    slo_itl: float | None,
    slo_e2e: float | None,
    **target: Any,
) -> None:
    """Send load to a server of OpenAI's API (llmc serve, vLLM, llama-server) and report latencies.

    Times count from the moment at which a request was due, also if --concurrency made it wait.
    """
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise UsageError(f"--plot {plot}: expected .svg or .html")
    works = workload(count, rate, input_tokens, output_tokens, prompts, seed)
    outcomes, seconds = asyncio.run(send_all(url.rstrip("/"), works, **target))
    report = summary(outcomes, seconds, {"ttft": slo_ttft, "itl": slo_itl, "e2e": slo_e2e})
    if plot is not None:
        from llmc.runtime.bench_serve_plot import page

        plot.write_text(page(series(outcomes), html=plot.suffix == ".html"), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"url": url, "rate": rate, "seed": seed} | report, indent=1))
    else:
        _print(report)
    if report["completed"] == 0:
        raise LlmcError(f"no request was answered; {report['problems']}")


def workload(count: int, rate: float | None, inputs: str, outputs: str, prompts: Path | None, seed: int) -> list[Work]:
    """The requests, in the order of their arrivals; the same for the same seed.

    Raises:
        UsageError: a length makes no sense, or the file has no prompts.
    """
    random = np.random.default_rng(seed)
    gaps = np.zeros(count) if rate is None else random.exponential(1 / rate, count)
    arrivals = np.cumsum(gaps) - gaps[0]
    sizes, wanted = _lengths("--input-tokens", inputs, random), _lengths("--output-tokens", outputs, random)
    words = WORDS.split()
    texts: list[str] = []
    if prompts is not None:
        try:
            texts = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(f"--prompts {prompts}: {problem}") from None
        if not texts:
            raise UsageError(f"--prompts {prompts}: has no prompts")

    def prompt(i: int) -> str:
        return texts[i % len(texts)] if texts else " ".join(random.choice(words, sizes()))

    return [Work(float(arrival), prompt(i), wanted()) for i, arrival in enumerate(arrivals)]


def _lengths(name: str, text: str, random: np.random.Generator) -> Callable[[], int]:
    """A function that draws a length."""
    try:
        if "-" in text:
            low, high = map(int, text.split("-"))
            choices = range(low, high + 1)
        else:
            choices = [int(part) for part in text.split(",")]  # type: ignore[assignment]
    except ValueError:
        raise UsageError(f"{name} {text}: expected N, LOW-HIGH or N,N,...") from None
    if not choices or min(choices) < 1:
        raise UsageError(f"{name} {text}: a length is at least 1")
    return lambda: int(choices[int(random.integers(len(choices)))])


async def send_all(
    url: str,
    works: Sequence[Work],
    *,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int | None = None,
    chat: bool = False,
    no_ignore_eos: bool = False,
    timeout: float = 600.0,
) -> tuple[list[Outcome], float]:
    """Send them when they are due; what became of each, and the seconds from first to last.

    Raises:
        UsageError: the extra for it is not installed, or there is no server.
    """
    try:
        import httpx
    except ImportError:
        raise UsageError("a load needs httpx: install llmc-engine[serve]") from None
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False) as client:
        if model is None:
            try:
                answer = await client.get(f"{url}/v1/models")
                model = answer.json()["data"][0]["id"]
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as problem:
                raise UsageError(
                    f"--url {url}: no list of models ({type(problem).__name__}); is a server there?"
                ) from None
        free = asyncio.Semaphore(concurrency or len(works))
        body = {"model": model, "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
        if not no_ignore_eos:
            body["ignore_eos"] = True
        start = time.perf_counter()

        async def one(work: Work) -> Outcome:
            await asyncio.sleep(max(0.0, start + work.arrival - time.perf_counter()))
            outcome = Outcome(start + work.arrival)
            async with free:
                try:
                    await _send(client, url, body | _own(work, chat), outcome)
                except (httpx.HTTPError, ValueError) as problem:
                    outcome.problem = type(problem).__name__
            outcome.end = time.perf_counter()
            if outcome.problem is None and not outcome.chunks:
                outcome.problem = "no text"
            return outcome

        outcomes = await asyncio.gather(*(one(work) for work in works))
        return list(outcomes), time.perf_counter() - start


def _own(work: Work, chat: bool) -> dict[str, Any]:
    if chat:
        return {"messages": [{"role": "user", "content": work.prompt}], "max_tokens": work.max_tokens}
    return {"prompt": work.prompt, "max_tokens": work.max_tokens}


async def _send(client: httpx.AsyncClient, url: str, body: dict[str, Any], outcome: Outcome) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client.stream("POST", url + path, json=body) as answer:
        if answer.status_code != 200:
            outcome.problem = f"status {answer.status_code}"
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                continue
            event = json.loads(line[5:])
            if "error" in event:
                outcome.problem = "error event"
                return
            if usage := event.get("usage"):
                outcome.prompt_tokens, outcome.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if any(_has_text(choice) for choice in event.get("choices") or ()):
                outcome.chunks.append(time.perf_counter())
    outcome.tokens = outcome.tokens or len(outcome.chunks)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


def series(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Milliseconds of each measure, of the requests that were answered."""
    good = [o for o in outcomes if o.problem is None]
    return {
        "ttft": [o.first * 1e3 for o in good],
        "itl": [gap * 1e3 for o in good for gap in o.gaps],
        "e2e": [o.whole * 1e3 for o in good],
    }


def summary(outcomes: Sequence[Outcome], seconds: float, bounds: dict[str, float | None]) -> dict[str, Any]:
    """Counts, rates, percentiles in ms, and the rate of requests that keep all bounds."""
    good = [o for o in outcomes if o.problem is None]
    tokens = sum(o.tokens for o in good)
    report: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": len(good),
        "problems": dict(Counter(o.problem for o in outcomes if o.problem is not None)),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens": sum(o.prompt_tokens for o in good),
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
    }
    for name, values in series(outcomes).items():
        report[f"{name}_ms"] = (
            {"mean": float(np.mean(values)), "max": max(values)}
            | {f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}
            if values
            else None
        )
    if given := {name: bound for name, bound in bounds.items() if bound is not None}:
        kept = sum(all(_measure(o, name) <= bound for name, bound in given.items()) for o in good)
        report["slo_ms"] = given
        report["goodput_requests_per_second"] = kept / seconds
        report["goodput_share"] = kept / len(outcomes)
    return report


def _measure(outcome: Outcome, name: str) -> float:
    """In ms; of ``itl`` the mean."""
    if name == "itl":
        return 1e3 * float(np.mean(outcome.gaps)) if outcome.gaps else 0.0
    return 1e3 * (outcome.first if name == "ttft" else outcome.whole)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ["mean", *(f"p{q}" for q in QUANTILES), "max"]
    table = Table("ms", *columns)
    for name, text in (("ttft", "to the first text"), ("itl", "between pieces"), ("e2e", "whole answer")):
        if (values := report[f"{name}_ms"]) is not None:
            table.add_row(text, *(f"{values[column]:.1f}" for column in columns))
    console = Console()
    console.print(table)
    console.print(
        f"{report['completed']} of {report['requests']} requests in {report['seconds']:.1f} s: "
        f"{report['requests_per_second']:.2f} requests/s, {report['output_tokens_per_second']:.1f} tokens/s",
        highlight=False,
    )
    if report["problems"]:
        console.print(f"problems: {report['problems']}", highlight=False)
    if "goodput_share" in report:
        good = f"{report['goodput_requests_per_second']:.2f} requests/s, {100 * report['goodput_share']:.1f} %"
        console.print(f"within {report['slo_ms']} ms: {good}", highlight=False)
