"""What a plugin is: an op of the ``llmc`` domain, declared as data."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Inputs that every kernel of an op must handle. ``None`` is an absent optional input.

    Arrays are numpy; ``context`` carries what ops that mix rows need besides (see plugins/paged_attention).
    """

    inputs: tuple[Any, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    context: Any = None


@dataclass(frozen=True)
class Op:
    """An op: its name, its inputs (a trailing ``?`` marks an optional one), outputs and attributes.

    ``plugins/<name>/reference.py`` holds ``reference(*inputs, **attributes)``, torch code that says what the op means
    and is right in float64 too, and ``samples(rng) -> Iterator[Sample]``. It is imported when first asked for, so the
    runtime never loads torch. ``plugins/<name>/<name>_cpu.cpp`` is held to it by tests/plugins/test_ops.py.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)
    attributes: Mapping[str, type] = field(default_factory=dict)
    rtol: float = 1e-5
    atol: float = 1e-5

    @property
    def reference(self) -> Callable[..., Any]:
        """The torch function that defines the op."""
        function: Callable[..., Any] = self._module.reference
        return function

    @property
    def fake(self) -> Callable[..., Any]:
        """Computes shapes only, for references whose control flow depends on values; others stand for themselves."""
        function: Callable[..., Any] = getattr(self._module, "fake", self._module.reference)
        return function

    @property
    def samples(self) -> Callable[..., Iterator[Sample]]:
        """Inputs for the contract test, from a ``numpy.random.Generator``."""
        function: Callable[..., Iterator[Sample]] = self._module.samples
        return function

    @cached_property
    def _module(self) -> Any:
        return importlib.import_module(f"llmc.plugins.{self.name}.reference")
