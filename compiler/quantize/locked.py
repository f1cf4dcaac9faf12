"""`llmc build --locked recipe.json`: the same engine once more, or an error that says what has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmc.errors import CompileError, UsageError
from llmc.quantization.calibration import CalibrationSettings
from llmc.quantization.recipe import Recipe, recipe_from
from llmc.runtime import strict

SECTIONS = ("options", "versions", "inputs")
OF_RECIPE = ("method", "rules", "lm_head", "embedding", "budget", "max_ppl_increase", "calibration")
OF_CALIBRATION = ("source", "samples", "length", "seed")
"""Keys of a recipe; the other ones of the section are results."""

OPTIONS: Mapping[str, type] = {
    "target": str,
    "dtype": str,
    "kv_dtype": str,
    "max_seq_len": int,
    "max_batch_tokens": int,
    "max_sequences": int,
    "quantization": str,
    "dequantize": bool,
    "compute": str,
    "allow_hard_links": bool,
}
"""Options of BuildConfig that recipe.json lists; a quantization has a section of its own."""


@cache
def read(path: Path) -> Mapping[str, Any]:
    """The content of a recipe.json.

    Raises:
        UsageError: there is none.
    """
    try:
        value = strict.parse_json(path.read_bytes(), str(path), UsageError)
    except OSError as problem:
        raise UsageError(f"--locked {path}: {problem.strerror or problem}") from None
    if not isinstance(value, dict) or any(not isinstance(value.get(name), dict) for name in SECTIONS):
        raise UsageError(f"--locked {path}: no recipe.json of an engine; it must have {', '.join(SECTIONS)}")
    if damaged := next((name for name, fits in _SHAPES.items() if not fits(value.get(name))), None):
        raise UsageError(f"--locked {path}: its section {damaged} is damaged")
    return value


def _is_options(options: Any) -> bool:
    return all(type(value) is OPTIONS.get(name) for name, value in options.items())


def _is_inputs(inputs: Any) -> bool:
    return all(isinstance(entry, dict) and isinstance(entry.get("sha256"), str) for entry in inputs.values())


def _is_quantization(section: Any) -> bool:
    if section is None:
        return True
    if not isinstance(section, dict) or not isinstance(section.get("compute"), str):
        return False
    calibration = section.get("calibration")
    if calibration is None:
        return True
    return isinstance(calibration, dict) and all(key in calibration for key in (*OF_CALIBRATION, "sha256"))


def _is_kv_cache(section: Any) -> bool:
    return section is None or _is_quantization(section | {"compute": ""} if isinstance(section, dict) else section)


_SHAPES = {
    "options": _is_options,
    "inputs": _is_inputs,
    "quantization": _is_quantization,
    "kv_cache": _is_kv_cache,
}


def options_of(path: Path) -> dict[str, Any]:
    """The options of the build that wrote it, for BuildConfig, but for those of the quantization.

    Raises:
        UsageError: see ``read``.
    """
    return {key: value for key, value in read(path)["options"].items() if key != "quantization"}


def section_of(path: Path) -> Mapping[str, Any]:
    """What it says of the quantization; empty if there was none."""
    section: Mapping[str, Any] = read(path).get("quantization") or {}
    return section


def recipe_of(path: Path) -> Recipe | None:
    """The recipe of the quantization.

    Raises:
        UsageError: it is none of this version.
    """
    section = section_of(path)
    if not section:
        return None
    values = {key: section[key] for key in OF_RECIPE if key in section}
    calibration = values.pop("calibration", None)
    if calibration is not None:
        values["calibration"] = {key: calibration[key] for key in OF_CALIBRATION}
    return recipe_from(values, f"--locked {path}")


def kv_calibration_of(path: Path) -> CalibrationSettings | None:
    """How the text was made that the KV cache was measured on; None if it was not.

    Raises:
        UsageError: it is none of this version.
    """
    calibration = (read(path).get("kv_cache") or {}).get("calibration")
    if calibration is None:
        return None
    values = {"calibration": {key: calibration[key] for key in OF_CALIBRATION}}
    return recipe_from(values, f"--locked {path}: kv_cache").calibration


def checked_kv_cache(path: Path, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of a recipe.json that says how the KV cache was measured, once it is as before.

    Raises:
        CompileError: the tokens differ, or the kernels.
    """
    before = read(path).get("kv_cache") or {}
    check_calibration(before, section, section.get("isa"))
    return before


def check(path: Path, inputs: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Compare the files of the model and the versions of libraries.

    Raises:
        CompileError: lists what differs.
    """
    wanted = read(path)
    found = [
        f"{name} is {versions.get(name, 'missing')}, was {version}"
        for name, version in wanted["versions"].items()
        if versions.get(name) != version
    ]
    for name, entry in wanted["inputs"].items():
        if name not in inputs:
            found.append(f"{name} of the model is missing")
        elif inputs[name] != entry:
            found.append(f"{name} of the model has SHA-256 {inputs[name]['sha256'][:12]}, had {entry['sha256'][:12]}")
    found += [f"{name} of the model is new" for name in inputs if name not in wanted["inputs"]]
    if found:
        raise CompileError(f"--locked {path}: can't repeat that build: {'; '.join(found)}")


def check_calibration(section: Mapping[str, Any], described: Mapping[str, Any], isa: str | None) -> None:
    """Compare the tokens of the calibration, and the kernels that run it (None: there is none).

    Raises:
        CompileError: they differ.
    """
    before, now = section.get("calibration"), described.get("calibration")
    hashes = [None if value is None else value["sha256"] for value in (before, now)]
    if hashes[0] != hashes[1]:
        raise CompileError(
            f"--locked: the calibration tokens have SHA-256 {hashes[1]}, had {hashes[0]}; give the same text "
            f"({(before or {}).get('source')}) with --calib"
        )
    if section.get("isa") != isa:
        raise CompileError(
            f"--locked: that build was calibrated with the kernels for {section.get('isa')}, this machine has {isa}: "
            "its codes would be others; build on such a machine, or without --locked"
        )
