"""What a build tells about itself: report.json for programs, and report.html, one page without any other file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmc.compiler.engine_writer import EngineContents, to_json
from llmc.compiler.report.page import render
from llmc.compiler.staging import Staging

if TYPE_CHECKING:
    from llmc.compiler.gate import Quality

JSON, HTML = "report.json", "report.html"


def write_report(
    staging: Staging,
    contents: EngineContents,
    quality: Quality | None = None,
) -> Mapping[str, Any]:
    """Write both files, in place of a report.json that is there.

    Args:
        staging: where to; its files are in the page's table of sizes.
        contents: of the engine.
        quality: what was measured, or None.

    Returns:
        The content of report.json.
    """
    report = {**contents.report, **(quality.to_json() if quality else {})}
    staging.write(JSON, to_json(report))
    sizes = {name: entry.size for name, entry in sorted(staging.files.items()) if name not in (JSON, HTML)}
    staging.write(HTML, render(contents, report, sizes, quality.figures.recorded() if quality else None))
    return report
