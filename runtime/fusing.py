"""Steps of a plan that run as one on this device: a quantized product whose halves only a gated unit reads.

Done when an engine is loaded, not when it is built: adapters are added to the product, `llmc diff` and calibration look
at it, and engines of every version gain. The results have the same bits.
"""

from __future__ import annotations

from dataclasses import replace

from llmc.runtime.plan import Dim, Plan, Step, Storage, Value


def fuse_gates(plan: Plan) -> Plan:
    """``plan`` with function(gate) * up in the step of their product wherever nothing else reads that."""
    steps: list[Step] = []
    for number, step in enumerate(plan.steps):
        before = steps[-1] if steps else None
        if before is not None and _gates(plan, before, step) and not _is_read(plan, before.outputs[0], number + 1):
            steps[-1] = replace(
                before, outputs=step.outputs, attributes={**before.attributes, "function": step.attributes["function"]}
            )
        else:
            steps.append(step)
    return plan if len(steps) == len(plan.steps) else replace(plan, steps=tuple(steps))


def _gates(plan: Plan, product: Step, gated: Step) -> bool:
    """Whether ``gated`` reads the first and the second half of the columns of ``product``."""
    if product.op != "quantized_linear" or "function" in product.attributes or gated.op != "glu":
        return False
    y = plan.value(product.outputs[0])
    rows, columns = y.shape
    # x may lie where the result goes: the kernel has made its own form of it by then, but only of x.
    if columns.constant % 2 or any(v.storage is not Storage.WEIGHT for v in _values(plan, product.inputs[1:])):
        return False
    half = columns.constant // 2
    return all(
        (view.storage, view.base, view.dtype, view.strides) == (y.storage, y.base, y.dtype, y.strides)
        and view.shape == (rows, Dim(half))
        and view.offset == y.offset + offset
        for view, offset in zip(_values(plan, gated.inputs), (0, half), strict=True)
    )


def _is_read(plan: Plan, name: str, begin: int) -> bool:
    """Whether a step from ``begin`` on reads the buffer of a value before another one takes its place."""
    base = plan.value(name).base
    for step in plan.steps[begin:]:
        if any(v.storage is Storage.ARENA and v.base == base for v in _values(plan, step.inputs)):
            return True
        if any(v.base == base for v in _values(plan, step.outputs)):
            return False
    return name == plan.logits


def _values(plan: Plan, names: tuple[str | None, ...]) -> list[Value]:
    return [plan.value(name) for name in names if name is not None]
