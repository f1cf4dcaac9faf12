"""What runs plans: one module a device."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from llmc import debug
from llmc.errors import EngineError, LlmcError, UsageError
from llmc.runtime.engine import load_engine, read_manifest
from llmc.runtime.fusing import fuse_gates
from llmc.runtime.lora import adapters_of, with_adapters

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llmc.runtime.batch import Executor, PartExecutor
    from llmc.runtime.devices.cuda.device import Device
    from llmc.runtime.engine import Engine
    from llmc.runtime.manifest import Manifest


def make_executor(
    engine: Engine,
    *,
    num_blocks: int,
    threads: int | None = None,
    isa: str | None = None,
    device: Device | None = None,
) -> Executor:
    """The executor of an engine's target, or with ``LLMC_REFERENCE=1`` one that runs the references of the ops.

    ``device``: of `open_device`, for engines that need one; it belongs to the executor from now on.

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
    engine = replace(engine, plan=fuse_gates(engine.plan))
    if engine.manifest.target != "cpu":
        return _cuda_executor(engine, num_blocks, isa, device)
    from llmc.runtime.devices.cpu import CpuExecutor

    return CpuExecutor(engine, num_blocks=num_blocks, threads=threads, isa=isa)


def make_part(
    part: Engine, model: Executor | None, *, num_blocks: int, threads: int | None, isa: str | None
) -> PartExecutor:
    """The executor of a part of an engine that drafts for it.

    ``part``: the engine, with the plan, the limits and the cache of the part in place of its own. ``model``: the
    executor of the engine; on a device it shares that and weights with the part, and closes both.
    """
    if part.manifest.target != "cpu":
        from llmc.runtime.devices.cuda.executor import CudaExecutor

        assert isinstance(model, CudaExecutor), "the engine runs there, too"
        return CudaExecutor(part, model.device, num_blocks=num_blocks, beside=model)
    from llmc.runtime.devices.cpu import CpuExecutor

    return CpuExecutor(part, num_blocks=num_blocks, threads=threads, isa=isa)


def open_device(engine: Engine) -> Device | None:
    """The device that an engine runs on, to be closed by whoever opens it; None: the CPU.

    Raises:
        EngineError: there is none that can be used, or the engine has no kernels for it; says why.
    """
    if engine.manifest.target == "cpu":
        return None
    return _fitting(engine.path, engine.manifest)


def check_engine(path: Path, lora: Mapping[str, Path] | None = None) -> None:
    """Find out whether this machine has the device that an engine is built for, and what adapters there are fit it.

    No weight is read.

    Raises:
        EngineError: as `open_device`, or there is no engine, or an adapter is damaged, of another model, or has no
            kernel.
    """
    manifest, device = read_manifest(path), None
    if manifest.target != "cpu":
        device = _fitting(path, manifest)
    try:
        if lora:
            engine = with_adapters(load_engine(path, read_weights=False), adapters_of(lora))
            if device is not None:
                from llmc.runtime.devices.cuda import memory, targets

                memory.plan_of(engine, targets.choose(path, manifest, device.capability, device.name))
    except EngineError:
        raise
    except LlmcError as problem:
        raise EngineError(str(problem)) from problem
    finally:
        if device is not None:
            device.close()


def open_cuda() -> Device:
    """A device object of its own for each executor.

    Raises:
        EngineError: there is no device that can be used; says why.
    """
    from llmc.runtime.devices.cuda.driver import CudaDevice

    return CudaDevice()


def _fitting(path: Path, manifest: Manifest) -> Device:
    from llmc.runtime.devices.cuda import targets

    device = open_cuda()
    try:
        targets.choose(path, manifest, device.capability, device.name)
    except BaseException:
        device.close()
        raise
    return device


def _cuda_executor(engine: Engine, num_blocks: int, isa: str | None, device: Device | None) -> Executor:
    if isa is not None:
        raise UsageError(f"isa {isa}: the engine is built for {engine.manifest.target}, not for the CPU")
    from llmc.runtime.devices.cuda.executor import CudaExecutor

    device = device or _fitting(engine.path, engine.manifest)
    try:
        return CudaExecutor(engine, device, num_blocks=num_blocks)
    except BaseException:
        device.close()  # with all that it has allocated
        raise
