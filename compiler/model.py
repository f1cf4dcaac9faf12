"""Transformers models: which are supported, and how they are built for tracing and as the reference to compare with."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmc.compiler import hooks
from llmc.errors import CompileError

RECURRENT_LAYERS = frozenset(("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"))
"""Layer types, as configs name them, that keep a state for each sequence."""

_ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)


def check_config(config: Any) -> None:
    """Refuse what can't be compiled before a model is built.

    Raises:
        CompileError: the architecture, a layer type or a rope type is not supported; the message names it.
    """
    config = own_config(config)
    if getattr(config, "is_encoder_decoder", False) and not getattr(config, "architectures", None):
        raise CompileError(f"{config.model_type}: encoder-decoder models are not supported; {_supported()}")
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    if recurrent := sorted(layers & RECURRENT_LAYERS):
        raise CompileError(
            f"{config.model_type}: layers with recurrent state ({', '.join(recurrent)}) are not supported"
        )
    for kind in _rope_types(getattr(text, "rope_parameters", None)):
        if kind not in _ROPE_TYPES:
            raise CompileError(f"config.json: rope type {kind!r} is unknown; supported: {', '.join(_ROPE_TYPES)}")


def own_config(config: Any) -> Any:
    """The config that the model class takes: the text part, where a multimodal config names a text model.

    Raises:
        CompileError: there is no causal language model for it.
    """
    found: Any = model_class(config)
    is_text_model = found.config_class is (getattr(config, "sub_configs", None) or {}).get("text_config")
    return config.get_text_config() if is_text_model else config


def model_class(config: Any) -> type[nn.Module]:
    """The transformers class of a config.

    Raises:
        CompileError: there is none, or ``architectures`` asks for another.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = getattr(config, "model_type", type(config).__name__)
        raise CompileError(f"config.json: model_type {kind!r} has no causal language model; {_supported()}")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    architectures = getattr(config, "architectures", None)
    if architectures and found.__name__ not in architectures:
        raise CompileError(
            f"config.json: architecture {architectures[0]!r} can't be built for model_type {config.model_type!r}, "
            f"whose causal language model is {found.__name__!r}; {_supported()}"
        )
    model: type[nn.Module] = found
    return model


def build_model(
    config: Any, attention: str = "eager", device: str = "cpu", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build the model of a config with random weights, in evaluation mode, as transformers itself runs it.

    ``attention`` is an implementation of transformers, or ``hooks.NAME`` within ``hooks.installed()``; experts follow.

    Raises:
        CompileError: transformers can't build it.
    """
    found: Any = model_class(config)
    config = copy.deepcopy(own_config(config))
    config.use_cache = False
    experts = hooks.NAME if attention == hooks.NAME else "eager"
    options = {"dtype": dtype, "experts_implementation": experts}
    try:
        with torch.device(device), _quiet():
            try:
                model = found._from_config(copy.deepcopy(config), attn_implementation=attention, **options)
            except (
                KeyError
            ):  # the class looks its attention up in a dict when it is built, or doesn't know the interface
                model = _build_eager(found, config, attention, options)
            except ValueError as problem:
                if "does not support" not in str(problem):
                    raise
                model = _build_eager(found, config, attention, options)
    except Exception as problem:
        raise CompileError(f"{found.__name__}: transformers can't build it from this config: {problem!r}") from problem
    if device == "meta":
        _drop_numbers(model)
    built: nn.Module = model.eval()
    return built


def _drop_numbers(model: nn.Module) -> None:
    """Move the parameters that some factories make on the CPU all the same (torch.normal) to the meta device."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and not p.is_meta:
                module._parameters[name] = moved.setdefault(id(p), nn.Parameter(p.to("meta"), p.requires_grad))


def _build_eager(found: Any, config: Any, attention: str, options: Mapping[str, Any]) -> Any:
    model = found._from_config(config, attn_implementation="eager", **options)
    if attention == hooks.NAME:
        model.config._attn_implementation_internal = attention
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that transformers logs while it builds."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _rope_types(parameters: Any) -> Iterator[str]:
    """The rope types of ``rope_parameters``, which may be nested by layer type."""
    if not isinstance(parameters, Mapping):
        return
    if isinstance(kind := parameters.get("rope_type", parameters.get("type")), str):
        yield kind
    for nested in parameters.values():
        yield from _rope_types(nested)


def _supported() -> str:
    names = sorted({name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)})
    return f"supported are the causal language models of transformers without recurrent state: {', '.join(names)}"
