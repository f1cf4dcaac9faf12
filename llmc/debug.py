"""The debug variables: these five and no others."""

import os
from pathlib import Path

VARIABLES = {
    "LLMC_DUMP": "directory that receives the graph after each pass that changed it (07-fuse_rope.txt)",
    "LLMC_CHECK": "1: run the references before and after each pass and compare",
    "LLMC_REFERENCE": "1: run the references instead of the kernels",
    "LLMC_TRACE": "file that receives a timeline of every step (Chrome trace format)",
    "LLMC_DEBUG": "1: show tracebacks",
}


def dump_dir() -> Path | None:
    """Where graphs are written after each pass, or None."""
    value = os.environ.get("LLMC_DUMP")
    return Path(value) if value else None


def trace_file() -> Path | None:
    """Where the timeline goes, or None."""
    value = os.environ.get("LLMC_TRACE")
    return Path(value) if value else None


def enabled(name: str) -> bool:
    """Whether a switch of VARIABLES is on."""
    assert name in VARIABLES, f"{name} is not a declared debug variable"
    return os.environ.get(name, "") not in ("", "0")
