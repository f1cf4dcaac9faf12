"""transformers' weight conversion operations, carried out on weight sources instead of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmc.compiler.weights import Reshape, Slice, Stack, Transpose, WeightSource, concat
from llmc.errors import CheckpointError

Collected = dict[str, list[WeightSource]]
"""What an operation takes and returns: pattern (source patterns first, target patterns in the end) to sources."""


def convert(
    target: str, collected: Mapping[str, Sequence[WeightSource]], converter: Any, model: Any, where: str
) -> dict[str, WeightSource]:
    """Apply the operations of a ``WeightConverter`` to the tensors that its patterns found.

    Args:
        target: name of the (first) parameter they become.
        collected: source pattern to its tensors, in order.
        converter: transformers' rule.
        model: the model on the meta device.
        where: the checkpoint, for messages.

    Returns:
        Parameter name to source.

    Raises:
        CheckpointError: an operation is not known, or its tensors don't fit together.
    """
    state: Collected = {pattern: list(sources) for pattern, sources in collected.items()}
    if missing := [pattern for pattern in converter.source_patterns if pattern not in state]:
        raise CheckpointError(f"{where}: {target!r} needs tensors like {missing[0]!r}, and there are none")
    for operation in converter.operations:
        name = type(operation).__name__
        if name not in OPERATIONS:
            raise CheckpointError(
                f"{where}: {target!r} needs the weight conversion {name}, which is not supported; "
                f"supported: {', '.join(OPERATIONS)}"
            )
        try:
            state = OPERATIONS[name](operation, state, converter, target, model)
        except (ValueError, IndexError) as problem:
            raise CheckpointError(f"{where}: {target!r}: {name} failed: {problem}") from problem
    pattern = next((p for p in state if p in target), None)
    if pattern is None:
        return {target: _single(state)}
    before, _, after = target.partition(pattern)
    return {before + p + after: sources[0] for p, sources in state.items()}


def _single(state: Collected) -> WeightSource:
    if len(state) != 1 or len(next(iter(state.values()))) != 1:
        raise ValueError(f"expected one tensor, found {sum(map(len, state.values()))}")
    return next(iter(state.values()))[0]


def _merge_modules(operation: Any, state: Collected, converter: Any, target: str, model: Any) -> Collected:
    """One tensor per expert: they become the rows of a new axis."""
    if operation.dim:
        raise ValueError(f"merging along axis {operation.dim}")
    alone = len(state) == 1
    return {(converter.target_patterns[0] if alone else p): [Stack(tuple(parts))] for p, parts in state.items()}


def _concatenate(operation: Any, state: Collected, converter: Any, target: str, model: Any) -> Collected:
    parts = [source for p in converter.source_patterns if p in state for source in state[p]]
    return {converter.target_patterns[0]: [_concat(parts, operation.dim)]}


def _concat(parts: Sequence[WeightSource], axis: int) -> WeightSource:
    """Stacks that are joined along a later axis become one stack of joined parts: an expert is one read, in order."""
    if axis > 0 and all(isinstance(part, Stack) for part in parts):
        stacks = [part.parts for part in parts if isinstance(part, Stack)]
        return Stack(tuple(_concat(each, axis - 1) for each in zip(*stacks, strict=True)))
    return concat(parts, axis)


def _chunk(operation: Any, state: Collected, converter: Any, target: str, model: Any) -> Collected:
    """Split into equal parts, one for each target."""
    source = _single(state)
    targets = operation.get_target_patterns(converter.target_patterns, config=model.config)
    size = -(-source.shape[operation.dim] // len(targets))
    return {t: [_cut(source, operation.dim, i * size, (i + 1) * size)] for i, t in enumerate(targets)}


def _split(operation: Any, state: Collected, converter: Any, target: str, model: Any) -> Collected:
    """Split into parts of the sizes that the model's parameters have."""
    source = _single(state)
    result: Collected = {}
    begin = 0
    for pattern in converter.target_patterns:
        size = model.get_parameter(target.replace(converter.target_patterns[0], pattern)).shape[operation.dim]
        result[pattern] = [_cut(source, operation.dim, begin, begin + size)]
        begin += size
    if begin != source.shape[operation.dim]:
        raise ValueError(f"axis {operation.dim} has {source.shape[operation.dim]} rows, but the parts have {begin}")
    return result


def _cut(source: WeightSource, axis: int, begin: int, end: int) -> WeightSource:
    return Slice(source, (slice(None),) * axis + (slice(begin, end),))


def _transpose(operation: Any, state: Collected, converter: Any, target: str, model: Any) -> Collected:
    source = _single(state)
    if not (operation.check_dims and source.shape == tuple(model.get_parameter(target).shape)):
        order = list(range(len(source.shape)))
        order[operation.dim0], order[operation.dim1] = order[operation.dim1], order[operation.dim0]
        source = Transpose(source, tuple(order))
    pattern = converter.target_patterns[0] if len(converter.target_patterns) == 1 else converter.source_patterns[0]
    return {pattern: [source]}


def _interleave(operation: Any, state: Collected, converter: Any, target: str, model: Any) -> Collected:
    source = _single(state)
    shape, axis = list(source.shape), operation.dim
    half = shape[axis] // 2
    split = (*shape[:axis], *((2, half) if operation.inverse else (half, 2)), *shape[axis + 1 :])
    return {converter.target_patterns[0]: [_swap(source, split, axis)]}


def _permute_for_rope(operation: Any, state: Collected, converter: Any, target: str, model: Any) -> Collected:
    """Rows of each head from interleaved to half layout, or back."""
    config = model.config
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    heads = getattr(config, "num_attention_heads", 1)
    result: Collected = {}
    for pattern, sources in state.items():
        goes_to = operation.get_target_pattern(pattern, converter.source_patterns, converter.target_patterns)
        names = operation.permute_layer_names
        if names is None or any(name in pattern for name in names):
            result[goes_to] = [permute_rows(source, heads, operation.inverse) for source in sources]
        else:
            result[goes_to] = sources
    return result


def permute_rows(source: WeightSource, heads: int, inverse: bool = False) -> WeightSource:
    """Within each head, rows (0, 1), (2, 3), ... become the pairs (0, half), (1, half + 1), ...; or back."""
    half = source.shape[0] // heads // 2
    split = (heads, *((2, half) if inverse else (half, 2)), *source.shape[1:])
    return _swap(source, split, 1)


def _swap(source: WeightSource, split: tuple[int, ...], axis: int) -> WeightSource:
    """Reshape, swap two neighbouring axes, and reshape back."""
    order = list(range(len(split)))
    order[axis], order[axis + 1] = axis + 1, axis
    return Reshape(Transpose(Reshape(source, split), tuple(order)), source.shape)


Operation = Callable[[Any, Collected, Any, str, Any], Collected]

OPERATIONS: Mapping[str, Operation] = {
    "MergeModulelist": _merge_modules,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
}
"""transformers' class name to what does the same to sources."""
