"""From the tensors of a checkpoint to the parameters of the model: renamed, merged, tied, and none left over.

transformers publishes how the checkpoints of each model type differ from its modules (``conversion_mapping``); the same
rules are applied here to weight sources, so that no tensor is read before the engine is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmc.compiler.conversion import convert
from llmc.compiler.weights import WeightSource, stream
from llmc.errors import CheckpointError

BUFFER_NAMES = re.compile(r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached|masked_bias)$")
"""Tables that older releases stored and every release computes."""

SHOWN = 8
"""How many names a message lists."""


@dataclass(frozen=True)
class Bound:
    """Every parameter of the model with its source; what was left out, and what deserves a warning."""

    weights: Mapping[str, WeightSource]
    ignored: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass
class _Group:
    """The tensors that make one parameter, or several where the rule splits."""

    converter: Any = None
    sources: dict[str, list[WeightSource]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def meta_model(config: Any) -> Any:
    """The causal language model of a config on the meta device: names and shapes, no numbers.

    Raises:
        CompileError: it is not supported, or transformers can't build it.
    """
    from llmc.compiler.model import build_model, check_config

    check_config(config)
    return build_model(config, device="meta")


def bind(
    tensors: Mapping[str, WeightSource],
    aliases: Mapping[str, str],
    model: Any,
    where: str,
    rules: Sequence[Any] | None = None,
) -> Bound:
    """Find the source of every parameter.

    Args:
        tensors: those of the checkpoint, by the name in the file.
        aliases: names that are missing in the files because they share the data of another tensor.
        model: what ``meta_model`` returned.
        where: the checkpoint, for messages.
        rules: transformers' weight transforms; by default those of the model's type.

    Raises:
        CheckpointError: a tensor is missing, left over, there twice, or of the wrong shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    resolved = dict(tensors) | {alias: tensors[name] for alias, name in aliases.items() if name in tensors}
    groups, leftover = _group(resolved, model, where, rules)
    weights: dict[str, WeightSource] = {}
    for target, group in groups.items():
        for name, source in _convert(target, group, model, where).items():
            if name not in expected:
                leftover.append(name)
            elif name in weights:
                raise CheckpointError(f"{where}: two tensors become {name!r}: {', '.join(group.names)}")
            else:
                weights[name] = source
    ignored = [name for name in leftover if _may_ignore(name, tensors, model)]
    warnings = _tie(weights, model)
    _check(weights, expected, sorted(set(leftover) - set(ignored)), where)
    return Bound(weights, sorted(ignored), warnings)


def _group(
    tensors: Mapping[str, WeightSource], model: Any, where: str, rules: Sequence[Any] | None
) -> tuple[dict[str, _Group], list[str]]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model) if rules is None else rules
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    parameters = model.state_dict()
    groups: dict[str, _Group] = {}
    leftover = []
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if target not in parameters and name in parameters:  # a rule that does not mean this checkpoint
            target, pattern = name, None
        if target not in parameters and pattern is None:
            leftover.append(name)
            continue
        group = groups.setdefault(target, _Group(by_pattern[pattern] if pattern else None))
        if group.names and (pattern is None or group.converter is None):
            raise CheckpointError(f"{where}: the tensors {group.names[0]!r} and {name!r} both become {target!r}")
        group.sources.setdefault(pattern or name, []).append(tensors[name])
        group.names.append(name)
    return groups, leftover


def _convert(target: str, group: _Group, model: Any, where: str) -> dict[str, WeightSource]:
    if group.converter is None:
        return {target: next(iter(group.sources.values()))[0]}
    return convert(target, group.sources, group.converter, model, where)


def _may_ignore(name: str, tensors: Mapping[str, WeightSource], model: Any) -> bool:
    """Buffers that the model computes itself, and what the model class declares as not its own (such as MTP layers)."""
    if BUFFER_NAMES.search(name):
        return True
    buffers = {buffer for buffer, _ in model.named_buffers()}
    prefix = model.base_model_prefix
    if buffers & {name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")}:
        return True
    if not any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ()):
        return False
    # GPT-2's pattern for its causal mask, `attn.bias`, also fits the biases of its linears: tell them by the shape.
    return not name.endswith("bias") or name not in tensors or len(tensors[name].shape) in (0, 4)


def _tie(weights: dict[str, WeightSource], model: Any) -> list[str]:
    """Let tied parameters share one source, as the config says."""
    warnings = []
    for target, source in sorted(model.get_expanded_tied_weights_keys(all_submodels=True).items()):
        if source not in weights and target in weights:  # saved under the other name
            weights[source] = weights[target]
        elif source not in weights:
            continue
        elif (
            target in weights
            and weights[target] is not weights[source]
            and not _equal(weights[target], weights[source])
        ):
            warnings.append(
                f"the checkpoint holds {target!r} with other numbers than {source!r}, but its config ties them "
                f"(tie_word_embeddings): {target!r} is not used"
            )
        weights[target] = weights[source]
    return warnings


def _equal(a: WeightSource, b: WeightSource) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(stream(a), stream(b), strict=True))


def _check(
    weights: Mapping[str, WeightSource], expected: Mapping[str, tuple[int, ...]], leftover: list[str], where: str
) -> None:
    if missing := [name for name in expected if name not in weights]:
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {_list(missing)}"
            + (f"; tensors that no parameter takes: {_list(leftover)}" if leftover else "")
        )
    if leftover:
        raise CheckpointError(
            f"{where}: {len(leftover)} tensors belong to no parameter of the model that config.json describes: "
            f"{_list(leftover)}; does config.json belong to these weights?"
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name!r} has the shape {list(weights[name].shape)}, "
                f"but config.json asks for {list(shape)}"
            )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
