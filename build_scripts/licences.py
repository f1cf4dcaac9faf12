"""Prints the licences of all that a CycloneDX bill of materials lists; fails if one has none, or one not seen before.

Usage: python build_scripts/licences.py dist/llmc.cdx.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KNOWN = re.compile(
    r"Apache-2\.0|MIT|MIT-0|BSD-[23]-Clause|0BSD|ISC|MPL-2\.0|PSF-2\.0|Python-2\.0|Zlib|CC0-1\.0|Unlicense"
    r"|License :: OSI Approved :: (Apache Software|BSD|MIT|Mozilla Public License 2\.0 \(MPL 2\.0\))( License)?"
)


def licences(component: dict[str, Any]) -> list[str]:
    """The identifiers, names or expressions of a component."""
    found = [c.get("expression") or c["license"].get("id") or c["license"]["name"] for c in component["licenses"]]
    return [str(name) for name in found]


def unknown(component: dict[str, Any]) -> Iterator[str]:
    """Those of its licences that nobody has looked at."""
    for name in licences(component):
        for part in re.split(r" (?:AND|OR) ", name.replace("(MPL 2.0)", "\0").strip("()")):
            if KNOWN.fullmatch(part.replace("\0", "(MPL 2.0)")) is None:
                yield part


def main(path: Path) -> int:
    """The exit code."""
    components = json.loads(path.read_text(encoding="utf-8"))["components"]
    bad = []
    print("| package | version | licence |\n|---|---|---|")
    for component in sorted(components, key=lambda c: str(c["name"]).lower()):
        if not component.get("licenses") or list(unknown(component)):
            bad.append(component["name"])
        print(
            f"| {component['name']} | {component['version']} | {', '.join(licences({'licenses': [], **component}))} |"
        )
    if bad:
        print(f"look at the licences of {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
