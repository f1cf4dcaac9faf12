"""Finds what the modules of a package hold, so that adding a file is enough: there is no list to edit."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def modules(package: str) -> Iterator[ModuleType]:
    """Import every public module and subpackage of a package, in name order."""
    root = importlib.import_module(package)
    for name in sorted({info.name for info in pkgutil.iter_modules(root.__path__)}):
        if not name.startswith("_"):
            yield importlib.import_module(f"{package}.{name}")


def instances(package: str, kind: type[T]) -> list[T]:
    """The objects of a kind that the modules of a package hold, each once, in name order."""
    found = {id(value): value for m in modules(package) for value in vars(m).values() if isinstance(value, kind)}
    return list(found.values())


def subclasses(package: str, kind: type[T]) -> list[type[T]]:
    """The subclasses of a kind that the modules of a package define themselves, in name order."""
    return [
        value
        for m in modules(package)
        for value in vars(m).values()
        if isinstance(value, type) and issubclass(value, kind) and value.__module__ == m.__name__ and value is not kind
    ]
