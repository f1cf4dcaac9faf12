"""Graphs of launches: as many as the plan of the memory has room for."""

from typing import Any

import numpy as np
import pytest
from cuda_models import executor_for, gpu_for
from driver import counts
from emulated import Built
from test_executor import batch

from llmc.runtime.devices.cuda import executor as executor_module
from llmc.runtime.devices.cuda import memory
from llmc.runtime.devices.cuda.graphs import Graphs


class Recorder:
    """A device that tells what became of graphs."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.dropped: list[Any] = []
        self.ran: list[Any] = []

    def capture(self, launches: list[Any]) -> Any:
        self.made.append(launches)
        return launches

    def replay(self, graph: Any) -> None:
        self.ran.append(graph)

    def drop(self, graph: Any) -> None:
        self.dropped.append(graph)


def test_the_one_not_used_longest_goes() -> None:
    device = Recorder()
    graphs = Graphs(device, 6)  # type: ignore[arg-type]
    for name, size in (("a", 2), ("b", 2), ("a", 2), ("c", 3), ("a", 2), ("d", 9), ("a", 2)):
        graphs.replay(name, lambda name=name, size=size: [name] * size)  # type: ignore[misc]
    assert [graph[0] for graph in device.ran] == ["a", "b", "a", "c", "a", "d", "a"]
    assert [graph[0] for graph in device.made] == ["a", "b", "c", "d", "a"]
    assert [graph[0] for graph in device.dropped] == ["b", "c", "a", "d"]
    assert graphs.launches == 2


def test_trees_of_any_size_keep_to_the_plan(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one graph, results are those of trees that all have theirs."""
    tokens, trees = list(range(10, 24)), []
    for size in range(1, 5):  # drafts that follow the same token
        masks = [1, *(1 | 2 << draft for draft in range(size))]
        trees.append(batch([3, *range(5, 5 + size)], 14, [14, *[15] * size], masks))
    found = []
    for room in (1, 4):
        if room == 1:
            monkeypatch.setattr(executor_module, "LAUNCH_BYTES", 1 << 40)
        with gpu_for(built.engine) as gpu, executor_for(built.engine) as executor:
            executor.step(batch(tokens, 0))
            found.append([executor.step(tree).copy() for tree in [*trees, *trees]])
            assert counts(gpu)["graphs"] == room
            assert room == 1 or executor._graphs.launches * memory.LAUNCH_BYTES <= executor.memory.graphs
        monkeypatch.undo()
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
