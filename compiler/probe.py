"""Norms, activations and gates of experts, recognised by evaluating them: what a class is called doesn't matter.

Modules on the meta device are evaluated too, on a small real copy. It has to happen before tracing: numbers don't exist
under a fake tensor mode.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CompileError
from llmc.plugins.elementwise.reference import torch_function
from llmc.plugins.moe.reference import activate_gated
from llmc.plugins.norm import KINDS
from llmc.plugins.norm.reference import reference as norm

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "quick_gelu", "softplus", "copy")
"""The functions of llmc::elementwise that modules are compared with."""

_NOT_NORMS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)
_TOLERANCE = 1e-6
"""Relative; probes run in float64, but some modules round to float32 inside."""


@dataclass(frozen=True)
class NormFunction:
    """Attributes of llmc::norm."""

    epsilon: float
    kind: str
    offset: float


@dataclass(frozen=True)
class ExpertFunction:
    """Attributes of llmc::moe."""

    function: str
    gated: bool
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0

    @classmethod
    def of(cls, activation: str | None, module: nn.Module) -> ExpertFunction:
        """The plain gated form with this activation, for family fixes.

        Raises:
            CompileError: the activation is not known.
        """
        if activation is None:
            raise CompileError(f"{type(module).__name__}: the activation of its experts is not known")
        return cls(activation, gated=True)

    def attributes(self) -> dict[str, Any]:
        """As keywords of the op."""
        return asdict(self)


def replace_norms_and_activations(model: nn.Module) -> None:
    """Let every leaf module that is a norm or a known activation call the op.

    Modules that take more than one input (gated norms) or have other parameters than weight and bias stay as they are.
    """
    known: dict[Any, NormFunction | str | None] = {}
    for module in model.modules():
        if not _is_candidate(module):
            continue
        key = _signature(module)
        if key not in known:
            known[key] = (_activation_of(module) if not key[1] else None) or _norm_of(module)
        found = known[key]
        if isinstance(found, NormFunction):
            module.forward = _norm_forward(module, found)
        elif found is not None and found != "copy":
            module.forward = _activation_forward(found)


def name_expert_functions(model: nn.Module) -> None:
    """Recognise what every experts module computes between its two products; the experts hook asks for it."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "has_gate") and hasattr(module, "_apply_gate"):
            module._llmc_function = _expert_function_of(module)


def expert_function(module: nn.Module) -> ExpertFunction:
    """What ``name_expert_functions`` found for an experts module.

    Raises:
        CompileError: nothing that llmc::moe can compute.
    """
    found = getattr(module, "_llmc_function", None)
    if found is None:
        raise CompileError(f"{type(module).__name__}: what its experts compute between their two products is not known")
    assert isinstance(found, ExpertFunction), f"{found} is no expert function"
    return found


def activation_name(function: Callable[[Tensor], Tensor]) -> str | None:
    """Which of ``ACTIVATIONS`` a function computes, or None."""
    x = torch.linspace(-9, 9, 257, dtype=torch.float64)
    y = _evaluate(function, x)
    if y is None:
        return None
    errors = {name: _error(torch_function(name)(x), y) for name in ACTIVATIONS}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < _TOLERANCE else None


def _is_candidate(module: nn.Module) -> bool:
    if isinstance(module, _NOT_NORMS) or next(module.children(), None) is not None:
        return False
    if set(module._parameters) - {"weight", "bias"}:
        return False
    inputs = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(inputs) == 1 and inputs[0].kind in (inputs[0].POSITIONAL_OR_KEYWORD, inputs[0].POSITIONAL_ONLY)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """Modules with the same signature compute the same function (of the input and their weights)."""
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False))
    plain = (int, float, str, bool, tuple)
    facts = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, plain) and not k.startswith("_")))
    # A function in an attribute (a lambda in an activation) tells instances apart: don't share the finding.
    other = (
        ()
        if all(isinstance(v, (*plain, type(None))) or k.startswith("_") for k, v in vars(module).items())
        else (id(module),)
    )
    return (type(module), shapes, facts, other)


def _real_copy(module: nn.Module) -> nn.Module | None:
    try:
        real = copy.deepcopy(module)
    except (RuntimeError, TypeError):
        return None
    generator = torch.Generator().manual_seed(3)
    for name, p in real.named_parameters(recurse=False):
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        setattr(real, name, nn.Parameter(values, requires_grad=False))
    return real.eval()


def _evaluate(function: Callable[[Tensor], Any], x: Tensor) -> Tensor | None:
    """function(x) as float64, or None if it fails or gives something else than numbers of x's kind."""
    try:
        with torch.no_grad():
            y = function(x.clone())
    except Exception:  # any module may be tried, and those that don't take such an input may raise anything
        return None
    return y.double() if isinstance(y, Tensor) and y.device == x.device and y.is_floating_point() else None


def _error(expected: Tensor, found: Tensor) -> float:
    """Largest difference, relative to each row's largest value."""
    if expected.shape != found.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    scale = found.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((expected - found).abs() / scale).max())


def _activation_of(module: nn.Module) -> str | None:
    real = _real_copy(module)
    return None if real is None else activation_name(real)


def _norm_of(module: nn.Module) -> NormFunction | None:
    """Fit {rms, layer, l2} x {weight, 1 + weight} x epsilon to the module's outputs on rows of many magnitudes."""
    real = _real_copy(module)
    if real is None:
        return None
    weight, bias = real._parameters.get("weight"), real._parameters.get("bias")
    generator = torch.Generator().manual_seed(4)
    for shape in _row_shapes(module, weight):
        x = torch.randn((6, *shape), generator=generator, dtype=torch.float64) + 0.3
        x *= torch.tensor([1.0, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6], dtype=torch.float64).view(-1, *[1] * len(shape))
        y = _evaluate(real, x)
        if y is None:
            continue
        choices = itertools.product(KINDS, (0.0, 1.0) if weight is not None else (0.0,), _epsilons(module))
        errors = {
            (kind, offset, epsilon): _error(norm(x, weight, bias, epsilon=epsilon, kind=kind, offset=offset), y)
            for kind, offset, epsilon in choices
        }
        best = min(errors, key=errors.__getitem__)
        if errors[best] < _TOLERANCE * 10:
            return NormFunction(kind=best[0], offset=best[1], epsilon=best[2])
    return None


def _row_shapes(module: nn.Module, weight: Tensor | None) -> Iterator[tuple[int, ...]]:
    """Shapes of x without the leading axis to try: the weight's, else a size that an attribute names, else any."""
    if weight is not None:
        yield tuple(weight.shape)
        return
    for name in ("normalized_shape", "hidden_size", "dim"):
        size = getattr(module, name, None)
        shape = tuple(size) if isinstance(size, tuple | list) else (size,)
        if all(isinstance(s, int) and s > 0 for s in shape):
            yield shape
    yield (16,)


def _epsilons(module: nn.Module) -> list[float]:
    own = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1]
    return list(dict.fromkeys([*own, *_EPSILONS]))


def _norm_forward(module: nn.Module, found: NormFunction) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        y: Tensor = torch.ops.llmc.norm(x, weight, bias, **asdict(found))
        return y

    return forward


def _activation_forward(name: str) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.llmc.elementwise(x, None, None, function=name)
        return y

    return forward


def _expert_function_of(module: Any) -> ExpertFunction | None:
    if not module.has_gate:
        name = activation_name(module.act_fn)
        return None if name is None else ExpertFunction(name, gated=False)
    numbers = {v for v in vars(module).values() if isinstance(v, float) and v > 0}
    largest = max(numbers, default=1.0)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((64, 16), generator=generator, dtype=torch.float64) * 2 * max(1.0, min(largest, 100.0))
    y = _evaluate(module._apply_gate, x)
    if y is None:
        return None
    for limit, interleaved in itertools.product([0.0, *sorted(numbers)], (False, True)):
        forms = [(name, 0.0) for name in ACTIVATIONS] + [("gpt_oss", alpha) for alpha in sorted(numbers)]
        for function, alpha in forms:
            form = ExpertFunction(function, True, interleaved, alpha, limit)
            if _error(activate_gated(x, function, interleaved=interleaved, alpha=alpha, limit=limit), y) < _TOLERANCE:
                return form
    return None
