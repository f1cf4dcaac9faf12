"""The engine that several tests run, and where."""

from collections.abc import Iterator

import pytest
from emulated import Built, EmulatedDevice, build

from llmc.runtime import devices


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmulatedDevice]]:
    """The devices that were opened."""
    opened: list[EmulatedDevice] = []

    def open_one() -> EmulatedDevice:
        opened.append(EmulatedDevice())
        return opened[-1]

    monkeypatch.setattr(devices, "open_cuda", open_one)
    yield opened
