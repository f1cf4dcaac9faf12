"""What a dry run tells of the memory of a device."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llmc.compiler.config import BLOCK_SIZE
from llmc.runtime.devices.cuda import memory
from llmc.runtime.devices.cuda.memory import MemoryPlan
from llmc.runtime.devices.cuda.program import aligned
from llmc.runtime.fusing import fuse_gates
from llmc.runtime.manifest import KvCacheSpec, Limits
from llmc.runtime.plan import Plan

if TYPE_CHECKING:
    from llmc.compiler.api import Compiled
    from llmc.compiler.cuda.build import CudaModel

GIGABYTES = (24, 80, 141)
"""Memory of devices that people have: an RTX 4090 or L4, an H100, an H200."""

KERNEL_BYTES = 32 << 10
"""What a kernel is taken to be large, before it is compiled."""


def device_memory(compiled: Compiled) -> dict[str, Any]:
    """The plan of the memory of a device, for the first architecture; exact but for kernels and graphs."""
    assert compiled.cuda is not None, "it is for a device"
    arch, kernels = next(iter(compiled.cuda.kernels.items()))
    lowered, limits = compiled.cuda.lowered, Limits(**vars(compiled.limits))
    plan, spec = fuse_gates(lowered.plan), KvCacheSpec(compiled.kv_dtype, BLOCK_SIZE)
    capability = int(arch.removeprefix("sm_"))
    stored = sum(aligned(weight.nbytes) for weight in lowered.weights.values())
    needs = memory.measure(plan, spec, limits, stored, KERNEL_BYTES * len(kernels), capability)
    return memory_facts(needs, plan, spec, limits, arch)


def device_facts(compiled: Compiled, model: CudaModel) -> dict[str, Any]:
    """What the report of an engine says of the device."""
    from llmc.compiler.facts import weights  # with torch, which `llmc inspect` does not load

    return {
        "weights": weights(model.lowered),
        "kernels": {arch: sorted(found) for arch, found in model.kernels.items()},
        "device_memory": device_memory(replace(compiled, cuda=model)),
        "verified_on_hardware": False,
    }


def memory_facts(needs: MemoryPlan, plan: Plan, spec: KvCacheSpec, limits: Limits, arch: str) -> dict[str, Any]:
    """For people and for JSON."""
    rooms = []
    for size in GIGABYTES:
        tokens = needs.tokens_on(int(memory.SHARE * size * 10**9))
        sequences = tokens // limits.max_seq_len
        rooms.append({"gigabytes": size, "share": memory.SHARE, "tokens": tokens, "sequences": sequences})
    return {
        "arch": arch,
        "plan": needs.to_json(),
        "buckets": [asdict(size) for size in memory.bucket_sizes(plan, spec, limits, int(arch.removeprefix("sm_")))],
        "kv_bytes_per_token": needs.block // needs.block_size,
        "max_seq_len": limits.max_seq_len,
        "fits": rooms,
    }
