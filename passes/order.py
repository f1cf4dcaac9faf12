"""Puts passes into the order that their declarations ask for."""

from collections.abc import Mapping
from graphlib import TopologicalSorter
from typing import TypeVar

T = TypeVar("T")


def in_order(passes: Mapping[str, T], runs_after: Mapping[str, tuple[str, ...]]) -> list[T]:
    """The passes, each after those that it names; otherwise by name, so that the order is always the same."""
    unknown = {before for names in runs_after.values() for before in names} - set(passes)
    assert not unknown, f"runs_after names {sorted(unknown)}, but the passes are {sorted(passes)}"
    sorter = TopologicalSorter({name: sorted(runs_after[name]) for name in sorted(passes)})
    sorter.prepare()
    result: list[T] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        name = ready.pop(0)
        result.append(passes[name])
        sorter.done(name)
    return result
