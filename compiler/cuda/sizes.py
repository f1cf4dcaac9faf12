"""What a dry run tells of the memory of a device. `llmc inspect` of an engine uses it too, without what compiles."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llmc.compiler.config import BLOCK_SIZE
from llmc.plugins.cuda import capability_of
from llmc.runtime.devices.cuda import memory
from llmc.runtime.devices.cuda.memory import MemoryPlan
from llmc.runtime.devices.cuda.program import aligned
from llmc.runtime.fusing import fuse_gates
from llmc.runtime.manifest import KvCacheSpec, Limits
from llmc.runtime.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.compiler.api import Compiled
    from llmc.compiler.config import BuildConfig
    from llmc.compiler.cuda.build import CudaModel
    from llmc.compiler.medusa.build import HeadsToBuild

GIGABYTES = (24, 80, 141)
"""Memory of devices that people have: an RTX 4090 or L4, an H100, an H200."""

KERNEL_BYTES = 32 << 10
"""What a kernel is taken to be large, before it is compiled."""


def device_memory(compiled: Compiled) -> dict[str, Any]:
    """The plan of the memory of a device, for the first architecture; exact but for kernels and graphs."""
    from llmc.compiler.lower import plan_steps

    assert compiled.cuda is not None, "it is for a device"
    arch, kernels = next(iter(compiled.cuda.kernels.items()))
    lowered, limits = compiled.cuda.lowered, Limits(**vars(compiled.limits))
    plan, spec = fuse_gates(lowered.plan), KvCacheSpec(compiled.kv_dtype, BLOCK_SIZE)
    capability = capability_of(arch)
    stored = sum(aligned(weight.nbytes) for weight in lowered.weights.values())
    needs = memory.measure(plan, spec, limits, stored, KERNEL_BYTES * len(kernels), capability)
    drafts = {}
    for part, form in compiled.cuda.parts:
        own = plan_steps(form, compiled.target, part.limits)
        stored = sum(aligned(weight.nbytes) for name, weight in own.weights.items() if name not in lowered.weights)
        sizes = KvCacheSpec(part.kv_dtype, BLOCK_SIZE), Limits(**vars(part.limits))
        drafts[part.name] = memory.measure(fuse_gates(own.plan), *sizes, stored, 0, capability)
    return memory_facts(needs, plan, spec, limits, arch, drafts)


def with_drafts(compiled: Compiled, heads: HeadsToBuild | None, config: BuildConfig) -> Compiled:
    """For a dry run: with the parts for the device that the engine will have to draft with."""
    from llmc.compiler.cuda.build import cuda_model
    from llmc.compiler.eagle.build import eagle_part
    from llmc.compiler.medusa.build import heads_part
    from llmc.compiler.quantize.build import predicted

    if compiled.cuda is None:
        return compiled
    steps = compiled.steps if compiled.planned is None else predicted(compiled.planned)
    as_run, parts = replace(compiled, steps=steps), []
    if heads is not None:
        parts.append(heads_part(heads, as_run, config)[0])
    if compiled.eagle is not None:
        parts.append(eagle_part(compiled.eagle, as_run, config)[0])
    if not parts:
        return compiled
    sizes = compiled.limits, compiled.dtype, compiled.kv_dtype
    return replace(compiled, cuda=cuda_model(steps, compiled.target, *sizes, parts))


def device_facts(compiled: Compiled, model: CudaModel) -> dict[str, Any]:
    """What the report of an engine says of the device."""
    from llmc.compiler.facts import weights  # with torch, which `llmc inspect` does not load

    return {
        "weights": weights(model.lowered),
        "kernels": {arch: sorted(found) for arch, found in model.kernels.items()},
        "device_memory": device_memory(replace(compiled, cuda=model)),
        "verified_on_hardware": False,
    }


def memory_facts(
    needs: MemoryPlan,
    plan: Plan,
    spec: KvCacheSpec,
    limits: Limits,
    arch: str,
    drafts: Mapping[str, MemoryPlan],
) -> dict[str, Any]:
    """For people and for JSON. ``drafts``: what heads and layers take besides where they are used, by name."""
    rooms = []
    for size in GIGABYTES:
        tokens = needs.tokens_on(int(memory.SHARE * size * 10**9))
        sequences = tokens // limits.max_seq_len
        rooms.append({"gigabytes": size, "share": memory.SHARE, "tokens": tokens, "sequences": sequences})
    return {
        "arch": arch,
        "plan": needs.to_json(),
        "buckets": [asdict(size) for size in memory.bucket_sizes(plan, spec, limits, capability_of(arch))],
        "kv_bytes_per_token": needs.block // needs.block_size,
        "max_seq_len": limits.max_seq_len,
        "fits": rooms,
        "drafts": {name: its.to_json() for name, its in drafts.items()},
    }
