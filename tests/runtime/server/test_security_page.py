"""SECURITY.md and the API's description say what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("security_tables", ROOT / "build_scripts/security_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(generator: ModuleType) -> None:
    found = generator.PAGE.read_text(encoding="utf-8")
    assert found == generator.page(), "a route, field or limit has changed: python build_scripts/security_tables.py"


def test_how_problems_are_handled(generator: ModuleType) -> None:
    """S20: a private place to report them, and what is fixed within which time."""
    reports = generator.PAGE.read_text(encoding="utf-8").partition("## Reports")[2].partition("<!--")[0]
    assert "privately" in reports and "denial of service counts" in reports
    days = dict(re.findall(r"^\| (critical|high|other) \| [^|]+ \| (\d+) days \|", reports, re.MULTILINE))
    assert days == {"critical": "7", "high": "30", "other": "90"}


def test_every_field_has_bounds(generator: ModuleType) -> None:
    """S10: no number, list or object without a limit; texts are limited by the body."""
    rows = re.findall(r"^\| `\w+` \| (.*?) \|", "\n".join(generator._fields()), re.MULTILINE)
    assert len(rows) > 60
    for accepted in rows:
        for part in accepted.removesuffix(" (required)").split(" or "):
            assert part not in ("integer", "number", "object", "anything", ""), accepted


def test_the_description_and_docs(live: Any) -> None:
    with live.http() as http:
        described = http.get("/openapi.json").json()
        docs = http.get("/docs").text
    assert described["openapi"] == "3.1.0" and "/v1/models/{model}" in described["paths"]
    for path, operations in described["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in docs
    assert "temperature" in docs and not re.search(r"(src|href)=.?(https?:)?//", docs)
