"""What llmc::moe means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.elementwise.reference import torch_function
from llmc.plugins.linear.reference import reference as linear
from llmc.plugins.op import Sample


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *,
    function: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> Tensor:
    """One expert after the other, on the tokens that chose it; narrow weights act as in llmc::linear."""
    y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        inner = linear(x[token], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        if gated:
            inner = activate_gated(inner, function, interleaved=interleaved, alpha=alpha, limit=limit)
        else:
            inner = torch_function(function)(inner)
        out = linear(inner, down[expert], None if down_bias is None else down_bias[expert])
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
