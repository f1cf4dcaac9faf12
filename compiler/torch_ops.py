"""Registers every plugin's reference as ``torch.ops.llmc.<op>``, so that traced graphs hold the ops and can be run.

Inputs are positional, an absent optional one is None; attributes are keyword-only, so each node names them all:
``torch.ops.llmc.norm(x, weight, None, epsilon=1e-6, kind="rms", offset=0.0)``.
"""

import json
from functools import cache
from typing import Any

import torch

from llmc.plugins import Op, all_ops

_TYPES = {int: "int", float: "float", bool: "bool", str: "str"}


@cache
def register_ops() -> torch.library.Library:
    """Register all ops, once. The ops exist as long as the library that is returned (the cache holds it)."""
    library = torch.library.Library("llmc", "FRAGMENT")
    for op in all_ops().values():
        library.define(schema(op))
        library.impl(op.name, _Lazy(op, "reference"), "CompositeExplicitAutograd")
        torch.library.register_fake(f"llmc::{op.name}", _Lazy(op, "fake"), lib=library)
    return library


def schema(op: Op) -> str:
    """The op in torch's schema language."""
    inputs = [f"Tensor? {name[:-1]}" if name.endswith("?") else f"Tensor {name}" for name in op.inputs]
    attributes = [f"{_TYPES[kind]} {name}" for name, kind in op.attributes.items()]
    attributes += [f"{_TYPES[type(value)]} {name}={json.dumps(value)}" for name, value in op.stored_attributes.items()]
    arguments = inputs + (["*", *attributes] if attributes else [])
    outputs = ", ".join(["Tensor"] * len(op.outputs))
    return f"{op.name}({', '.join(arguments)}) -> {f'({outputs})' if len(op.outputs) > 1 else outputs}"


class _Lazy:
    """A function of ``plugins/<op>/reference.py``; the module is imported when the op is first called."""

    def __init__(self, op: Op, name: str) -> None:
        self._op, self._name = op, name
        self.__name__ = self.__qualname__ = f"{op.name}_{name}"

    def __call__(self, *inputs: Any, **attributes: Any) -> Any:
        return getattr(self._op, self._name)(*inputs, **attributes)
