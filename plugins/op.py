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

    Plans know more than graphs, where weights are still what they mean: ``stored_inputs`` follow the others and
    ``stored_attributes`` (with what they are if they are left out) say how a plan stores weights, as quantization does.
    Then ``stored_samples(rng)`` gives more samples. An op that is ``plan_only`` stands in no graph.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)
    attributes: Mapping[str, type] = field(default_factory=dict)
    rtol: float = 1e-5
    atol: float = 1e-5
    stored_inputs: tuple[str, ...] = ()
    stored_attributes: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    plan_only: bool = False

    @property
    def plan_inputs(self) -> tuple[str, ...]:
        """The inputs of a step."""
        return self.inputs + self.stored_inputs

    @property
    def plan_attributes(self) -> Mapping[str, type]:
        """The attributes of a step."""
        return {**self.attributes, **{name: type(value) for name, value in self.stored_attributes.items()}}

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

    def plan_samples(self, rng: Any) -> Iterator[Sample]:
        """``samples``, and those of the forms that only plans have."""
        yield from self.samples(rng)
        if self.stored_inputs:
            yield from self._module.stored_samples(rng)

    @cached_property
    def _module(self) -> Any:
        return importlib.import_module(f"llmc.plugins.{self.name}.reference")
