"""Which kernels of an engine run on a device, and what the files of kernels are called."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from llmc.errors import EngineError
from llmc.plugins.cuda import Kernel, capability_of
from llmc.runtime.manifest import rebuild_command

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.runtime.engine import Engine
    from llmc.runtime.manifest import Manifest

KERNELS = "kernels.json"
"""Fingerprints of the kernels of an engine, by name."""


def kernel_file(arch: str, name: str) -> str:
    """Of the machine code of a kernel."""
    return f"kernels-{arch}/{name}.cubin"


def fingerprint(kernel: Kernel) -> str:
    """Of what a launch has to agree with: name, params, threads and instance."""
    return hashlib.sha256(kernel.source_text.encode()).hexdigest()


def architectures(target: str) -> tuple[str, ...]:
    """``("sm_80", "sm_90")`` of ``cuda:sm_80,sm_90``."""
    return tuple(target.removeprefix("cuda:").split(","))


def choose(path: Path, manifest: Manifest, capability: int, device: str) -> str:
    """The newest architecture of an engine whose machine code the device runs: same major version, none newer.

    sm_90a counts as newer than sm_90.

    Raises:
        EngineError: there is none; names the command that builds for the device.
    """
    target = manifest.target
    fitting = [arch for arch in architectures(target) if _runs(arch, capability)]
    if not fitting:
        raise EngineError(
            f"{path}: built for {target}, but {device} has compute capability {capability / 10}; build it with: "
            f"{rebuild_command(manifest)} --target cuda:sm_{capability // 10 * 10}"
        )
    return max(fitting, key=capability_of)


def _runs(arch: str, capability: int) -> bool:
    """Machine code of sm_90a runs on that very chip, other machine code on later ones of its major version too."""
    if arch.endswith("a"):
        return arch == f"sm_{capability}a"
    return capability // 10 == capability_of(arch) // 10 and capability_of(arch) <= capability


def rebuild(engine: Engine) -> str:
    """The command that builds the engine anew."""
    return f"{rebuild_command(engine.manifest)} --target {engine.manifest.target}"
