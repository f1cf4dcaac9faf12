"""Puts the kernels of an aarch64 build, run by an emulator, in the place of this machine's.

``install`` replaces the functions and classes of ``llmc.plugins._kernels``: tests that go through it run as they are,
with the instruction sets of aarch64. Each of them runs on the oldest processor that has it, where an instruction of a
newer one ends the process; arrays lie there between pages that can't be touched. kernel_server.cpp is the other side.
"""

import ctypes
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llmc.errors import KernelError
from llmc.plugins import _kernels, kernels

PROCESSORS = {"scalar": "cortex-a57", "neon": "cortex-a57", "dotprod": "neoverse-n1", "i8mm": "max"}
"""By instruction set, each with those before it."""

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
NUMPY = {"bfloat16": "uint16"}
HERE: dict[str, Any] = {}


class Request:
    """Fields of a frame, one after another."""

    def __init__(self, *fields: Any) -> None:
        self.parts: list[bytes] = []
        self.add(*fields)

    def add(self, *fields: Any) -> None:
        """Ints and bools as int64, floats, texts and bytes after their length, arrays as bytes; None as 0."""
        for field in fields:
            if isinstance(field, float):
                self.parts.append(struct.pack("<d", field))
            elif field is None or isinstance(field, int | np.integer):
                self.parts.append(struct.pack("<q", field or 0))
            else:
                data = field.encode() if isinstance(field, str) else bytes(field)
                self.parts += [struct.pack("<q", len(data)), data]

    def add_list(self, items: Sequence[Any], add: Callable[[Any], None]) -> None:
        self.add(len(items))
        for item in items:
            add(item)

    def add_attributes(self, attributes: Mapping[str, Any]) -> None:
        self.add(len(attributes))
        for name, value in attributes.items():
            self.add(name, type(value).__name__, value)


class Answer:
    """Fields of a frame, as they are asked for."""

    def __init__(self, frame: bytes) -> None:
        self.frame, self.at = frame, 0

    def number(self) -> int:
        (value,) = struct.unpack_from("<q", self.frame, self.at)
        self.at += 8
        return int(value)

    def bytes(self) -> bytes:
        size = self.number()
        self.at += size
        return self.frame[self.at - size : self.at]

    def texts(self) -> list[str]:
        return [self.bytes().decode() for _ in range(self.number())]


class Machine:
    """A processor that the emulator plays, with the kernel server running on it."""

    def __init__(self, server: Path, processor: str) -> None:
        self.name = processor
        command = ["qemu-aarch64-static", "-cpu", processor, str(server)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        answer = self.ask(Request("names"))
        self.isas, self.ops = answer.texts(), answer.texts()

    def ask(self, request: Request) -> Answer:
        frame = b"".join(request.parts)
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(struct.pack("<q", len(frame)) + frame)
            self.process.stdin.flush()
            size = self.process.stdout.read(8)
        except BrokenPipeError:
            size = b""
        assert len(size) == 8, f"the kernels on {self.name} have ended with {self.process.wait()}"
        answer = Answer(self.process.stdout.read(struct.unpack("<q", size)[0]))
        if problem := answer.bytes().decode():
            raise MemoryError(problem) if problem == "no memory" else KernelError(problem)
        return answer


class Batch:
    """The arrays of a batch."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays + (None,) * (6 - len(arrays))

    def add_to(self, request: Request) -> None:
        request.add(*(b"" if array is None else np.ascontiguousarray(array) for array in self.arrays))


class Kv(_kernels.Kv):
    """A cache on this machine that says how it was made: its layout is the same on every machine."""

    def __init__(self, slots: Any, dtype: str, block_size: int, blocks: int) -> None:
        super().__init__(slots, dtype, block_size, blocks)
        self.sizes = (slots, dtype, block_size, blocks)

    def arrays(self) -> list[np.ndarray]:
        return [array for slot in range(len(self.sizes[0])) for array in (self.keys(slot), self.values(slot))]


def add_kv(request: Request, slots: Sequence[Sequence[int]], dtype: str, block_size: int, blocks: int) -> None:
    request.add_list(slots, lambda slot: request.add(*slot))
    request.add(dtype, block_size, blocks)


def span(view: tuple[int, str, list[int], list[int]]) -> tuple[int, int, int]:
    """(address, bytes before the first element, bytes) of all that a view reaches."""
    address, dtype, shape, strides = view
    size = SIZES.get(dtype, 0)
    if 0 in shape:
        return address, 0, 0
    reach = [(n - 1) * stride * size for n, stride in zip(shape, strides, strict=True)]
    before = -sum(r for r in reach if r < 0)
    return address - before, before, before + sum(r for r in reach if r > 0) + size


def add_view(request: Request, view: Any) -> None:
    request.add(view is not None)
    if view is None:
        return
    address, before, size = span(view)
    _, dtype, shape, strides = view
    request.add(dtype, np.array(shape, np.int64), np.array(strides, np.int64), before)
    request.add(ctypes.string_at(address, size))


def take_view(answer: Answer, view: Any) -> None:
    """Write an output where it belongs, and nothing between its elements."""
    address, before, size = span(view)
    found = answer.bytes()
    if size == 0:
        return
    _, dtype, shape, strides = view
    item = SIZES[dtype]
    memory = (ctypes.c_char * size).from_address(address)
    here, there = (
        np.ndarray(shape, f"u{item}", buffer, before, [s * item for s in strides]) for buffer in (memory, found)
    )
    here[...] = there


def install(server: Path) -> None:
    """Replace this machine's kernels, and check that each processor says what it has."""

    @cache
    def machine(processor: str) -> Machine:
        return Machine(server, processor)

    names = list(PROCESSORS)
    for processor in set(PROCESSORS.values()):
        last = max(i for i, name in enumerate(names) if PROCESSORS[name] == processor)
        found = machine(processor).isas
        assert found == names[: last + 1], f"{processor} says that it has {found}"

    def run_op(
        op: str, inputs: Any, outputs: Any, attributes: Any, isa: str, threads: int, batch: Any, kv: Kv | None
    ) -> None:
        request = Request("run_op", op, isa, threads)
        request.add_attributes(attributes)
        request.add_list(inputs, lambda view: add_view(request, view))
        request.add_list(outputs, lambda view: add_view(request, view))
        (batch or Batch(None, np.zeros(1, np.int32))).add_to(request)
        request.add(kv is not None)
        if kv is not None:
            add_kv(request, *kv.sizes)
            request.add(*kv.arrays())
        answer = machine(PROCESSORS.get(isa, "max")).ask(request)
        for view in outputs:
            take_view(answer, view)
        for array in kv.arrays() if kv is not None else ():
            array[...] = np.frombuffer(answer.bytes(), array.dtype).reshape(array.shape)

    class Executor:
        """A plan on the machine that has its instruction set."""

        def __init__(self, **given: Any) -> None:
            request = Request("executor")
            sizes = lambda dims: request.add_list(dims, lambda dim: request.add(*dim))  # noqa: E731

            def add_value(value: Any) -> None:
                name, storage, base, dtype, shape, strides, offset = value
                request.add(name, storage, base, dtype)
                sizes(shape)
                sizes(strides)
                request.add(*offset)

            def add_step(step: Any) -> None:
                op, module, inputs, outputs, attributes = step
                request.add(op, module, np.array(inputs, np.int64), np.array(outputs, np.int64))
                request.add_attributes(attributes)

            request.add_list(given["values"], add_value)
            request.add_list(given["steps"], add_step)
            request.add(given["arena_bytes"])
            request.add_list(given["weights"], request.add)
            add_kv(request, given["kv_slots"], given["kv_dtype"], given["block_size"], given["blocks"])
            request.add(given["threads"], given["isa"], given["poison"])
            self.machine = machine(PROCESSORS.get(given["isa"], "max"))
            self.number = self.machine.ask(request).number()

        def __del__(self) -> None:
            if hasattr(self, "number") and self.machine.process.poll() is None:
                self.machine.ask(Request("drop", self.number))

        def run(
            self, input_ids: Any, logit_rows: Any, batch: Batch, upto: int, adapters: Any = None, choose_from: int = -1
        ) -> None:
            request = Request("run", self.number, input_ids, logit_rows)
            batch.add_to(request)
            request.add(upto, b"" if adapters is None else adapters, choose_from)
            self.machine.ask(request)

        def chosen(self) -> tuple[list[int], list[float]]:
            answer = self.machine.ask(Request("chosen", self.number))
            return np.frombuffer(answer.bytes(), np.int32).tolist(), np.frombuffer(answer.bytes(), np.float32).tolist()

        def view(self, value: int) -> np.ndarray:
            answer = self.machine.ask(Request("view", self.number, value))
            dtype = np.dtype(NUMPY.get(name := answer.bytes().decode(), name))
            shape, strides = (np.frombuffer(answer.bytes(), np.int64).tolist() for _ in range(2))
            flat = np.frombuffer(answer.bytes(), dtype)
            return np.lib.stride_tricks.as_strided(flat, shape, [s * dtype.itemsize for s in strides])

        def copy_block(self, source: int, target: int) -> None:
            self.machine.ask(Request("copy_block", self.number, source, target))

        def poison_block(self, block: int) -> None:
            self.machine.ask(Request("poison_block", self.number, block))

    best = machine(PROCESSORS[names[-1]])
    replacements = {
        "isas": lambda: list(best.isas),
        "ops": lambda: list(best.ops),
        "run_op": run_op,
        "Batch": Batch,
        "Kv": Kv,
        "Executor": Executor,
    }
    for name, value in replacements.items():
        HERE[name] = getattr(_kernels, name)
        setattr(_kernels, name, value)
    kernels.Kv = Kv


@contextmanager
def here() -> Iterator[None]:
    """This machine's own kernels, for a while."""
    there = {name: getattr(_kernels, name) for name in HERE}
    for name, value in HERE.items():
        setattr(_kernels, name, value)
    yield
    for name, value in there.items():
        setattr(_kernels, name, value)
