"""Where real models and texts are, and engines that several tests use."""

import os
import random
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]

hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def seed(name: str) -> None:
    """Random numbers that no test seeds are those of its own name, not of what ran before."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    for module, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if module in sys.modules:
            getattr(sys.modules[module], function)(number)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path) -> None:
    seed(module_path.name)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> None:
    seed(f"{fixturedef.argname} {getattr(request, 'param', '')}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed(item.name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-server", help="run the kernels of this aarch64 build, under qemu")


def pytest_configure(config: pytest.Config) -> None:
    if server := config.getoption("--kernel-server"):
        sys.path.insert(0, str(ROOT / "tests/aarch64"))
        import remote_kernels

        remote_kernels.install(Path(server))


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
