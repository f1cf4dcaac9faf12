"""The low-rank term of each row is that of its adapter, the same bits in any batch and on any number of threads."""

import numpy as np
import pytest

from llmc.errors import KernelError
from llmc.plugins import kernels

RNG = np.random.default_rng(0)
X = RNG.standard_normal((9, 37), dtype=np.float32)
BASE = RNG.standard_normal((9, 70), dtype=np.float32)
A = RNG.standard_normal((2, 3, 37), dtype=np.float32)
B = RNG.standard_normal((2, 3, 70), dtype=np.float32)
RANKS = np.array([3, 2], np.int32)
ADAPTERS = np.array([0, -1, 1, 1, 0, -1, 0, 1, -1], np.int32)


def lora(x: np.ndarray, base: np.ndarray, adapters: np.ndarray, isa: str, threads: int) -> np.ndarray:
    y = base.copy()
    kernels.run_op("lora", [x, y, A, B, RANKS, adapters], [y], isa=isa, threads=threads)  # in place, as in a plan
    return y


@pytest.mark.parametrize("isa", kernels.isas())
def test_rows_do_not_depend_on_others(isa: str) -> None:
    together = lora(X, BASE, ADAPTERS, isa, 2)
    for row, adapter in enumerate(ADAPTERS):
        alone = lora(X[row : row + 1], BASE[row : row + 1], ADAPTERS[row : row + 1], isa, 1)
        np.testing.assert_array_equal(alone[0], together[row])
        if adapter < 0:
            np.testing.assert_array_equal(together[row], BASE[row])
        else:
            rank = RANKS[adapter]
            exact = BASE[row] + (A[adapter, :rank].astype(float) @ X[row]) @ B[adapter, :rank]
            np.testing.assert_allclose(together[row], exact, rtol=2e-5, atol=2e-5)


def test_numbers_of_adapters_are_checked() -> None:
    with pytest.raises(KernelError, match="there is no such adapter"):
        lora(X, BASE, np.full(9, 2, np.int32), kernels.best_isa(), 1)
    with pytest.raises(KernelError, match="adapters must be int32"):
        lora(X, BASE, ADAPTERS[:5], kernels.best_isa(), 1)
