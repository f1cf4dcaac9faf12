"""What llmc::elementwise means."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from llmc.plugins.elementwise import COMPARISONS, LOGIC, UNARY
from llmc.plugins.op import Sample

_NAMED_OTHERWISE: Mapping[str, Callable[..., Any]] = {
    "copy": torch.clone,
    "round": torch.round,
    "softplus": F.softplus,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "not": torch.logical_not,
    "div": lambda a, b: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "max": torch.maximum,
    "min": torch.minimum,
    "mod": torch.remainder,
    "equal": torch.eq,
    "not_equal": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "where": torch.where,
}


def torch_function(name: str) -> Callable[..., Any]:
    """The torch function of one of ``FUNCTIONS``."""
    return _NAMED_OTHERWISE[name] if name in _NAMED_OTHERWISE else getattr(torch, name)


def reference(a: Tensor, b: Tensor | None, c: Tensor | None, *, function: str) -> Tensor:
    """Apply the function."""
    y: Tensor = torch_function(function)(*(x for x in (a, b, c) if x is not None))
    return y


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Every function on the dtypes that it is for; sizes that are no multiple of a vector; zeros, signs, saturation."""
    positive = {"log", "log1p", "sqrt", "rsqrt", "reciprocal"}
    for shape in ((1,), (3, 37), (2, 1, 129)):
        x = (rng.standard_normal(shape) * 4).astype(np.float32)
        y = (rng.standard_normal(shape) * 4).astype(np.float32)
        for name in UNARY:
            a = np.abs(x) + 0.01 if name in positive else x
            yield Sample((a > 0 if name == "not" else a.astype(np.float32), None, None), {"function": name})
        for name in ("add", "sub", "mul", "div", "max", "min", "mod", "fmod", *COMPARISONS):
            yield Sample((x, y, None), {"function": name})
            for integer in (np.int32, np.int64):
                i = rng.integers(-50, 50, shape).astype(integer)
                j = rng.integers(1, 7, shape).astype(integer) * rng.choice(np.array([-1, 1], integer), shape)
                yield Sample((i, j, None), {"function": name})
        yield Sample((np.abs(x), y / 4, None), {"function": "pow"})
        for name in LOGIC:
            yield Sample((x > 0, y > 0, None), {"function": name})
        yield Sample((x > 0, x, y), {"function": "where"})
        yield Sample((x > 0, (x * 9).astype(np.int64), (y * 9).astype(np.int64)), {"function": "where"})
    edges = np.array([0.0, -0.0, 20.5, -20.5, 88.0, -88.0, 0.5, 1.5, -2.5, 1e-8], np.float32)
    for name in set(UNARY) - positive - {"exp", "expm1", "not"}:
        yield Sample((edges, None, None), {"function": name})
    yield Sample((np.array([np.nan, np.inf, -np.inf, 1.0], np.float32), None, None), {"function": "isnan"})
