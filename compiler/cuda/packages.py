"""How large the packages are that engines for CUDA take beside llmc, as installed here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from llmc.compiler.progress import format_bytes

PACKAGES = (
    ("cuda-bindings", "to run and to build, with the driver of the machine"),
    ("cuda-pathfinder", "needed by it"),
    ("nvidia-cuda-nvrtc", "to build"),
)


def lines() -> Iterator[str]:
    """One for each package."""
    for name, purpose in PACKAGES:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            yield f"{name}: not installed ({purpose}); pip install 'llmc-engine[cuda]'"
            continue
        places = [file.locate() for file in found.files or ()]
        size = sum(place.stat().st_size for place in places if place.is_file())  # type: ignore[attr-defined]
        yield f"{name} {found.version}: {format_bytes(size)} installed ({purpose})"
