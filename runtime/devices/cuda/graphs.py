"""Launches that are recorded once and replayed: as many as the memory that is planned for them holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.plugins.cuda import Launch
    from llmc.runtime.devices.cuda.device import Device


class Graphs:
    """Keeps graphs by what they are of. Those of trees come in more sizes than fit; the one not used longest goes.

    ``most_launches``: of all graphs together; the last one made stays even if it has more.
    """

    def __init__(self, device: Device, most_launches: int) -> None:
        self._device, self._most = device, most_launches
        self._made: dict[Hashable, tuple[Any, int]] = {}
        self.launches = 0
        """Of the graphs that there are."""

    def replay(self, key: Hashable, launches: Callable[[], Sequence[Launch]]) -> None:
        """Run the graph of ``key``, which is recorded from ``launches()`` if there is none."""
        found = self._made.pop(key, None)
        if found is None:
            recorded = launches()
            self._make_room(len(recorded))
            found = self._device.capture(recorded), len(recorded)
            self.launches += found[1]
        self._made[key] = found  # the last is the one used last
        self._device.replay(found[0])

    def _make_room(self, count: int) -> None:
        while self._made and self.launches + count > self._most:
            graph, size = self._made.pop(next(iter(self._made)))
            self._device.drop(graph)
            self.launches -= size
