"""Mixture of experts: every token goes through its chosen experts, and their outputs are summed with its weights."""

from llmc.plugins.op import Op

OP = Op(
    "moe",
    inputs=("x", "ids", "weights", "gate_up", "down", "gate_up_bias?", "down_bias?"),
    attributes={"function": str, "gated": bool, "interleaved": bool, "alpha": float, "limit": float},
    rtol=1e-5,
    atol=1e-5,
    stored_inputs=("gate_up_scale?", "gate_up_zero?", "down_scale?", "down_zero?"),
    stored_attributes={"format": "plain", "group": 0, "compute": "plain", "x_group": 0, "inner": 0},
)
"""y[t] = sum over k of weights[t, k] * expert_ids[t, k](x[t]).

x [T, H], ids [T, K] int64, weights [T, K], gate_up [E, 2I, H] ([E, I, H] if not ``gated``), down [E, H, I], biases
[E, 2I] and [E, H]. The rows of gate_up are gates then ups, or in turn if ``interleaved``. An expert is
down(function(gate) * up), or down(function(gate_up)) if not gated; ``function`` is an activation of llmc::elementwise.
With ``limit`` > 0 the gate is first cut to at most limit and the up to +-limit. ``gpt_oss`` is a gated form of its own:
gate * sigmoid(alpha * gate) * (up + 1). An id of E or more, or below 0, contributes nothing.

A plan may have quantized experts: ``format`` and what follows are as in llmc::quantized_linear, gate_up and down are
codes, with scales and zeros [E, rows, G]. ``inner`` is I, which packed weights do not tell where there is no bias;
0: all columns of down's lines.
"""
