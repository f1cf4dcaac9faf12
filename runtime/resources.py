"""What this process may use: processor cores and memory, with the limits of its control group (containers)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from llmc.errors import UsageError

UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)
}


def parse_size(text: str | int) -> int:
    """Bytes of ``2GiB``, ``500MB``, ``1.5g`` or a plain number.

    Raises:
        UsageError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(text).lower())
    if match is None or (size := int(float(match[1]) * UNITS[match[2]])) <= 0:
        raise UsageError(f"{text!r} is not a size; write for example 2GiB or 500MB")
    return size


def physical_cores(root: Path = Path("/")) -> int:
    """Cores (not hyper-threads) that this process may run on, within the processor quota of its control group."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or str(cpu))
    return max(1, min(len(cores), int(_cpu_quota(root))))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without swapping, within the limit of its control group."""
    meminfo = _read(root / "proc/meminfo") or ""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    free = int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _control_groups(root):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(group / limit_name), _read(group / used_name)
            if limit and limit.isdecimal() and used and used.isdecimal():
                statistics = _read(group / "memory.stat") or ""
                cache = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
                free = min(free, max(0, int(limit) - int(used) + (int(cache[1]) if cache else 0)))
    return free


def _cpu_quota(root: Path) -> float:
    """Processors' worth of time that the control group has."""
    quota = float("inf")
    for group in _control_groups(root):
        limits = (_read(group / "cpu.max") or "").split()
        if len(limits) == 2 and limits[0].isdecimal():
            quota = min(quota, int(limits[0]) / int(limits[1]))
        limit, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if limit and period and limit.isdecimal() and period.isdecimal():
            quota = min(quota, int(limit) / int(period))
    return quota if quota != float("inf") else 1e9


def _control_groups(root: Path) -> Iterator[Path]:
    """The directories of this process's control groups, and of the groups that they are in; versions 1 and 2."""
    base = root / "sys/fs/cgroup"
    seen = set()
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        for mount in [base] if not controllers else [base / controllers, *(base / c for c in controllers.split(","))]:
            group = mount / name.strip("/")
            for directory in (group, *group.parents):
                if directory == base.parent:
                    break
                if directory not in seen:
                    seen.add(directory)
                    yield directory


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
