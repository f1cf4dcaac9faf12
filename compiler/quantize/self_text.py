"""Calibration text that the model writes itself, run by our own runtime from an engine of the unquantized model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.compiler.engine_writer import write_files, write_manifest
from llmc.compiler.progress import Progress
from llmc.compiler.staging import Staging, disk_errors
from llmc.errors import UsageError
from llmc.quantization.calibration import CalibrationSettings
from llmc.runtime.chat_template import ChatTemplate

if TYPE_CHECKING:
    from llmc.compiler.engine_writer import EngineContents
    from llmc.runtime.llm import LLM

SAMPLES = 128
"""Pieces, if the user names no number."""

TEMPERATURE, TOP_P = 1.0, 0.95
"""So that pieces differ, and few tokens are drawn that the model takes for unlikely."""

AT_ONCE = 32
"""Texts that are written side by side; which ones changes none of them."""

MARKER = "MARKER"


def write_texts(
    settings: CalibrationSettings,
    contents: EngineContents,
    target: Path,
    progress: Progress,
) -> list[Sequence[int]]:
    """Token ids of texts: what the model writes as a user of a chat, or after the beginning of a text.

    Args:
        settings: how many, how long, and the seed.
        contents: an engine of the unquantized model.
        target: the engine that is being built; the other one is made beside it, and removed.
        progress: told what is being done.

    Raises:
        ResourceError: there is no room for it.
    """
    from llmc.runtime.llm import LLM

    target = Path(os.path.realpath(target))
    folder = target.with_name(f".{target.name}.llmc-self")
    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)  # left by a build that was killed
        folder.mkdir()
    try:
        staging = Staging(folder)
        progress.step("writing the unquantized model")
        write_files(staging, contents, Progress())
        write_manifest(staging, contents)
        prefix = () if contents.tokenizer is None else contents.tokenizer.prefix_ids
        return _write(LLM(folder), settings, _beginning(contents), len(prefix), progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(
    llm: LLM, settings: CalibrationSettings, prompt: list[int], prefix: int, progress: Progress
) -> list[Sequence[int]]:
    """Texts that fill a window each, without the prefix that every window gets."""
    from llmc.runtime.request import SamplingParams

    count, room = settings.samples or SAMPLES, settings.length - len(prompt)
    if room < 1:
        raise UsageError(f"--calib-length {settings.length}: the beginning of a text takes {len(prompt)} tokens")
    progress.step("the model writes its calibration text", count, "texts")
    texts: list[Sequence[int]] = []
    for begin in range(0, count, AT_ONCE):
        numbers = range(begin, min(count, begin + AT_ONCE))
        each = [
            SamplingParams(
                max_tokens=room,
                temperature=TEMPERATURE,
                top_p=TOP_P,
                seed=settings.seed * 1_000_003 + number,
                ignore_eos=True,
            )
            for number in numbers
        ]
        results = llm.generate([prompt] * len(each), each)
        texts += [[*prompt[prefix:], *result.token_ids] for result in results]
        progress.advance(len(each))
    return texts


def _beginning(contents: EngineContents) -> list[int]:
    """The ids that come before what a user says, or before a text."""
    facts, tokenizer = contents.model, contents.tokenizer
    if tokenizer is not None and "chat_template.jinja" in tokenizer.files:
        special = json.loads(tokenizer.files.get("special_tokens.json", b"{}"))
        template = ChatTemplate(tokenizer.files["chat_template.jinja"].decode(), special)
        try:
            text = template.render([{"role": "user", "content": MARKER}], add_generation_prompt=False)
        finally:
            template.close()
        if MARKER in text:
            from tokenizers import Tokenizer

            loaded = Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
            ids: list[int] = loaded.encode(text[: text.index(MARKER)], add_special_tokens=False).ids
            prefix = list(tokenizer.prefix_ids)
            if ids:
                return ids if ids[: len(prefix)] == prefix else prefix + ids
    if tokenizer is not None and tokenizer.prefix_ids:
        return list(tokenizer.prefix_ids)
    begin = facts.bos_token_id if facts.bos_token_id is not None else next(iter(facts.eos_token_ids), None)
    if begin is None:
        raise UsageError("--calib self: the model has no token that begins a text; give a file")
    return [begin]
