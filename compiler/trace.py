"""Traces a Hugging Face model into an FX graph over packed tokens, on the meta device: no weights are read.

The graph's inputs are ``input_ids`` [1, T], ``position_ids`` [1, T] and ``logit_rows`` [N]; its output is the logits
[1, N, V]. T packs the rows of all sequences of a step. Attention is an opaque ``llmc::`` op, the only one that knows
about sequences: nothing else may mix rows.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from llmc.compiler import hooks
from llmc.compiler.buffers import recover_buffers
from llmc.compiler.export import export
from llmc.compiler.families.base import all_fixes
from llmc.compiler.model import build_model, check_config, model_class
from llmc.compiler.probe import name_expert_functions, replace_norms_and_activations
from llmc.compiler.rope import freeze_ropes
from llmc.compiler.row_check import check_rows
from llmc.errors import CompileError, LlmcError
from llmc.passes.fx.base import MAX_SEQ_LEN
from llmc.passes.fx.clean_up import CleanUp
from llmc.passes.fx.functionalize import Functionalize
from llmc.passes.fx.number_slots import NumberSlots
from llmc.passes.fx.use_positions import UsePositions

__all__ = ["TracedProgram", "bind", "build_model", "trace"]


@dataclass(frozen=True)
class TracedProgram:
    """A traced model, functional and cleaned up; its parameters are on the meta device.

    ``module.meta["max_seq_len"]`` is what it was traced for.
    """

    module: fx.GraphModule
    parameter_names: Mapping[str, str]
    """get_attr target -> the parameter (or stored buffer) of the Hugging Face model that it reads."""
    buffers: Mapping[str, Tensor]
    """get_attr target -> its value, for what no checkpoint holds: rope frequencies, embedding scales, ALiBi slopes."""
    config: Any
    notes: Mapping[str, str] = field(default_factory=dict)
    """What was decided at build time and holds for the whole engine: the rope regime."""


def trace(config: Any, *, max_seq_len: int) -> TracedProgram:
    """Trace the model of a config, in float32.

    Args:
        config: a transformers config of a causal language model.
        max_seq_len: longest sequence of the engine, in tokens. Ropes that switch at run time are frozen for it.

    Raises:
        CompileError: the model, or something that it does, is not supported; the message names it.
    """
    check_config(config)
    name = model_class(config).__name__
    try:
        return _trace(config, max_seq_len)
    except LlmcError:
        raise
    except Exception as problem:  # code of transformers ran, on a path that its authors may not have seen
        raise CompileError(f"{name}: can't be traced ({type(problem).__name__}: {problem})") from problem


def _trace(config: Any, max_seq_len: int) -> TracedProgram:
    with hooks.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_model(_prepared(config), hooks.NAME, "meta")
        fix = all_fixes().get(type(model).__name__)
        if fix is not None:
            fix.patch(model, max_seq_len)
        buffers = recover_buffers(model)
        notes = freeze_ropes(model, buffers, max_seq_len)
        name_expert_functions(model)
        replace_norms_and_activations(model)
        module = export(model, max_seq_len)
    module.meta[MAX_SEQ_LEN] = max_seq_len
    for target in {str(node.target) for node in module.graph.find_nodes(op="get_attr")} & set(buffers):
        set_tensor(module, target, buffers[target])
    for graph_pass in (Functionalize(), CleanUp(), UsePositions(), NumberSlots()):
        graph_pass(module)
    check_rows(module)
    return _program(module, model, config, notes)


def bind(program: TracedProgram, weights: Mapping[str, Tensor]) -> fx.GraphModule:
    """Put real weights, by Hugging Face name, into the module, so that it runs; returns the module.

    Raises:
        CompileError: a weight is missing or has another shape.
    """
    for target, name in program.parameter_names.items():
        if name not in weights:
            raise CompileError(f"{name}: there is no such weight")
        set_tensor(program.module, target, weights[name])
    return program.module


def set_tensor(module: nn.Module, target: str, value: Tensor) -> None:
    """Put a tensor in the place of the one that get_attr nodes of this target read.

    Raises:
        CompileError: it has another shape.
    """
    path, _, last = target.rpartition(".")
    owner = module.get_submodule(path)
    current = owner._buffers[last]
    if current is None or current.shape != value.shape:
        expected = None if current is None else tuple(current.shape)
        raise CompileError(f"{target}: shape {tuple(value.shape)}; the model has {expected}")
    owner._buffers[last] = value.detach()


def _prepared(config: Any) -> Any:
    """A copy of the config for which transformers builds what the config means.

    A window or chunk that is switched off (0 or null) doesn't stop the layers that ask for one, and
    ``apply_yarn_scaling: false``, which transformers ignores, keeps yarn's frequencies without its attention scale.
    """
    config = copy.deepcopy(config)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        layer_types = getattr(part, "layer_types", None) or ()
        for name, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
            if hasattr(part, name) and not getattr(part, name):
                setattr(part, name, hooks.UNLIMITED if kind in layer_types or getattr(part, name) == 0 else None)
        rope = getattr(part, "rope_parameters", None) or {}
        for parameters in (rope, *rope.values()):
            if isinstance(parameters, dict) and parameters.get("apply_yarn_scaling") is False:
                parameters |= {"attention_factor": 1.0, "mscale": None, "mscale_all_dim": None}
    return config


def _program(module: fx.GraphModule, model: nn.Module, config: Any, notes: Mapping[str, str]) -> TracedProgram:
    """Say for each get_attr what it reads."""
    stored = set(model.state_dict())
    names, values = {}, {}
    for target in sorted({str(node.target) for node in module.graph.find_nodes(op="get_attr")}):
        value = module.get_buffer(target)
        if target in stored:
            names[target] = target
        elif not value.is_meta:
            values[target] = value
        else:
            raise CompileError(f"{target}: the model computes this constant when it is built, in a way that is lost")
    return TracedProgram(module, names, values, config, notes)
