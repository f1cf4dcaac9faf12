"""What the executor asks of a device; CudaDevice of driver.py is one, and the emulator of the tests another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.plugins.cuda import Launch


class Device(Protocol):
    """A device with one stream: everything but `sync` and `put` is done in order, and returns before it is."""

    capability: int
    name: str

    def alloc(self, size: int, what: str) -> int:
        """The address of so many bytes, aligned to 256.

        Raises:
            ResourceError: there is no room for ``what``; states need and have.
        """
        ...

    def memory(self) -> tuple[int, int]:
        """Free bytes, and all of them."""
        ...

    def host(self, size: int) -> NDArray[np.uint8]:
        """Memory of this machine that the device copies from and to by itself."""
        ...

    def put(self, address: int, data: NDArray[Any]) -> None:
        """Copy bytes to the device; they may be changed when this returns."""
        ...

    def send(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy from memory of `host`."""
        ...

    def fetch(self, data: NDArray[np.uint8], address: int) -> None:
        """Copy to memory of `host`; there after `sync`."""
        ...

    def fill(self, address: int, value: int, size: int) -> None:
        """Set bytes."""
        ...

    def load(self, images: Mapping[str, bytes]) -> None:
        """Load kernels, by name."""
        ...

    def run(self, launches: Sequence[Launch]) -> None:
        """Launch kernels that are loaded."""
        ...

    def capture(self, launches: Sequence[Launch]) -> Any:
        """A graph of launches, for `replay`."""
        ...

    def replay(self, graph: Any) -> None:
        """Run the launches of a graph."""
        ...

    def drop(self, graph: Any) -> None:
        """Give back a graph, which may be running still."""
        ...

    def sync(self) -> None:
        """Wait until all is done."""
        ...

    def close(self) -> None:
        """Give back everything: memory, kernels, graphs. A second time does nothing."""
        ...
