"""Removes copies that a producer can save: it writes at once where its result would be copied to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmc.compiler.lowering.builder import LoweredStep
from llmc.compiler.lowering.values import ONE, Buffer, View, contiguous, probe, product
from llmc.runtime.plan import Storage

UNIT_INNER = frozenset(("linear", "rope", "norm", "embedding", "glu", "paged_attention"))
"""Ops whose kernels write rows anywhere, of contiguous elements."""

STRIDED_OUTPUTS = UNIT_INNER | frozenset(
    ("elementwise", "reduce", "softmax", "cumsum", "topk", "gather", "gather_elements", "scatter_elements", "matmul")
)
"""Ops whose kernels write results of any strides."""


def remove_copies(steps: Sequence[LoweredStep], outputs: Sequence[View]) -> list[LoweredStep]:
    """Steps without the copies of a whole buffer that one step has written and nothing else reads."""
    writers, uses = Counter[Buffer](), Counter[Buffer](view.buffer for view in outputs)
    producer: dict[Buffer, int] = {}
    for index, step in enumerate(steps):
        for view in step.outputs:
            writers[view.buffer] += 1
            producer[view.buffer] = index
        uses.update({view.buffer for view in step.inputs if view is not None})
    result: list[LoweredStep | None] = list(steps)
    for index, step in enumerate(steps):
        if step.op != "elementwise" or step.attributes["function"] != "copy":
            continue
        source, target = step.inputs[0], step.outputs[0]
        assert source is not None, "copy has an input"
        buffer = source.buffer
        alone = buffer.storage is Storage.ARENA and writers[buffer] == 1 and uses[buffer] == 1
        if not alone or source.dtype != target.dtype:
            continue
        at = producer[buffer]
        made = result[at]
        if made is None or _is_filled(steps[at:index], target):
            continue
        redirected = _redirect(made, source, target)
        if redirected is not None:
            result[at], result[index] = redirected, None
            producer[target.buffer] = at
    return [step for step in result if step is not None]


def _is_filled(between: Sequence[LoweredStep], target: View) -> bool:
    """Whether one of these steps writes to the whole of the target's buffer: what the copy would overwrite."""
    views = [view for step in between for view in step.outputs if view.buffer is target.buffer]
    return any(product(view.shape) == view.buffer.elements for view in views)


def _redirect(made: LoweredStep, source: View, target: View) -> LoweredStep | None:
    """The producer of ``source`` writing to ``target`` instead, if the copy takes all that it writes."""
    position = next((i for i, view in enumerate(made.outputs) if view.buffer is source.buffer), None)
    if position is None or made.op not in STRIDED_OUTPUTS:
        return None
    written = made.outputs[position]
    view = _mapped(written, source, target)
    if view is None or (made.op in UNIT_INNER and not view.has_unit_inner_stride):
        return None
    outputs = (*made.outputs[:position], view, *made.outputs[position + 1 :])
    return LoweredStep(made.op, made.inputs, outputs, made.attributes, made.module)


def _mapped(written: View, source: View, target: View) -> View | None:
    """Where the elements of ``written`` lie in ``target``, which holds those of ``source`` in its order."""
    outer, order = _memory_order(written), _memory_order(source)
    if outer is None or order is None or written.offset != source.offset:
        return None
    found = target.transpose(order).reshape([written.shape[axis] for axis in outer])
    if found is None:
        return None
    back = found.transpose([outer.index(axis) for axis in sorted(outer)])
    return back.unsqueeze([axis for axis in range(written.rank) if axis not in outer])


def _memory_order(view: View) -> list[int] | None:
    """The axes (but those of size 1) from the outermost in memory to the innermost; None if there are gaps."""
    axes = [axis for axis in range(view.rank) if view.shape[axis] != ONE]
    order = sorted(axes, key=lambda axis: -probe(view.strides[axis]))
    packed = view.transpose(order)
    return order if packed.strides == contiguous(packed.shape) else None
