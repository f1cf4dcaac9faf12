"""The emulator reports each planted mistake, whatever the order of threads, and no correct kernel."""

import ctypes

import numpy as np
import pytest
from emulator import Emulator, EmulatorError

from llmc.plugins.cuda import Kernel, Launch


class FaultParams(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("table", ctypes.c_void_p))


REPORTS = {
    1: r"\[deadlock\]|\[sync\].*barrier is reached",
    2: r"\[deadlock\]|\[sync\]",
    3: r"\[livelock\] .*faults.cuh:\d+",
    5: r"\[race\] .*'x'\+0, unordered .*faults.cuh:\d+",
    6: r"\[race\]|\[uninitialised\]",
    8: r"\[sync\] .*reads lane 16, which is not in its mask",
    9: r"\[bounds\] .*shared\[256\], outside of the 256 bytes",
    10: r"\[sync\] .*the barrier of thread",
    11: r"\[bounds\] .*write of 4 bytes outside of every buffer",
    12: r"\[uninitialised\] .*read of shared",
    13: r"\[uninitialised\] .*read of 'x'",
    14: r"\[bounds\] .*read-only 'table'",
    15: r"\[cp.async\] .*while a cp.async to it is in flight",
    17: r"\[cp.async\] .*ends with copies in flight",
    18: r"\[alignment\] .*misaligned load of 8 bytes",
    19: r"\[sync\]|\[deadlock\]",
    20: r"\[race\] .*unordered with a write by block \d",
    21: r"\[sync\] .*reached by 32 threads, after 32 have exited",
    22: r"\[bounds\]",
    23: r"\[bounds\] .*index 2 of an array at .*faults.cuh:\d+",
    25: r"\[race\] .*of shared\[\d+\], unordered",
}
CORRECT = (0, 4, 7, 16, 24)


def kernel(case: int) -> Kernel:
    return Kernel(f"fault_{case}", "faults.cuh", f"fault<{case}>", FaultParams, 64)


def launch(device: Emulator, case: int) -> None:
    table = device.put(np.arange(64, dtype=np.int32), "table")
    x = device.alloc(256, "x") if case != 4 else device.put(np.zeros(64, np.int32), "x", writable=True)
    if case in (3, 5):
        x = device.put(np.zeros(64, np.int32), "x", writable=True)
    grid = (2, 1, 1) if case == 20 else (1, 1, 1)
    device.launch(Launch(kernel(case), FaultParams(x, table), grid, 256))


@pytest.mark.parametrize("case", [*CORRECT, *REPORTS])
def test_a_mistake_is_reported_and_nothing_else(case: int) -> None:
    for order in range(3) if case != 3 else (2,):
        with Emulator(order=order, seed=case) as device:
            if case in CORRECT:
                launch(device, case)
            else:
                with pytest.raises(EmulatorError, match=REPORTS[case]):
                    launch(device, case)


def test_every_case_is_here() -> None:
    assert sorted([*CORRECT, *REPORTS]) == list(range(26))
