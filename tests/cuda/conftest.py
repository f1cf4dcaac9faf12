"""The engine and the models that several tests run, and where."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from emulated import Built, EmulatedDevice, build
from quantizable import compiled, save_model

from llmc.compiler.api import Compiled
from llmc.runtime import devices


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    """Small models by name, each traced once."""
    return cache(lambda name: compiled(save_model(name, tmp_path_factory.mktemp(name)), max_seq_len=256))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmulatedDevice]]:
    """The devices that were opened."""
    opened: list[EmulatedDevice] = []

    def open_one() -> EmulatedDevice:
        opened.append(EmulatedDevice())
        return opened[-1]

    monkeypatch.setattr(devices, "open_cuda", open_one)
    yield opened
