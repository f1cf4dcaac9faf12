"""The emulator as a device of the executor, without the driver: for tests of whole models that are quick."""

from pathlib import Path
from typing import Any, NamedTuple

import engines
import numpy as np
from emulator import Emulator

from llmc.plugins.cuda import Launch
from llmc.runtime.engine import Engine, load_engine

CONFIG = engines.small_llama()


class Built(NamedTuple):
    """A model of transformers and its engine."""

    model: Any
    engine: Engine


def build(folder: Path) -> Built:
    """A small Llama for sm_90."""
    sizes = {"max_batch_tokens": 64, "max_sequences": 8}
    model, path = engines.build(CONFIG, folder, target="cuda:sm_90", dtype="bfloat16", **sizes)
    return Built(model, load_engine(path))


class EmulatedDevice:
    """Implements runtime.devices.cuda.device.Device. Kernels are those of the sources, not of the engine's cubins."""

    def __init__(self, capability: int = 90, mode: str = "plain") -> None:
        self.capability, self.name = capability, f"emulator sm_{capability}"
        self.emulator = Emulator(mode, order=0)
        self.names: set[str] = set()
        self.copies = self.replays = self.waits = 0

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def alloc(self, size: int, what: str) -> int:
        return self.emulator.alloc(size, what, known=True)

    def close(self) -> None:
        self.emulator.free()

    def host(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def put(self, address: int, data: Any) -> None:
        self.emulator.set(address, data)

    def send(self, address: int, data: np.ndarray) -> None:
        self.copies += 1
        self.emulator.set(address, data)

    def fetch(self, data: np.ndarray, address: int) -> None:
        data[:] = self.emulator.get(address, data.shape, np.uint8)

    def fill(self, address: int, value: int, size: int) -> None:
        self.emulator.set(address, np.full(size, value, np.uint8))

    def load(self, images: dict[str, bytes]) -> None:
        assert all(image[:4] == b"\x7fELF" for image in images.values())
        self.names |= images.keys()

    def run(self, launches: list[Launch]) -> None:
        for launch in launches:
            assert launch.kernel.name in self.names, f"{launch.kernel.name} is not loaded"
            self.emulator.launch(launch)

    def capture(self, launches: list[Launch]) -> list[Launch]:
        assert all(launch.kernel.name in self.names for launch in launches)
        return launches

    def replay(self, graph: list[Launch]) -> None:
        self.replays += 1
        self.run(graph)

    def drop(self, graph: list[Launch]) -> None:
        """It has nothing of the device."""

    def sync(self) -> None:
        self.waits += 1
