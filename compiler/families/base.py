"""What a model family fix is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from llmc import discover


@dataclass(frozen=True)
class Fix:
    """Makes one family traceable whose code the hooks don't reach. Most families need none.

    ``patch`` is given the model that is to be traced, on the meta device, and the engine's longest sequence. It
    replaces forwards on the modules of that model, never on classes or in modules of transformers.
    """

    architectures: tuple[str, ...]
    why: str
    patch: Callable[[nn.Module, int], None]
    tiny: Callable[[], Any]
    """Makes a small config of the family, for the fix's test."""
    reference: str = "eager"
    """The attention implementation of transformers to compare with."""


def modules_of(model: nn.Module, class_name: str) -> Iterator[Any]:
    """The modules of a model whose class has this name, or is derived from one that has it."""
    for module in model.modules():
        if any(kind.__name__ == class_name for kind in type(module).__mro__):
            yield module


@cache
def all_fixes() -> dict[str, Fix]:
    """Every fix in this folder, by the architecture that it is for."""
    fixes = discover.instances("llmc.compiler.families", Fix)
    return {architecture: fix for fix in fixes for architecture in fix.architectures}
