"""S19: what a release pins and lists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "build_scripts/serve.lock").read_text()
PINS = re.findall(r"^([\w.-]+)==(\S+)([^\\\n]*)\\\n((?:    --hash=.*\n?)+)", LOCK, re.MULTILINE)


def test_everything_in_the_lock_has_hashes() -> None:
    names = re.findall(r"^[\w.-]+", LOCK, re.MULTILINE)
    assert len(names) == len(PINS) > 20
    for name, _, _, hashes in PINS:
        assert re.fullmatch(r"(    --hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+", hashes), name


def test_the_lock_is_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["serve"]]:
        wanted = Requirement(text)
        versions = [version for name, version, _, _ in PINS if name == wanted.name]
        assert versions and all(wanted.specifier.contains(v) for v in versions), f"{text}: see release.sh"


def test_an_image_is_made_of_what_is_pinned() -> None:
    text = (ROOT / "examples/deploy/Dockerfile").read_text()
    assert "--require-hashes -r /src/build_scripts/serve.lock" in text and "--no-deps /src" in text
    assert "--require-hashes -r build_scripts/serve.lock" in (ROOT / "build_scripts/release.sh").read_text()


@pytest.mark.parametrize(
    ("licences", "code"),
    [
        ([{"license": {"id": "MIT"}}, {"expression": "Apache-2.0 OR BSD-2-Clause"}], 0),
        ([{"license": {"name": "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"}}], 0),
        ([{"license": {"id": "AGPL-3.0-only"}}], 1),
        ([{"expression": "MIT AND SSPL-1.0"}], 1),
        ([], 1),
    ],
)
def test_licences_that_nobody_has_looked_at(tmp_path: Path, licences: list[Any], code: int) -> None:
    bill = {"components": [{"name": "x", "version": "1", "licenses": licences}]}
    (tmp_path / "bill").write_text(json.dumps(bill))
    command = [sys.executable, str(ROOT / "build_scripts/licences.py"), str(tmp_path / "bill")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code and "| x | 1 |" in done.stdout
