"""Moves what the cache holds of positions: drafts that were accepted come to stand behind each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.errors import KernelError
from llmc.plugins.paged_attention import cuda as attention
from llmc.runtime.devices.cuda.program import aligned

if TYPE_CHECKING:
    from llmc.plugins.cuda import Launch
    from llmc.runtime.devices.cuda.device import Device
    from llmc.runtime.devices.cuda.program import Memory
    from llmc.runtime.plan import KvSlot


class Moves:
    """Copies of positions between two steps. They use the device's memory for inputs, which has so many bytes.

    ``used``: of the memory that the device copies from, since the last wait.
    """

    def __init__(self, device: Device, memory: Memory, inputs: int) -> None:
        self._device, self._memory, self._inputs = device, memory, inputs
        self._host, self.used = device.host(2 * inputs), 0

    def launches(
        self,
        slots: Sequence[KvSlot],
        blocks: NDArray[np.int32],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
    ) -> list[Launch]:
        """Those for positions of a sequence with these blocks, in all slots; the arrays are on their way.

        Raises:
            KernelError: they are too many.
        """
        arrays = [np.ascontiguousarray(array, np.int32).view(np.uint8) for array in (blocks, sources, targets)]
        size = sum(aligned(array.nbytes) for array in arrays)
        if self.used + size > len(self._host):
            self._device.sync()  # what earlier calls put there is copied then
            self.used = 0
        if size > min(len(self._host), self._inputs):
            raise KernelError(f"{len(sources)} positions to move are more than a step has")
        begin, at, places = self.used, 0, []
        for array in arrays:
            self._host[begin + at : begin + at + array.nbytes] = array
            places.append(self._memory.inputs + at)
            at += aligned(array.nbytes)
        self.used += at
        self._device.send(self._memory.inputs, self._host[begin : begin + at])
        return [
            attention.move_positions(
                cache, slot.kv_heads, (slot.key_dim, slot.value_dim), places[0], places[1], places[2], len(sources)
            )
            for cache, slot in zip(self._memory.caches, slots, strict=True)
        ]
