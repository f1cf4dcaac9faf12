"""Buffers that no checkpoint holds (rope frequencies, embedding scales): their values are lost on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def recover_buffers(model: Any) -> dict[str, Tensor]:
    """Real values, by name, of the buffers of a model on the meta device that its state dict leaves out.

    transformers initialises them in ``_init_weights`` of the nearest enclosing PreTrainedModel, after it has loaded a
    checkpoint onto the meta device; the same is run here on CPU copies. The model itself stays on the meta device.
    A buffer that is real already (a family fix made it) is kept as it is, and moved to the meta device for tracing.
    """
    owners = {name: module for name, module in model.named_modules() if hasattr(module, "_init_weights")}
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        lost = {key: b for key, b in module._buffers.items() if b is not None}
        lost = {key: b for key, b in lost.items() if key in module._non_persistent_buffers_set}
        if not lost:
            continue
        owner = max((o for o in owners if o in ("", name) or name.startswith(f"{o}.")), key=len)
        values = _initialised(owners[owner], module, lost)
        found |= {f"{name}.{key}".lstrip("."): value for key, value in values.items()}
    return found


def _initialised(owner: Any, module: nn.Module, lost: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of these buffers of a module, which are back on the meta device afterwards."""
    real = {key: b for key, b in lost.items() if not b.is_meta}
    if len(real) < len(lost):
        parameters = dict(module._parameters)
        for key, b in lost.items():
            module._buffers[key] = torch.zeros(b.shape, dtype=b.dtype)
        with torch.no_grad(), torch.device("cpu"):
            owner._init_weights(module)
        module._parameters.update(parameters)
        values = {key: module._buffers[key] for key in lost} | real
    else:
        values = dict(real)
    for key, b in lost.items():
        module._buffers[key] = b.to("meta")
    return {key: value for key, value in values.items() if value is not None}
