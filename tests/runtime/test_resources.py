"""Cores and memory, within the limits of control groups; sizes as people write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.errors import UsageError
from llmc.runtime.resources import available_memory, parse_size, physical_cores

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * GIB), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("64 KiB", 65536), (4096, 4096), ("7b", 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1GiB", "0", "2XB", "1e9", "GiB", "2 GiB or so"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size; write for example 2GiB"):
        parse_size(text)


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   16777216 kB\n"}.items() | files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_without_a_limit(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, {})) == 16 * GIB


def test_memory_limit_of_a_parent_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "5\n",
    }
    assert available_memory(machine(tmp_path, files)) == 2 * GIB


def test_memory_limit_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(2 * GIB),
    }
    assert available_memory(machine(tmp_path, files)) == 0


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5}, raising=False)
    siblings = {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n" for i in range(6)
    }
    assert physical_cores(machine(tmp_path, siblings)) == 4
    quota = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}
    assert physical_cores(machine(tmp_path, quota)) == 2
    assert physical_cores(machine(tmp_path, {"sys/fs/cgroup/a/cpu.max": "50000 100000\n"})) == 1
    assert physical_cores(machine(tmp_path, {"sys/fs/cgroup/a/cpu.max": "max 100000\n"})) == 4
    version_1 = {
        "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
        "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
    }
    assert physical_cores(machine(tmp_path, version_1)) == 3


def test_this_machine() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
    assert available_memory() > 0
