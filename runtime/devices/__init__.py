"""What runs plans: one module a device."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from llmc import debug
from llmc.errors import UsageError
from llmc.runtime.engine import read_manifest
from llmc.runtime.fusing import fuse_gates

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.runtime.batch import Executor
    from llmc.runtime.devices.cuda.device import Device
    from llmc.runtime.engine import Engine


def make_executor(engine: Engine, *, num_blocks: int, threads: int | None = None, isa: str | None = None) -> Executor:
    """The executor of an engine's target, or with ``LLMC_REFERENCE=1`` one that runs the references of the ops.

    Raises:
        UsageError: the references are asked for, and the engine is for another device or has adapters, or torch is not
            installed.
        LlmcError: as the executor of the target.
    """
    if debug.enabled("LLMC_REFERENCE"):
        if engine.manifest.target != "cpu":
            raise UsageError(
                f"LLMC_REFERENCE=1 runs engines for the CPU, but {engine.path} is built for {engine.manifest.target}; "
                "leave it away, or build one with --target cpu"
            )
        if any(step.op == "lora" for step in engine.plan.steps):
            raise UsageError("LLMC_REFERENCE=1 runs no adapters; leave lora away")
        try:
            reference = importlib.import_module("llmc.compiler.reference_executor")
        except ImportError as error:
            raise UsageError(f"LLMC_REFERENCE=1 needs the extra [build]: {error}") from error
        executor: Executor = reference.for_engine(engine, num_blocks=num_blocks)
        return executor
    if engine.manifest.target != "cpu":
        return _cuda_executor(engine, num_blocks, isa)
    from llmc.runtime.devices.cpu import CpuExecutor

    engine = replace(engine, plan=fuse_gates(engine.plan))
    return CpuExecutor(engine, num_blocks=num_blocks, threads=threads, isa=isa)


def check_device(path: Path) -> None:
    """See whether an engine's device is there, which takes no time; the engine itself is not looked at.

    Raises:
        EngineError: there is no engine, or none for a device of this machine.
    """
    manifest = read_manifest(path)
    if manifest.target != "cpu":
        from llmc.runtime.devices.cuda.targets import choose

        device = open_cuda()
        choose(path, manifest, device.capability, device.name)


def open_cuda() -> Device:
    """The device that engines for CUDA run on, opened once.

    Raises:
        EngineError: there is none that can be used; says why.
    """
    if not _devices:
        from llmc.runtime.devices.cuda.driver import CudaDevice

        _devices.append(CudaDevice())
    return _devices[0]


_devices: list[Device] = []


def _cuda_executor(engine: Engine, num_blocks: int, isa: str | None) -> Executor:
    if isa is not None:
        raise UsageError(f"isa {isa}: the engine is built for {engine.manifest.target}, not for the CPU")
    if any(step.op == "lora" for step in engine.plan.steps):
        raise UsageError("engines for CUDA run no adapters yet; merge one into the model: llmc build --lora DIR")
    from llmc.runtime.devices.cuda.executor import CudaExecutor

    return CudaExecutor(engine, open_cuda(), num_blocks=num_blocks)
