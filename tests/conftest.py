"""Where real models and texts are, and engines that several tests use."""

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def models_folder() -> Path:
    return Path(os.environ.get("LLMC_MODELS", "~/.cache/llmc-models")).expanduser()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The papers' folder beside the clone, with real texts and the smallest real model."""
    folder = ROOT.parent / "shared"
    if not (folder / "models/stories260K").is_dir():
        pytest.skip("needs the shared folder beside the clone")
    return folder


@pytest.fixture(scope="session")
def real_model() -> object:
    """A function: the directory of a real model by name; skips the test where it is missing."""

    def find(name: str) -> Path:
        path = models_folder() / name
        if not path.exists():
            pytest.skip(f"needs {name} in $LLMC_MODELS")
        return path

    return find
