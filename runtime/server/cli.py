"""`llmc serve`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.errors import UsageError
from llmc.runtime.cli import RESOURCES, SPECULATION, load, named_directories, options
from llmc.runtime.server.settings import Settings

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM

EXTRA = "llmc serve needs packages that are not installed ({}): pip install 'llmc-engine[serve]'"


def settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: one option for each of Settings."""
    for f in reversed(dataclasses.fields(Settings)):
        values: dict[str, Any] = {"help": f.metadata["help"], "default": f.default, "show_default": True}
        if f.default is False:
            values["is_flag"] = True
        elif f.default in ((), None):
            values |= {"multiple": f.default == (), "show_default": False}
            values["type"] = click.Path(path_type=Path) if f.name.endswith("_file") else str
        function = click.option("--" + f.name.replace("_", "-"), f.name, **values)(function)
    return function


@click.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@click.option("--served-model-name", help="Name of ENGINE for clients. [default: that of the directory]")
@click.option("--model", "named", multiple=True, metavar="NAME=DIR", help="One more engine. Repeatable.")
@click.option(
    "--lora", multiple=True, metavar="NAME=DIR", help="A LoRA adapter (PEFT) of the first engine. Repeatable."
)
@settings_options
@options(RESOURCES)
@options(SPECULATION)
@click.option("--parse-special-in-messages", is_flag=True, help="Control tokens in messages are parsed, not text.")
def serve(
    engine: Path | None,
    served_model_name: str | None,
    named: tuple[str, ...],
    **values: Any,
) -> None:
    """Serve engines over HTTP, with OpenAI's API.

    \b
    llmc serve engine/                                  http://127.0.0.1:8000, with a page to chat
    llmc serve engine/ --host 0.0.0.0 --api-key-file keys.txt
    llmc serve --model small=a/ --model large=b/

    SIGTERM lets running requests end, a second one ends them; SIGHUP loads the engines anew. Exit codes as elsewhere:
    4 at once, before anything listens, if there is no engine, no device that it is built for, or an adapter does not
    fit; 5 also if an engine fails while it serves, for a supervisor to start it again.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    from llmc.runtime.tool_calls import find_format

    settings = Settings(**{f.name: values.pop(f.name) for f in dataclasses.fields(Settings)})
    find_format(None, settings.tool_parser)
    values["prefix_cache"] = not values.pop("no_prefix_cache")
    paths = _paths(engine, served_model_name, named)
    adapters = named_directories("--lora", values.pop("lora"), set(paths))
    first = next(iter(paths.values()))

    def load_engine(path: Path) -> LLM:
        return load(path, lora=adapters if path is first else None, **values)

    try:
        from llmc.runtime.devices import check_engine
        from llmc.runtime.server.logs import Logs
        from llmc.runtime.server.metrics import Metrics
        from llmc.runtime.server.models import Models
        from llmc.runtime.server.serve import Server, raise_file_limit
    except ModuleNotFoundError as problem:
        raise UsageError(EXTRA.format(problem.name)) from None
    tracing = _tracing() if settings.otel else None
    for path in paths.values():
        check_engine(path, adapters if path is first else None)
    raise_file_limit()
    logs = Logs(settings.log_format, settings.log_level)
    try:
        metrics = Metrics(logs)
        models = Models(paths, load_engine, settings, metrics, tracing)
        metrics.watch(models.all)
        try:
            asyncio.run(_run(models, settings, Server))
        finally:
            if tracing is not None:
                tracing.close()
    finally:
        logs.close()


async def _run(models: Any, settings: Settings, server: Any) -> None:
    await server(models, settings).run()


def _tracing() -> Any:
    try:
        from llmc.runtime.server.tracing import Tracing, otlp_exporter

        return Tracing(otlp_exporter())
    except ModuleNotFoundError as problem:
        raise UsageError(
            f"--otel needs packages that are not installed ({problem.name}): pip install 'llmc-engine[otel]'"
        ) from None


def _paths(engine: Path | None, name: str | None, named: tuple[str, ...]) -> dict[str, Path]:
    """Engine directories by name."""
    paths: dict[str, Path] = {}
    if engine is not None:
        paths[name or engine.resolve().name] = engine
    elif name is not None:
        raise UsageError("--served-model-name is for ENGINE; give others a name with --model NAME=DIR")
    paths |= named_directories("--model", named, set(paths))
    if not paths:
        raise UsageError("say what to serve: ENGINE, or --model NAME=DIR")
    return paths
