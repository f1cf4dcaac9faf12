"""How large an engine will be, and how much memory it takes to build and to run it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from llmc.compiler.config import Limits
from llmc.compiler.lower import LoweredModel
from llmc.compiler.quantize.room import Room
from llmc.errors import ResourceError
from llmc.runtime.engine import kv_bytes_per_token
from llmc.runtime.manifest import KvCacheSpec

OTHER_FILES_BYTES = 32 << 20
"""Room for tokenizer, plan and graph."""

BUILD_BASE_BYTES = 512 << 20
"""What a build needs above Python's imports, besides two copies of the largest tensor."""


@dataclass(frozen=True)
class Estimate:
    """Bytes. ``build_peak_bytes``: at most so much memory above Python's imports while building."""

    weight_bytes: int
    largest_weight_bytes: int
    arena_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    build_peak_bytes: int
    disk_bytes: int
    work_bytes: int = 0
    """Disk that quantizing takes beside the engine, at most."""


def estimate(lowered: LoweredModel, limits: Limits, kv_cache: KvCacheSpec, room: Room) -> Estimate:
    """Exact for weights, arena and KV cache; bounds for the rest. ``room``: what quantizing takes."""
    sizes = [weight.nbytes for weight in lowered.weights.values()]
    per_token = kv_bytes_per_token(lowered.plan, kv_cache)
    return Estimate(
        weight_bytes=sum(sizes),
        largest_weight_bytes=max(sizes),
        arena_bytes=lowered.plan.arena_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes_per_sequence=per_token * limits.max_seq_len,
        build_peak_bytes=max(2 * max(sizes), room.memory) + BUILD_BASE_BYTES,
        disk_bytes=sum(sizes) + OTHER_FILES_BYTES,
        work_bytes=room.disk,
    )


def check_disk(sizes: Estimate, folder: Path, work: Path, more: int = 0) -> None:
    """Refuse before anything is written.

    Args:
        sizes: what is needed.
        folder: where the engine is made.
        work: the folder of the quantization; what an earlier build left there is not needed again.
        more: bytes of the engine that ``sizes`` does not know of.

    Raises:
        ResourceError: the disk has not enough room.
    """
    free = shutil.disk_usage(folder).free
    there = sum(file.stat().st_size for file in work.rglob("*") if file.is_file()) if work.is_dir() else 0
    needed = sizes.disk_bytes + more + max(0, sizes.work_bytes - there)
    if free < needed:
        quantizing = f", {sizes.work_bytes} of them while it is quantized" if sizes.work_bytes else ""
        raise ResourceError(
            f"{folder.parent}: the engine needs {needed} bytes of disk{quantizing}, but only {free} are free"
        )
