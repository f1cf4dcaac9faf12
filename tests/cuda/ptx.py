"""Runs the PTX that a compiler really made, on numpy arrays with one element a thread, all blocks at once.

It shows what the emulator can't: mistakes in the inline PTX of csrc/cuda/gpu.cuh and of the compiler's front end.
Threads come together again at the smallest program counter. Races are not looked for; the emulator does that.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import ptx_numbers as numbers
from emulator import DTYPES, INCLUDES, Emulator
from ptx_hopper import Hopper
from ptx_memory import SHARED, Global, Shared, as_bytes
from ptx_numbers import TYPES, WORDS
from ptx_parser import Instruction, PtxError, parse

from llmc.compiler.cuda.nvrtc import compile_kernels
from llmc.plugins.cuda import Launch

WARP = 32
LANES = np.arange(WARP)
FULL = 0xFFFFFFFF
THREADS = 1 << 13
"""At once, as whole blocks."""


class Interpreter(Emulator):
    """A device whose kernels are interpreted. ``arch`` as NVRTC knows it, such as compute_90."""

    def __init__(self, arch: str = "compute_90") -> None:
        self.arch, self.mode, self.memory = arch, "ptx", Global()

    def alloc(self, size: int, name: str = "", *, writable: bool = True, known: bool = False) -> int:
        """See `Emulator.alloc`."""
        return self.memory.alloc(size, name, writable, known)

    def launch(self, launch: Launch, *, order: int | None = None, seed: int | None = None) -> None:
        """Compile the kernel and run what came out."""
        kernel = launch.kernel
        ptx = compile_kernels([kernel], self.arch, folders=INCLUDES)[kernel.name].decode()
        run(ptx, launch, self.memory)

    def run(self, launches: Any, **options: Any) -> None:
        """Run launches in order."""
        for one in launches:
            self.launch(one)

    def get(self, address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """See `Emulator.get`."""
        kind = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        size = int(np.prod(shape)) * kind.itemsize
        return self._bytes(address, size).copy().view(kind).reshape(shape)

    def free(self) -> None:
        """Memory goes with the interpreter."""

    def _bytes(self, address: int, size: int) -> np.ndarray:
        return self.memory.view(address, size)


def run(ptx: str, launch: Launch, memory: Global) -> None:
    """Interpret a launch.

    Raises:
        PtxError: it does what it may not, or holds an unknown instruction.
    """
    program = parse(ptx, launch.kernel.name)
    x, y, z = launch.grid
    blocks, at_once = x * y * z, max(1, THREADS // launch.kernel.threads)
    for first in range(0, blocks, at_once):
        Machine(program, launch, memory, np.arange(first, min(blocks, first + at_once))).run()


class Machine(Hopper):
    """Some blocks of a launch."""

    def __init__(self, program: Any, launch: Launch, memory: Global, blocks: np.ndarray) -> None:
        self.code, self.labels = program
        size = launch.kernel.threads
        if size % WARP:
            raise PtxError(f"blocks of {size} threads have no whole warps")
        self.memory, self.shared = memory, Shared(launch.shared, len(blocks))
        self.params = np.frombuffer(bytes(launch.params), np.uint8)
        self.threads = size * len(blocks)
        self.block_of = np.repeat(np.arange(len(blocks)), size)
        x, y, _ = launch.grid
        thread = np.tile(np.arange(size, dtype=np.uint32), len(blocks))
        places = np.repeat(blocks, size)
        special = {
            "tid.x": thread,
            "tid.y": 0,
            "tid.z": 0,
            "laneid": thread % WARP,
            "ctaid.x": places % x,
            "ctaid.y": places // x % y,
            "ctaid.z": places // (x * y),
            "ntid.x": size,
            "ntid.y": 1,
            "ntid.z": 1,
        } | {f"nctaid.{axis}": count for axis, count in zip("xyz", launch.grid, strict=True)}
        self.registers = {
            f"%{name}": np.broadcast_to(np.asarray(value, np.uint32), self.threads).copy()
            for name, value in special.items()
        }
        self.done = np.zeros(self.threads, bool)
        self.open: list[list[Any]] = [[] for _ in range(self.threads)]
        self.groups: list[list[list[Any]]] = [[] for _ in range(self.threads)]
        super().__init__()

    def run(self) -> None:
        """Until all threads have ended."""
        counter, waiting = np.zeros(self.threads, np.int64), np.zeros(self.threads, bool)
        with np.errstate(all="ignore"):
            while not self.done.all():
                active = ~self.done & ~waiting & ~self.stalled
                if not active.any():
                    if self.stalled.any():
                        raise PtxError("threads wait for a phase of an mbarrier that never ends")
                    ended = np.zeros(int(self.block_of[-1]) + 1, bool)
                    ended[self.block_of[self.done]] = True
                    if ended[self.block_of[waiting]].any():
                        raise PtxError("a barrier after some threads have ended")
                    waiting[:] = False
                    continue
                here = int(counter[active].min())
                chosen = active & (counter == here)
                others = active & ~chosen
                stop = int(counter[others].min()) if others.any() else len(self.code) + 1
                self._straight(here, stop, chosen, counter, waiting)

    def _straight(self, here: int, stop: int, chosen: np.ndarray, counter: np.ndarray, waiting: np.ndarray) -> None:
        """Run until a branch, a barrier, or where other threads are."""
        while True:
            if here >= len(self.code):
                raise PtxError("threads run past the end of the code")
            one = self.code[here]
            mask = chosen
            if one.guard is not None:
                mask = chosen & (~self.registers[one.guard] if one.negated else self.registers[one.guard])
            here += 1
            if one.op in ("ret", "exit"):
                self.done |= mask
                counter[chosen & ~mask] = here
                return
            if one.op.startswith("bra"):
                counter[chosen & ~mask] = here
                counter[mask] = self.labels[one.args[0]]
                return
            if one.op.startswith(("bar.sync", "barrier.sync", "bar.red", "barrier.red")):
                if one.op.split(".")[1] == "red":
                    self._reduce_barrier(one, mask)
                waiting |= mask
                counter[chosen] = here
                return
            if mask.any():
                self._execute(one, mask)
            if here >= stop:
                counter[chosen] = here
                return

    # ---- operands

    def value(self, arg: str, dtype: Any) -> np.ndarray:
        """An operand as numbers of this type."""
        dtype = np.dtype(dtype)
        word = WORDS[dtype.itemsize]
        if arg.startswith("%"):
            found = self.registers[arg]
            return (found if found.dtype.itemsize == dtype.itemsize else found.astype(word)).view(dtype)
        if arg[:2].lower() == "0f":
            number = int(arg[2:], 16)
        elif arg.lstrip("-")[:1].isdigit():
            number = int(arg.rstrip("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
        else:  # the one array of shared memory, or the params: their addresses begin at 0
            number = 0
        return np.full(self.threads, number, word).view(dtype)

    def write(self, register: str, value: np.ndarray, mask: np.ndarray) -> None:
        """Set a register of some threads."""
        if register == "_":
            return
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(WORDS[value.dtype.itemsize])
        old = self.registers.get(register)
        if old is None or old.dtype != value.dtype:
            old = np.zeros(self.threads, value.dtype)
        self.registers[register] = np.where(mask, value, old)

    def predicate(self, arg: str) -> np.ndarray:
        """A predicate operand, which may be negated."""
        if arg in ("0", "-1"):
            return np.full(self.threads, arg == "-1")
        return ~self.registers[arg[1:]] if arg.startswith("!") else self.registers[arg]

    def address(self, arg: str) -> np.ndarray:
        """Of a memory operand."""
        base, _, offset = arg.strip("[]").partition("+")
        register = base.startswith("%")
        start = self.registers[base] if register else np.zeros(self.threads, np.uint32)
        return start + start.dtype.type(int(offset or 0) % (1 << 8 * start.dtype.itemsize))

    def warps(self, mask: np.ndarray, what: str) -> np.ndarray:
        """The warps that run, all of their lanes together."""
        lanes = mask.reshape(-1, WARP)
        if not (lanes.all(1) | ~lanes.any(1)).all():
            raise PtxError(f"part of a warp at {what}")
        found: np.ndarray = np.flatnonzero(lanes.any(1))
        return found

    # ---- instructions

    def _execute(self, one: Instruction, mask: np.ndarray) -> None:
        fields = one.op.split(".")
        handler = getattr(self, f"_{fields[0]}", None)
        if handler is not None:
            handler(one, fields, mask)
        elif fields[0] in ("membar", "fence"):
            pass
        elif fields[-1] == "f32":
            self._float(one, fields, mask)
        else:
            self._integer(one, fields, mask)

    def _float(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        values = [self.value(arg, np.float32) for arg in one.args[1:]]
        if fields[0] in numbers.FUNCTIONS:
            result = numbers.FUNCTIONS[fields[0]](values[0])
        else:
            if "NaN" in fields:
                raise PtxError(f"unknown instruction: {one}")
            result = values[0]
            for value in values[1:]:  # min and max have three inputs from sm_100 on
                result = numbers.FLOATS[fields[0]](result, value)
        self.write(one.args[0], result.astype(np.float32), mask)

    def _integer(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        op, kind = fields[0], fields[-1]
        if kind == "pred":
            inputs = [self.predicate(arg) for arg in one.args[1:]]
            result = ~inputs[0] if op == "not" else numbers.INTEGERS[op](*inputs)
            return self.write(one.args[0], result, mask)
        values = [self.value(arg, TYPES[kind]) for arg in one.args[1:]]
        if op in ("abs", "neg", "not"):
            result = {"abs": np.abs, "neg": np.negative, "not": np.invert}[op](values[0])
        elif fields[1] == "hi":
            result = numbers.high_product(*values)
        else:
            if op in ("div", "rem"):
                values[1] = np.where(mask, values[1], values[1].dtype.type(1))
            result = numbers.INTEGERS[op](*values)
        self.write(one.args[0], result.astype(TYPES[kind]), mask)

    def _mul(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        if fields[1] != "wide":
            return (self._float if fields[-1] == "f32" else self._integer)(one, fields, mask)
        self.write(one.args[0], self._wide_product(one, fields), mask)

    def _wide_product(self, one: Instruction, fields: list[str]) -> np.ndarray:
        wide = TYPES[f"{fields[-1][0]}{2 * int(fields[-1][1:])}"]
        x, y = (self.value(arg, TYPES[fields[-1]]).astype(wide) for arg in one.args[1:3])
        return x * y

    def _mad(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        if fields[1] == "wide":
            product = self._wide_product(one, fields)
        else:
            x, y = (self.value(arg, TYPES[fields[-1]]) for arg in one.args[1:3])
            product = numbers.high_product(x, y) if fields[1] == "hi" else x * y
        self.write(one.args[0], product + self.value(one.args[3], product.dtype), mask)

    def _fma(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        if fields[-1] in ("bf16x2", "f16x2"):
            kind = fields[-1].removesuffix("x2")
            a, b, c = (numbers.halves(kind, self.value(arg, np.uint32)) for arg in one.args[1:])
            low, high = (
                (x.astype(np.float64) * y.astype(np.float64) + z).astype(np.float32)
                for x, y, z in zip(a, b, c, strict=True)
            )
            return self.write(one.args[0], numbers.pack(kind, low, high), mask)
        x, y, z = (self.value(arg, np.float32).astype(np.float64) for arg in one.args[1:])
        self.write(one.args[0], numbers.rounded(x * y + z, fields[1]), mask)

    def _shl(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        x = self.value(one.args[1], TYPES[fields[-1]])
        self.write(one.args[0], numbers.shift(fields[0], x, self.value(one.args[2], np.uint32)), mask)

    _shr = _shl

    def _shf(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        low, high, count = (self.value(arg, np.uint32) for arg in one.args[1:])
        self.write(one.args[0], numbers.funnel(fields[1], fields[2], low, high, count), mask)

    def _bfi(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        a, b = (self.value(arg, TYPES[fields[-1]]) for arg in one.args[1:3])
        self.write(one.args[0], numbers.insert(a, b, *(self.value(arg, np.uint32) for arg in one.args[3:])), mask)

    def _bfe(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        at, size = (self.value(arg, np.uint32) for arg in one.args[2:])
        self.write(one.args[0], numbers.field(self.value(one.args[1], TYPES[fields[-1]]), at, size), mask)

    def _prmt(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        self.write(one.args[0], numbers.prmt(*(self.value(arg, np.uint32) for arg in one.args[1:])), mask)

    def _lop3(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        a, b, c = (self.value(arg, np.uint32) for arg in one.args[1:4])
        self.write(one.args[0], numbers.lop3(a, b, c, int(one.args[4], 0)), mask)

    def _popc(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        self.write(one.args[0], numbers.count_bits(fields[0], self.value(one.args[1], TYPES[fields[-1]])), mask)

    _clz = _brev = _popc

    def _mov(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        target, source = one.args
        if fields[-1] == "pred":
            return self.write(target, self.predicate(source), mask)
        dtype = TYPES[fields[-1]]
        word, half = WORDS[dtype.itemsize], WORDS[max(dtype.itemsize // 2, 1)]
        bits = word(dtype.itemsize * 4)
        if source.startswith("{"):
            low, high = (self.value(part, half).astype(word) for part in _parts(source))
            return self.write(target, low | high << bits, mask)
        if target.startswith("{"):
            value = self.value(source, word)
            for register, part in zip(_parts(target), (value, value >> bits), strict=True):
                self.write(register, part.astype(half), mask)
            return None
        return self.write(target, self.value(source, dtype), mask)

    def _setp(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        target, *args = one.args
        x, y = (self.value(arg, TYPES[fields[-1]]) for arg in args[:2])
        result = numbers.compare(fields[1], x, y)
        combine = fields[2] if fields[2] in ("and", "or", "xor") else None
        if "|" in target or (combine is None) != (len(args) == 2):
            raise PtxError(f"unknown instruction: {one}")
        if combine:
            result = numbers.INTEGERS[combine](result, self.predicate(args[2]))
        self.write(target, result, mask)

    def _selp(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        x, y = (self.value(arg, TYPES[fields[-1]]) for arg in one.args[1:3])
        self.write(one.args[0], np.where(self.predicate(one.args[3]), x, y), mask)

    def _cvta(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        """Generic addresses of global memory are its own; those of shared memory begin at `SHARED`."""
        value = self.value(one.args[1], np.uint64)
        if "shared" in fields:
            value = value - np.uint64(SHARED) if fields[1] == "to" else value + np.uint64(SHARED)
        self.write(one.args[0], value, mask)

    def _cvt(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        target, source = fields[-2:]
        if target in ("bf16x2", "f16x2"):
            high, low = (self.value(arg, np.float32) for arg in one.args[1:])
            return self.write(one.args[0], numbers.pack(target, low, high), mask)
        x = self.value(one.args[1], np.uint16 if source in ("f16", "bf16") else TYPES[source])
        value = numbers.convert(fields, x, target, source)
        if value.dtype.itemsize == 1:  # registers of 8 bits are wider ones, extended by their sign
            value = value.astype(np.int16 if target[0] == "s" else np.uint16)
        return self.write(one.args[0], value, mask)

    # ---- memory

    def _ld(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        registers, dtype = _parts(one.args[0]), TYPES[fields[-1]]
        word = np.dtype(WORDS[dtype.itemsize])
        size = dtype.itemsize * len(registers)
        found = np.zeros((self.threads, size), np.uint8)
        if "param" in fields:
            starts = self.address(one.args[1])[mask].astype(np.int64)  # threads may read different ones
            found[mask] = self.params[starts[:, None] + np.arange(size)]
        else:
            for where, memory, places in self._places(one.args[1], fields, mask, size, write=False):
                found[where] = memory[places]
        words = found.view(word)
        for i, register in enumerate(registers):
            value = np.ascontiguousarray(words[:, i]).view(dtype)
            wide = {"%rd": 8, "%rs": 2}.get(register[:3], 4)
            if wide > dtype.itemsize:  # the rest of the register is the sign, or zeros
                value = value.astype(f"{dtype.kind}{wide}")
            self.write(register, value, mask)

    def _st(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        dtype, registers = TYPES[fields[-1]], _parts(one.args[1])
        words = np.stack([self.value(register, WORDS[dtype.itemsize]) for register in registers], 1)
        data = words.view(np.uint8).reshape(self.threads, -1)
        for where, memory, places in self._places(one.args[0], fields, mask, data.shape[1], write=True):
            memory[places] = data[where]

    def _places(self, arg: str, fields: list[str], mask: np.ndarray, size: int, *, write: bool) -> Any:
        """(threads, memory, bytes of it for each thread); generic addresses may be of either memory."""
        addresses = self.address(arg)
        shared = mask & ("shared" in fields)
        if "shared" not in fields and "global" not in fields:
            shared = mask & (addresses >= SHARED) & (addresses < SHARED + (1 << 32))
            addresses = np.where(shared, addresses - addresses.dtype.type(SHARED), addresses)
        rest = mask & ~shared
        if shared.any():
            yield shared, self.shared.bytes, self.shared.index(self.block_of[shared], addresses[shared], size, write)
        if rest.any():
            yield rest, self.memory.bytes, self.memory.index(addresses[rest].astype(np.uint64), size, write)

    def _atom(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        returns, dtype = fields[0] == "atom", TYPES[fields[-1]]
        place, *sources = one.args[1:] if returns else one.args
        values = np.stack([self.value(source, dtype) for source in sources], 1)
        old = np.zeros(self.threads, dtype)
        for where, memory, places in self._places(place, fields, mask, dtype.itemsize, write=False):
            for thread, row in zip(np.flatnonzero(where), places, strict=True):
                before = memory[row].view(dtype)[0]
                after = numbers.atomic(fields[-2], int(before), [int(v) for v in values[thread]])
                memory[row] = as_bytes(np.array([after & ((1 << 8 * dtype.itemsize) - 1)], WORDS[dtype.itemsize]))
                old[thread] = before
        if returns:
            self.write(one.args[0], old, mask)

    _red = _atom

    # ---- threads together

    def _shfl(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        target, source, lane, clamp, members = one.args
        self._whole(members, mask, one)
        values = self.value(source, np.uint32).reshape(-1, WARP)
        b, c = (self.value(arg, np.uint32).astype(np.int64).reshape(-1, WARP) for arg in (lane, clamp))
        low, bound = LANES & (c >> 8 & 31), LANES & (c >> 8 & 31) | (c & 31 & ~(c >> 8 & 31))
        mode = fields[2]
        wanted = {"bfly": LANES ^ b, "up": LANES - b, "down": LANES + b, "idx": low | (b & 31 & ~(c >> 8 & 31))}[mode]
        inside = wanted >= (LANES & (c >> 8 & 31) | (c & 31)) if mode == "up" else wanted <= bound
        chosen = np.where(inside, wanted, LANES)
        result = np.take_along_axis(values, chosen, 1).reshape(-1)
        register, _, predicate = target.partition("|")
        self.write(register, result, mask)
        if predicate:
            self.write(predicate, inside.reshape(-1), mask)

    def _vote(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        target, predicate, members = one.args
        self._whole(members, mask, one)
        lanes = self.predicate(predicate).reshape(-1, WARP)
        if fields[2] == "ballot":
            result = (lanes.astype(np.uint64) << LANES.astype(np.uint64)).sum(1).astype(np.uint32)
        else:
            result = lanes.any(1) if fields[2] == "any" else lanes.all(1)
        self.write(target, np.repeat(result, WARP), mask)

    def _bar(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        """bar.warp.sync; others stand in `_straight`."""
        self._whole(one.args[0], mask, one)

    def _whole(self, members: str, mask: np.ndarray, one: Instruction) -> None:
        self.warps(mask, str(one))
        if (self.value(members, np.uint32)[mask] != FULL).any():
            raise PtxError(f"an operation of part of a warp: {one}")

    def _reduce_barrier(self, one: Instruction, mask: np.ndarray) -> None:
        """All live threads of a block have to be here; those of other blocks come later."""
        live = ~self.done
        for block in np.unique(self.block_of[mask]):
            mine = live & (self.block_of == block)
            if not mask[mine].all():
                raise PtxError(f"some threads of a block come to {one} apart from others")
        predicate = self.predicate(one.args[-1]) & mask
        counts = np.bincount(self.block_of, predicate, int(self.block_of[-1]) + 1).astype(np.uint32)[self.block_of]
        if ".popc" in one.op:
            return self.write(one.args[0], counts, mask)
        sizes = np.bincount(self.block_of, mask, int(self.block_of[-1]) + 1).astype(np.uint32)[self.block_of]
        return self.write(one.args[0], counts > 0 if ".or" in one.op else counts == sizes, mask)

    def _cp(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        """cp.async: copies happen when they are waited for."""
        threads = np.flatnonzero(mask)
        if fields[2] == "bulk":
            self._bulk(one, mask)
        elif fields[2] == "commit_group":
            for thread in threads:
                self.groups[thread].append(self.open[thread])
                self.open[thread] = []
        elif fields[2] == "wait_group":
            self._wait(threads, int(one.args[0]))
        elif fields[2] == "wait_all":
            raise PtxError(f"unknown instruction: {one}")
        else:
            to, source = self.address(one.args[0]), self.address(one.args[1])
            sizes = self.value(one.args[3], np.uint32) if len(one.args) > 3 else np.full(self.threads, 16, np.uint32)
            if int(one.args[2]) != 16:
                raise PtxError(f"unknown instruction: {one}")
            for thread in threads:
                self.open[thread].append((int(to[thread]), int(source[thread]), int(sizes[thread])))

    def _wait(self, threads: np.ndarray, pending: int) -> None:
        jobs = []
        for thread in threads:
            groups = self.groups[thread]
            while len(groups) > pending:
                jobs += [(self.block_of[thread], *copy) for copy in groups.pop(0)]
        if not jobs:
            return
        blocks, to, source, sizes = (np.array(column) for column in zip(*jobs, strict=True))
        places = self.shared.index(blocks, to, 16, True)
        self.shared.bytes[places] = 0
        if not np.isin(sizes, (0, 16)).all():
            raise PtxError("cp.async of some of its bytes")
        full = sizes == 16
        if full.any():
            rows = self.memory.index(source[full].astype(np.uint64), 16, False)
            self.shared.bytes[places[full]] = self.memory.bytes[rows]

    def _ldmatrix(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        registers, warps = _parts(one.args[0]), self.warps(mask, str(one))
        addresses = self.address(one.args[1]).reshape(-1, WARP)
        results = np.zeros((len(registers), len(addresses), WARP), np.uint32)
        blocks = self.block_of.reshape(-1, WARP)
        g, t = LANES // 4, LANES % 4
        for warp in warps:
            rows = slice(0, 8 * len(registers))
            places = self.shared.index(blocks[warp, rows], addresses[warp, rows], 16, False)
            matrices = self.shared.bytes[places].view(np.uint16).reshape(-1, 8, 8)
            for i, matrix in enumerate(matrices):
                matrix = matrix.T if "trans" in fields else matrix
                low, high = matrix[g, 2 * t].astype(np.uint32), matrix[g, 2 * t + 1].astype(np.uint32)
                results[i, warp] = low | high << np.uint32(16)
        for register, result in zip(registers, results, strict=True):
            self.write(register, result.reshape(-1), mask)

    def _mma(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        self.warps(mask, str(one))
        d, a, b, c = (_parts(arg) for arg in one.args)
        kind = fields[-2]
        dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "s8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}[kind]
        size = np.dtype(dtype).itemsize
        per, inner = 4 // size, 32 // size
        g, t, warps = LANES // 4, LANES % 4, self.threads // WARP

        def lanes(registers: list[str]) -> np.ndarray:
            words = np.stack([self.value(r, np.uint32).reshape(warps, WARP) for r in registers], -1)
            return np.ascontiguousarray(words).view(dtype).astype(np.float64)

        left, right = np.zeros((warps, 16, inner)), np.zeros((warps, inner, 8))
        first, second = lanes(a), lanes(b)
        for j in range(4 * per):
            left[:, g + 8 * (j // per % 2), t * per + j % per + inner // 2 * (j // per // 2)] = first[:, :, j]
        for j in range(2 * per):
            right[:, t * per + j % per + inner // 2 * (j // per), g] = second[:, :, j]
        number = np.int32 if kind == "s8" else np.float32
        sums = np.zeros((warps, 16, 8), number)
        for j, register in enumerate(c):
            sums[:, g + 8 * (j // 2), 2 * t + j % 2] = self.value(register, number).reshape(warps, WARP)
        for k in range(inner):  # one by one, as the emulator adds them; a chip has an order of its own
            sums += (left[:, :, k, None] * right[:, k, None, :]).astype(number)
        for j, register in enumerate(d):
            self.write(register, sums[:, g + 8 * (j // 2), 2 * t + j % 2].reshape(-1), mask)


def _parts(arg: str) -> list[str]:
    """The registers of an operand such as {%r1, %r2}."""
    return [part.strip() for part in arg.strip("{}").split(",")]
