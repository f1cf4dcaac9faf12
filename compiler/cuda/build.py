"""What makes an engine for CUDA of a model that is compiled for the CPU: its plan, and the machine code it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmc.compiler.config import BLOCK_SIZE, Limits
from llmc.compiler.cuda.form import NARROW, cuda_form
from llmc.compiler.cuda.nvrtc import compile_kernels
from llmc.compiler.engine_writer import DraftPart
from llmc.compiler.lower import LoweredGraph, LoweredModel, plan_steps
from llmc.compiler.lowering.values import Buffer, View
from llmc.compiler.targets.base import Target
from llmc.errors import CompileError, LlmcError, UsageError
from llmc.plugins import cuda_sampling
from llmc.plugins.cuda import Kernel, capability_of
from llmc.plugins.cuda import Tensor as DeviceTensor
from llmc.plugins.cuda_packing import common
from llmc.plugins.lora import cuda as lora
from llmc.plugins.paged_attention.cuda import KV_DTYPES
from llmc.runtime.devices.cuda import targets
from llmc.runtime.devices.cuda.program import ALIGNMENT, Memory, buckets, caches, launch_maker, program
from llmc.runtime.fusing import fuse_gates
from llmc.runtime.lora import PRODUCTS
from llmc.runtime.manifest import KvCacheSpec
from llmc.runtime.manifest import Limits as EngineLimits
from llmc.runtime.plan import Plan, Step, Value

BASE = 1 << 40
"""Where memory is thought to begin while kernels are looked for; far more than aligned."""


@dataclass(frozen=True)
class CudaModel:
    """A model for CUDA; ``kernels``: those that its steps need, by architecture; ``parts``: those that draft for it."""

    lowered: LoweredModel
    kernels: Mapping[str, Mapping[str, Kernel]]
    parts: Sequence[tuple[DraftPart, LoweredGraph]] = ()


def check_dtypes(target: Target, dtype: str, kv_dtype: str) -> None:
    """Refuse what no kernel of the target is for. The CPU has all.

    Raises:
        UsageError: activations are not of 16 bits, or the cache is of another dtype.
    """
    if target.device != "cuda":
        return
    if dtype not in NARROW:
        raise UsageError(f"--target {target.name}: activations are bfloat16 or float16; use --dtype bfloat16")
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"--kv-dtype {kv_dtype}: --target {target.name} has {', '.join(KV_DTYPES)}")


def cuda_model(
    steps: LoweredGraph, target: Target, limits: Limits, dtype: str, kv_dtype: str, parts: Sequence[DraftPart] = ()
) -> CudaModel:
    """The plan of a model for CUDA, and its kernels. No weight is read.

    Raises:
        CompileError: a step has no kernel; names it.
    """
    archs = targets.architectures(target.name)
    capabilities = [capability_of(arch) for arch in archs]
    try:
        for step in steps.steps:
            launch_maker(step.op)
        packed: dict[Buffer, View] = {}
        pack_for = common(capabilities)
        lowered = plan_steps(cuda_form(steps, dtype, pack_for, packed), target, limits)
        forms = [(part, cuda_form(part.graph, dtype, pack_for, packed)) for part in parts]
        plans = [(lowered.plan, limits, KvCacheSpec(kv_dtype, BLOCK_SIZE))]
        for part, form in forms:
            plan = plan_steps(form, target, part.limits).plan
            plans.append((plan, part.limits, KvCacheSpec(part.kv_dtype, BLOCK_SIZE)))
        kernels: dict[str, dict[str, Kernel]] = {arch: {} for arch in archs}
        for arch, number in zip(archs, capabilities, strict=True):
            for plan, sizes, spec in plans:
                kernels[arch] |= kernels_of(plan, EngineLimits(**vars(sizes)), spec, number)
    except LlmcError as error:
        raise CompileError(f"--target {target.name}: {error}") from error
    return CudaModel(lowered, kernels, forms)


def images(model: CudaModel) -> dict[str, bytes]:
    """Files of the engine: machine code of each kernel and architecture, and what a launch has to agree with.

    Raises:
        CompileError: NVRTC is missing, or can't compile a kernel.
    """
    files: dict[str, bytes] = {}
    prints: dict[str, str] = {}
    for arch, kernels in model.kernels.items():
        for name, image in compile_kernels(kernels.values(), arch).items():
            files[targets.kernel_file(arch, name)] = image
        prints |= {name: targets.fingerprint(kernel) for name, kernel in kernels.items()}
    files[targets.KERNELS] = (json.dumps(prints, indent=1, sort_keys=True) + "\n").encode()
    return files


def kernels_of(plan: Plan, limits: EngineLimits, spec: KvCacheSpec, capability: int) -> dict[str, Kernel]:
    """All that steps of any size within the limits launch, by name; with and without adapters, and to choose tokens."""
    found: dict[str, Kernel] = {}
    slots, _ = caches(plan, spec, 1, BASE)
    weights = {str(value.base): BASE for value in plan.values}
    memory = Memory(BASE, BASE, weights, slots, BASE, lambda _: BASE)
    seen: set[int] = set()
    vocabulary = plan.value(plan.logits).shape[1].constant
    logits = DeviceTensor(BASE, "float32", (1, vocabulary), (vocabulary, 1))
    others = [cuda_sampling.sample(logits, {}).kernel, cuda_sampling.adjust(logits, {}, 0).kernel]
    others += [lora.kernel(plan.value(str(s.inputs[0])).dtype, "float32") for s in plan.steps if s.op in PRODUCTS]
    found |= {kernel.name: kernel for kernel in others}
    plan = replace(plan, steps=_distinct(plan, fuse_gates(plan)))  # an adapter keeps gates from being fused
    for bucket in buckets(limits, spec.block_size):
        only = None if bucket.rows not in seen else _is_attention  # the rest depends on the rows alone
        seen.add(bucket.rows)
        for launches in program(plan, bucket, memory, capability, only=only)[0]:
            for launch in launches:
                kernel = launch.kernel
                if found.setdefault(kernel.name, kernel) != kernel:
                    raise CompileError(f"two different kernels are called {kernel.name}")
    if plan.kv_slots:
        slot = plan.kv_slots[0]
        from llmc.plugins.paged_attention import cuda as attention

        move = attention.move_positions(slots[0], slot.kv_heads, (slot.key_dim, slot.value_dim), BASE, BASE, BASE, 1)
        found[move.kernel.name] = move.kernel
    return found


def _distinct(plan: Plan, fused: Plan) -> tuple[Step, ...]:
    """One step, of both, of those that differ in names and places only: layers are alike."""
    found: dict[Any, Step] = {}
    for step in (*plan.steps, *fused.steps):
        given = dict(step.attributes)
        slot = plan.kv_slots[int(given.pop("slot"))] if "slot" in given else None
        names = (*step.inputs, None, *step.outputs)
        values = [None if name is None else plan.value(name) for name in names]
        forms = tuple(v and (v.storage, v.dtype, v.shape, v.strides, v.offset, _place(v)) for v in values)
        found.setdefault((step.op, tuple(sorted(given.items())), slot, forms), step)
    return tuple(found.values())


def _place(value: Value) -> int:
    """Where a buffer begins, as far as alignment goes."""
    return value.base % ALIGNMENT if isinstance(value.base, int) else 0


def _is_attention(step: Step) -> bool:
    return step.op == "paged_attention"
