"""What the PTX interpreter makes of sm_90a: barriers that count bytes, bulk copies, products of warpgroups.

Copies happen at once; that nobody looks too early is the emulator's business. Sums of products come with the wait.
Written from the PTX manual, not from the emulator.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from ptx_parser import Instruction, PtxError

WARP = 32
LANES = np.arange(WARP)
KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "s8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}


@dataclass
class Barrier:
    """``left``: arrivals that the phase waits for; ``bytes``: those that have yet to come."""

    count: int
    left: int
    bytes: int = 0
    phase: int = 0


class Hopper:
    """A part of `ptx.Machine`."""

    def __init__(self) -> None:
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.unread: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # sums of products until they are waited for
        self.stalled = np.zeros(self.threads, bool)  # by a wait that has failed, until a phase ends

    def _barrier(self: Any, thread: int, addresses: np.ndarray) -> Barrier:
        key = int(self.block_of[thread]), int(addresses[thread])
        if key not in self.barriers:
            raise PtxError(f"there is no mbarrier at shared[{key[1]}]")
        found: Barrier = self.barriers[key]
        return found

    def _arrive(self: Any, bar: Barrier, arrivals: int, size: int) -> None:
        if arrivals > bar.left:
            raise PtxError("more arrivals than an mbarrier counts")
        bar.left -= arrivals
        bar.bytes += size
        if bar.left == 0 and bar.bytes == 0:
            bar.left, bar.phase = bar.count, bar.phase + 1
            self.stalled[:] = False

    def _mbarrier(self: Any, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        threads = np.flatnonzero(mask)
        if fields[1] == "init":
            counts, at = self.value(one.args[1], np.int32), self.address(one.args[0])
            for thread in threads:
                key = int(self.block_of[thread]), int(at[thread])
                self.barriers[key] = Barrier(int(counts[thread]), int(counts[thread]))
            return
        at = self.address(one.args[1])
        if fields[1] == "arrive":
            sizes = self.value(one.args[2], np.int32) if len(one.args) > 2 else np.zeros(self.threads, np.int32)
            for thread in threads:
                self._arrive(self._barrier(thread, at), 1, int(sizes[thread]))
            return
        parity, done = self.value(one.args[2], np.uint32), np.zeros(self.threads, bool)
        for thread in threads:
            done[thread] = self._barrier(thread, at).phase & 1 != parity[thread]
        self.stalled |= mask & ~done
        self.write(one.args[0], done, mask)

    def _bulk(self: Any, one: Instruction, mask: np.ndarray) -> None:
        to, source, bar = (self.address(one.args[i]) for i in (0, 1, 3))
        sizes = self.value(one.args[2], np.int32)
        for thread in np.flatnonzero(mask):
            size, block = int(sizes[thread]), self.block_of[thread : thread + 1]
            if size % 16:
                raise PtxError(f"a bulk copy of {size} bytes")
            pieces = np.arange(0, size, 16, np.uint32)
            places = self.shared.index(np.repeat(block, len(pieces)), to[thread] + pieces, 16, True)
            self.shared.bytes[places] = self.memory.bytes[self.memory.index(source[thread] + pieces, 16, False)]
            self._arrive(self._barrier(thread, bar), 0, -size)

    def _wgmma(self: Any, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        warps = self.warps(mask, str(one))
        if fields[1] != "mma_async":  # a fence, a commit, a wait
            if fields[1] == "wait_group" and one.args != ("0",):
                raise PtxError(f"unknown instruction: {one}")
            if fields[1] == "wait_group":
                for register, (sums, there) in self.unread.items():
                    self.write(register, sums, there & mask)
                    there &= ~mask
            return
        if warps.size % 4 or (warps.reshape(-1, 4) // 4 != warps[::4, None] // 4).any():
            raise PtxError(f"part of a warpgroup at {one}")
        dtype = KINDS[fields[-1]]
        number = np.int32 if fields[-1] == "s8" else np.float32
        per = 4 // np.dtype(dtype).itemsize
        inner, columns = 8 * per, int(fields[4].partition("n")[2].partition("k")[0])
        if one.args[4:] != {"s8": (), "e4m3": ("1", "1")}.get(fields[-1], ("1", "1", "0")):
            raise PtxError(f"unknown instruction: {one}")
        d, a = ([part.strip() for part in arg.strip("{}").split(",")] for arg in one.args[:2])
        words = np.stack([self.value(r, np.uint32).reshape(-1, WARP)[warps] for r in a], -1)
        found = np.ascontiguousarray(words).view(dtype).astype(np.float64)
        left, g, t = np.zeros((len(warps), 16, inner)), LANES // 4, LANES % 4
        for j in range(4 * per):
            left[:, g + 8 * (j // per % 2), t * per + j % per + inner // 2 * (j // per // 2)] = found[:, :, j]
        operands = self.value(one.args[2], np.uint64).reshape(-1, WARP)[warps]
        right = np.stack([self._operand(warp, int(o[0]), columns) for warp, o in zip(warps, operands, strict=True)])
        right = right.view(dtype).astype(np.float64)
        add = self.predicate(one.args[3]).reshape(-1, WARP)[warps][:, :, None]
        old = np.stack([self._sums(r, number).reshape(-1, WARP)[warps] for r in d], -1)
        sums, i = np.zeros((len(warps), 16, columns), number), np.arange(columns // 2)
        rows, places = g[:, None] + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * t[:, None] + i % 2
        sums[:, rows, places] = np.where(add, old, number(0))
        for k in range(inner):
            sums += (left[:, :, k, None] * right[:, None, :, k]).astype(number)
        for j, register in enumerate(d):
            result, there = self.unread.setdefault(register, (np.zeros(self.threads, number), np.zeros_like(mask)))
            result.reshape(-1, WARP)[warps] = sums[:, rows[:, j], places[:, j]]
            there |= mask
            self.write(register, np.full(self.threads, -(1 << 30), number), mask)

    def _sums(self: Any, register: str, number: Any) -> np.ndarray:
        """What a product adds to: what the one before will leave in the register, if nobody has waited for it."""
        value: np.ndarray = self.value(register, number)
        if register not in self.unread:
            return value
        sums, there = self.unread[register]
        return np.where(there, sums, value)

    def _operand(self: Any, warp: int, descriptor: int, columns: int) -> np.ndarray:
        """[columns, 32] bytes of a K-major matrix in the 128-byte swizzle, by its descriptor."""
        if descriptor >> 62 != 1 or descriptor >> 49 & 7:
            raise PtxError(f"an operand that is not swizzled by 128 bytes: {descriptor:#x}")
        start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        row, piece = np.arange(columns)[:, None], np.arange(2)
        at = start + row // 8 * stride + row % 8 * 128 + piece * 16
        at ^= (at >> 7 & 7) << 4
        blocks = np.full(at.size, self.block_of[warp * WARP])
        places = self.shared.index(blocks, at.reshape(-1), 16, False)
        data: np.ndarray = self.shared.bytes[places].reshape(columns, 32)
        return data

    def _setmaxnreg(self, one: Instruction, fields: list[str], mask: np.ndarray) -> None:
        """Registers are without number here."""
