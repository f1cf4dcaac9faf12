"""Norm over the last axis: RMS, layer or L2, with a scale and a shift that may be absent."""

from llmc.plugins.op import Op

KINDS = ("rms", "layer", "l2")

OP = Op(
    "norm",
    inputs=("x", "weight?", "bias?"),
    attributes={"epsilon": float, "kind": str, "offset": float},
    rtol=1e-5,
    atol=1e-5,
)
"""y = n(x) * (weight + offset) + bias, over the last axis of x [..., D]; weight and bias are [D] or [H, D].

``rms``: x / sqrt(mean(x^2) + epsilon), https://arxiv.org/abs/1910.07467; ``layer``: the same of x - mean(x),
https://arxiv.org/abs/1607.06450; ``l2``: x / max(|x|, epsilon). ``offset`` is 1 where
checkpoints store weight - 1 (Gemma).
"""
