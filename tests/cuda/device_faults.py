"""A kernel that fails, for test_gpu_check.py; the name of this file keeps it out of other runs."""

from emulator import Emulator
from test_emulator import launch


def test_a_fault() -> None:
    with Emulator() as device:
        launch(device, 11)


def test_behind_it() -> None:
    with Emulator() as device:
        launch(device, 16)
