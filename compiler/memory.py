"""Places the buffers of a plan in one arena, so that those that are live together never overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.compiler.lowering.builder import LoweredStep
from llmc.compiler.lowering.values import Buffer, View
from llmc.errors import CompileError
from llmc.runtime.plan import DTYPES, Storage


@dataclass(frozen=True)
class Arena:
    """Byte offsets of the buffers, and the size of it all."""

    offsets: dict[Buffer, int]
    nbytes: int


@dataclass
class _Lifetime:
    first: int
    last: int


def plan_arena(
    steps: Sequence[LoweredStep],
    kept: Sequence[Buffer],
    max_tokens: int,
    alignment: int = 64,
    given: Sequence[Buffer] = (),
) -> Arena:
    """Offsets for steps of up to ``max_tokens`` tokens and as many logit rows.

    The largest buffers are placed first, each as low as it fits. ``kept`` (the logits) outlive the last step,
    ``given`` are there before the first.

    Raises:
        CompileError: a step reads what no step has written.
    """
    lifetimes = _lifetimes(steps, kept, given)
    owner = _share(steps, lifetimes)
    merged: dict[Buffer, _Lifetime] = {}
    for buffer, life in lifetimes.items():
        root = _root(owner, buffer)
        known = merged.setdefault(root, _Lifetime(life.first, life.last))
        known.first, known.last = min(known.first, life.first), max(known.last, life.last)
    sizes = {buffer: _align(buffer_bytes(buffer, max_tokens), alignment) for buffer in merged}
    order = {buffer: i for i, buffer in enumerate(merged)}
    placed: dict[int, list[Buffer]] = defaultdict(list)
    offsets: dict[Buffer, int] = {}
    for buffer in sorted(merged, key=lambda b: (-sizes[b], order[b])):
        life = merged[buffer]
        span = range(life.first, life.last + 1)
        neighbours = {other for step in span for other in placed[step]}
        offsets[buffer] = _lowest_gap([(offsets[o], offsets[o] + sizes[o]) for o in neighbours], sizes[buffer])
        for step in span:
            placed[step].append(buffer)
    total = max((offsets[buffer] + sizes[buffer] for buffer in offsets), default=0)
    arena = Arena({buffer: offsets[_root(owner, buffer)] for buffer in lifetimes}, total)
    verify_arena(steps, kept, arena, max_tokens, given)
    return arena


def buffer_bytes(buffer: Buffer, max_tokens: int) -> int:
    """Its size in the largest step."""
    return buffer.elements.at(max_tokens, max_tokens) * DTYPES[buffer.dtype]


def verify_arena(
    steps: Sequence[LoweredStep],
    kept: Sequence[Buffer],
    arena: Arena,
    max_tokens: int,
    given: Sequence[Buffer] = (),
) -> None:
    """Replay the steps: what a step reads must still be there, byte for byte.

    Raises:
        CompileError: a step reads memory that another buffer has overwritten.
    """
    readers = _lifetimes(steps, kept, given)
    live: dict[Buffer, tuple[int, int]] = {}
    for buffer in given:
        live[buffer] = (arena.offsets[buffer], arena.offsets[buffer] + buffer_bytes(buffer, max_tokens))
    for index, step in enumerate(steps):
        for view in step.inputs:
            if view is not None and _in_arena(view) and view.buffer not in live:
                raise CompileError(f"step {index} ({step.op}): {view.buffer.name} is gone before it is read")
        for view in step.outputs:
            begin = arena.offsets[view.buffer]
            end = begin + buffer_bytes(view.buffer, max_tokens)
            for other, (low, high) in list(live.items()):
                if other is view.buffer or end <= low or high <= begin:
                    continue
                if readers[other].last > index or not _same_place(step, other, view):
                    raise CompileError(f"step {index} ({step.op}): {view.buffer.name} overwrites {other.name}")
                del live[other]
            live[view.buffer] = (begin, end)
        for buffer in [b for b in live if readers[b].last <= index]:
            del live[buffer]


def _lifetimes(
    steps: Sequence[LoweredStep], kept: Sequence[Buffer], given: Sequence[Buffer] = ()
) -> dict[Buffer, _Lifetime]:
    lifetimes = {buffer: _Lifetime(0, 0) for buffer in given}
    for index, step in enumerate(steps):
        for view in step.inputs:
            if view is not None and _in_arena(view):
                if view.buffer not in lifetimes:
                    raise CompileError(f"step {index} ({step.op}) reads {view.buffer.name}, which no step has written")
                lifetimes[view.buffer].last = index
        for view in step.outputs:
            lifetimes.setdefault(view.buffer, _Lifetime(index, index)).last = index
    for buffer in kept:
        lifetimes[buffer].last = len(steps)
    return lifetimes


def _share(steps: Sequence[LoweredStep], lifetimes: dict[Buffer, _Lifetime]) -> dict[Buffer, Buffer]:
    """Lets an elementwise result take the place of an input that is read for the last time: result -> input."""
    owner: dict[Buffer, Buffer] = {}
    for index, step in enumerate(steps):
        if step.op != "elementwise":
            continue
        (result,) = step.outputs
        if lifetimes[result.buffer].first != index:
            continue
        for view in step.inputs:
            if view is not None and _may_replace(view, result, step) and lifetimes[view.buffer].last == index:
                owner[result.buffer] = view.buffer
                break
    return owner


def _may_replace(view: View, result: View, step: LoweredStep) -> bool:
    """Identical views of buffers of one size, and no other view of that buffer in the step."""
    a, b = view.buffer, result.buffer
    same_size = _in_arena(view) and a.elements == b.elements and DTYPES[a.dtype] == DTYPES[b.dtype]
    others = [other for other in step.inputs if other is not None and other.buffer is a]
    layout = (result.shape, result.strides, result.offset)
    return same_size and all((other.shape, other.strides, other.offset) == layout for other in others)


def _same_place(step: LoweredStep, other: Buffer, result: View) -> bool:
    inputs = [view for view in step.inputs if view is not None and view.buffer is other]
    return step.op == "elementwise" and bool(inputs) and _may_replace(inputs[0], result, step)


def _root(owner: dict[Buffer, Buffer], buffer: Buffer) -> Buffer:
    while buffer in owner:
        buffer = owner[buffer]
    return buffer


def _in_arena(view: View | None) -> bool:
    return view is not None and view.buffer.storage is Storage.ARENA


def _lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The lowest offset at which so many bytes are free."""
    offset = 0
    for begin, end in sorted(taken):
        if begin >= offset + size:
            break
        offset = max(offset, end)
    return offset


def _align(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
