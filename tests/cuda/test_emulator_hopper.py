"""The emulator reports mistakes with barriers that count bytes, bulk copies and products of warpgroups."""

import ml_dtypes
import numpy as np
import pytest
from emulator import Emulator, EmulatorError
from test_emulator import FaultParams

from llmc.plugins.cuda import Kernel, Launch

REPORTS = {
    1: r"\[deadlock\] .*at one that counts bytes",
    2: r"\[race\]|\[uninitialised\]|\[mbarrier\]",
    3: r"\[race\]|\[wgmma\]|\[cp.async\]|\[mbarrier\]",
    4: r"\[deadlock\]",
    5: r"\[alignment\]",
    6: r"\[race\]|\[cp.async\]|\[wgmma\]",
    7: r"\[race\]|\[cp.async\]|\[uninitialised\]",
    8: r"\[wgmma\] .*without a wgmma_fence",
    9: r"\[deadlock\]|\[wgmma\]",
    10: r"\[wgmma\] .*not swizzled",
    11: r"\[wgmma\] .*operand in registers was overwritten",
    12: r"\[wgmma\] .*sums were written",
    13: r"\[wgmma\] .*product in flight reads",
    14: r"\[wgmma\] .*no group holds",
    15: r"\[wgmma\]",
    16: r"\[race\]",
    17: r"\[mbarrier\] .*more arrivals|\[race\]|\[wgmma\]|\[deadlock\]",
}


ROWS = np.random.default_rng(1).integers(-9, 9, (8, 8, 8)).astype(ml_dtypes.bfloat16)
"""In pieces of 16 bytes."""
SWIZZLED = np.stack([ROWS[r][np.arange(8) ^ r] for r in range(8)])


def expected() -> np.ndarray:
    """By the layouts of the PTX manual: registers of lane 4 g + t are pairs of columns 2 t and 2 t + 8."""
    words = SWIZZLED.reshape(4, 8, 4, 2, 2).astype(np.float64)  # warp, g, t, word, half
    a = np.zeros((4, 2, 8, 2, 4, 2))  # warp, half of the rows, g, half of the columns, t, column
    for register in range(4):
        a[:, register % 2, :, register // 2] = words[:, :, :, register % 2]
    return 2 * a.reshape(64, 16) @ ROWS[:, :2].reshape(8, 16).astype(np.float64).T


def launch(device: Emulator, case: int) -> np.ndarray:
    x = device.alloc(64 * 8 * 4, "x")
    kernel = Kernel(f"hopper_fault_{case}", "hopper_faults.cuh", f"hopper_fault<{case}>", FaultParams, 160)
    device.launch(Launch(kernel, FaultParams(x, device.put(SWIZZLED, "table")), (1, 1, 1), 1040))
    return device.get(x, (64, 8), np.float32)


@pytest.mark.parametrize("case", REPORTS)
def test_a_mistake_is_reported(case: int) -> None:
    for order in range(3):
        with Emulator(order=order, seed=case) as device, pytest.raises(EmulatorError, match=REPORTS[case]):
            launch(device, case)


def test_no_mistake_is_reported_where_there_is_none() -> None:
    for order in range(3):
        for mode in ("plain", "checked"):
            with Emulator(mode, order=order, seed=order) as device:
                np.testing.assert_array_equal(launch(device, 0), expected())
