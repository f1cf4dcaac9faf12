"""What llmc::moe means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.errors import KernelError
from llmc.plugins.elementwise.reference import torch_function
from llmc.plugins.linear.reference import reference as linear
from llmc.plugins.op import Sample
from llmc.plugins.quantized_linear.reference import random_weight
from llmc.plugins.quantized_linear.reference import reference as quantized_linear


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_scale: Tensor | None = None,
    gate_up_zero: Tensor | None = None,
    down_scale: Tensor | None = None,
    down_zero: Tensor | None = None,
    *,
    function: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
    format: str = "plain",
    group: int = 0,
    compute: str = "plain",
    x_group: int = 0,
    inner: int = 0,
) -> Tensor:
    """One expert after the other, on the tokens that chose it; weights act as in llmc::linear or quantized_linear."""
    if inner not in (0, down.shape[2]):
        raise KernelError(f"down has {down.shape[2]} columns, and inner is {inner}")

    def product(expert: int, x: Tensor, weight: Tensor, bias: Tensor | None, *scales: Tensor | None) -> Tensor:
        scale, zero = (None if part is None else part[expert] for part in scales)
        bias = None if bias is None else bias[expert]
        if format == "plain":
            return linear(x, weight[expert], bias)
        assert scale is not None, "quantized experts have scales"
        return quantized_linear(
            *(x, weight[expert], scale, zero, bias, None), format=format, group=group, compute=compute, x_group=x_group
        )

    y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        hidden = product(expert, x[token], gate_up, gate_up_bias, gate_up_scale, gate_up_zero)
        if gated:
            hidden = activate_gated(hidden, function, interleaved=interleaved, alpha=alpha, limit=limit)
        else:
            hidden = torch_function(function)(hidden)
        out = product(expert, hidden, down, down_bias, down_scale, down_zero)
        y.index_add_(0, token, (out * weights[token, choice, None]).to(y.dtype))
    return y.to(x.dtype)


def activate_gated(gate_up: Tensor, function: str, *, interleaved: bool, alpha: float, limit: float) -> Tensor:
    """[..., 2I] of gates and ups -> [..., I]."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if function == "gpt_oss":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    y: Tensor = torch_function(function)(gate) * up
    return y


def fake(x: Tensor, *_: Tensor | None, **__: object) -> Tensor:
    """The shape of the result."""
    return torch.empty_like(x)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One token and many, experts without tokens, ids out of range, biases, odd sizes."""
    plain = {"function": "silu", "gated": True, "interleaved": False, "alpha": 0.0, "limit": 0.0}
    variants = (
        plain,
        plain | {"interleaved": True},
        plain | {"function": "gelu_tanh"},
        plain | {"limit": 0.5},
        plain | {"function": "relu2", "gated": False},
        plain | {"function": "gpt_oss", "interleaved": True, "alpha": 1.702, "limit": 0.7},
    )
    sizes = ((1, 16, 24, 4, 2), (5, 33, 7, 3, 1), (40, 64, 32, 8, 3))
    for tokens, hidden, inner, experts, top_k in sizes:
        for number, attributes in enumerate(variants):
            rows = inner * 2 if attributes["gated"] else inner
            shapes = (
                (tokens, hidden),
                (experts, rows, hidden),
                (experts, hidden, inner),
                (experts, rows),
                (experts, hidden),
            )
            x, gate_up, down, gate_up_bias, down_bias = (rng.standard_normal(s, dtype=np.float32) for s in shapes)
            ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
            ids[0, 0] = experts if number % 2 else ids[0, 0]
            weights = rng.random((tokens, top_k), dtype=np.float32)
            biases = (gate_up_bias, down_bias) if number % 3 else (None, None)
            scaled = (x, ids.astype(np.int64), weights, gate_up / hidden**0.5, down / inner**0.5)
            yield Sample(
                (*(np.asarray(a, a.dtype if a.dtype == np.int64 else np.float32) for a in scaled), *biases), attributes
            )


def stored_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Quantized experts: each format and kind of zeros.

    Computed in float32: rounding the second product's input would ask for a tolerance that hides other mistakes.
    """
    plain = {"function": "silu", "gated": True, "interleaved": False, "alpha": 0.0, "limit": 0.0}
    for number, (format, zeros, group, bias) in enumerate(
        (("int4", "", 32, False), ("int4", "float32", 16, True), ("int8", "uint8", 0, False), ("fp8", "", 0, True))
    ):
        for tokens, hidden, inner, experts, top_k in ((1, 24, 16, 4, 2), (9, 40, 24, 3, 2), (40, 33, 18, 5, 1)):
            weights = [
                [random_weight(rng, rows, columns, format, group, zeros) for _ in range(experts)]
                for rows, columns in ((2 * inner, hidden), (hidden, inner))
            ]
            (gate_up, up_scale, up_zero), (down, down_scale, down_zero) = (
                [None if part[0] is None else np.stack(part) for part in zip(*each, strict=True)] for each in weights
            )
            x = rng.standard_normal((tokens, hidden), np.float32)
            ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int64)
            biases = [rng.standard_normal((experts, rows), np.float32) for rows in (2 * inner, hidden)] if bias else []
            yield Sample(
                (
                    *(x, ids, rng.random((tokens, top_k), dtype=np.float32), gate_up, down, *(biases or (None, None))),
                    *(up_scale, up_zero, down_scale, down_zero),
                ),
                plain
                | {"interleaved": bool(number % 2)}
                | {"format": format, "group": group, "compute": "float32", "x_group": 0, "inner": inner},
            )
