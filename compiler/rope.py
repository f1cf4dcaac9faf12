"""Ropes that switch at run time (dynamic NTK, longrope) are frozen for the engine's longest sequence.

They would look at the largest position of the packed rows, so that one long request would change all others, and a
request that grows would meet keys that were rotated with other frequencies.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SWITCHING = ("dynamic", "longrope")


def freeze_ropes(model: Any, buffers: dict[str, Tensor], max_seq_len: int) -> dict[str, str]:
    """Compute the frequencies of every switching rope for ``max_seq_len``, into ``buffers``.

    Returns:
        ``rope`` or ``rope.<layer type>`` -> what was decided, for the engine's record.
    """
    notes = {}
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds in SWITCHING:
            scale = _freeze(module, name, "", kinds, buffers, max_seq_len)
            module.rope_type = "default"  # what switches asks for the type
            notes["rope"] = _note(module.config.rope_parameters, kinds, max_seq_len, scale)
        elif isinstance(kinds, dict):
            for layer_type in [key for key, kind in kinds.items() if kind in SWITCHING]:
                scale = _freeze(module, name, layer_type, kinds[layer_type], buffers, max_seq_len)
                parameters = module.config.rope_parameters[layer_type]
                notes[f"rope.{layer_type}"] = _note(parameters, kinds[layer_type], max_seq_len, scale)
                kinds[layer_type] = "default"
    return notes


def _freeze(module: Any, name: str, layer_type: str, kind: str, buffers: dict[str, Tensor], max_seq_len: int) -> float:
    prefix = f"{layer_type}_" if layer_type else ""
    options = {"layer_type": layer_type} if layer_type else {}
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](module.config, "cpu", seq_len=max_seq_len, **options)
    buffers[f"{name}.{prefix}inv_freq"] = frequencies.to(getattr(module, f"{prefix}inv_freq").dtype)
    setattr(module, f"{prefix}attention_scaling", scale)
    return float(scale)


def _note(parameters: Any, kind: str, max_seq_len: int, scale: float) -> str:
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        factors = "long" if max_seq_len > original else "short"
        return f"longrope, {factors} factors for max_seq_len {max_seq_len} (original {original}), scale {scale:.6g}"
    return f"dynamic NTK, factor {parameters['factor']:.6g}, frozen for max_seq_len {max_seq_len}"
