"""The Python face of the kernels: levels, arguments, the paged cache."""

import numpy as np
import pytest

from llmc.plugins import kernels

TANH = {"function": "tanh"}


def test_levels_are_in_order_and_the_portable_one_is_always_there() -> None:
    x86 = ["avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"]
    order = ["scalar", *x86, "neon", "dotprod", "i8mm"]
    assert kernels.isas() == [level for level in order if level in kernels.isas()]
    assert kernels.isas()[0] == "scalar"
    assert kernels.best_isa() == kernels.isas()[-1]


def test_unknown_names_list_the_known_ones() -> None:
    x = np.zeros(3, np.float32)
    with pytest.raises(kernels.KernelError, match=r"llmc::elementwise: instruction set 'sse9' .* choose one of scalar"):
        kernels.run_op("elementwise", [x], [x], TANH, isa="sse9")
    with pytest.raises(kernels.KernelError, match=r"llmc::tanh: there is no such op; known: .*elementwise"):
        kernels.run_op("tanh", [x], [x])
    with pytest.raises(kernels.KernelError, match="threads must be 1 to 1024"):
        kernels.run_op("elementwise", [x], [x], TANH, threads=0)


def test_arrays_that_kernels_cannot_see_are_refused() -> None:
    x = np.zeros(4, np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises(kernels.KernelError, match="output array is read-only"):
        kernels.run_op("elementwise", [x], [frozen], TANH)
    kernels.run_op("elementwise", [frozen], [x], TANH)  # as an input it is welcome
    fields = np.zeros(4, np.dtype([("value", np.float32), ("pad", np.uint8)]))
    with pytest.raises(kernels.KernelError, match="strides that are no multiple"):
        kernels.run_op("elementwise", [fields["value"]], [x], TANH)
    with pytest.raises(kernels.KernelError, match="no dtype 'float64'"):
        kernels.run_op("elementwise", [x.astype(np.float64)], [x], TANH)
    with pytest.raises(kernels.KernelError, match="more than 8 dimensions"):
        kernels.run_op("elementwise", [x.reshape((1,) * 8 + (4,))], [x], TANH)


@pytest.mark.parametrize(("dtype", "pad"), [("float32", 0), ("bfloat16", 1), ("float16", 0)])
def test_a_cache_has_its_blocks_apart(dtype: str, pad: int) -> None:
    kv = kernels.Kv([(2, 5, 3), (1, 4, 4)], dtype, 16, 3)
    assert kv.keys(0).shape == (3, 2 * 16 * (5 + pad))  # pairs of dims in bfloat16
    assert kv.values(0).shape == (3, 2 * 16 * 3)
    kv.keys(0)[1], kv.values(0)[1] = 7, 8
    kv.copy_block(1, 2)
    assert (kv.keys(0)[2] == 7).all()
    assert (kv.values(0)[2] == 8).all()
    assert (kv.keys(0)[0] == 0).all()
    with pytest.raises(kernels.KernelError, match="block 3 is not one of the cache's 3"):
        kv.poison_block(3)
    with pytest.raises(kernels.KernelError, match="no such KV slot"):
        kv.keys(2)


def test_a_cache_needs_sensible_sizes() -> None:
    for arguments, message in (
        (([(1, 8, 8)], "int32", 16, 4), "can't be stored as 'int32'"),
        (([(1, 8, 8)], "float32", 8, 4), "multiple of 16"),
        (([(1, 8, 8)], "float32", 16, 0), "at least one block"),
        (([(1, 0, 8)], "float32", 16, 4), "empty dimension"),
    ):
        with pytest.raises(kernels.KernelError, match=message):
            kernels.Kv(*arguments)
    with pytest.raises(MemoryError):
        kernels.Kv([(1 << 40, 1 << 20, 8)], "float32", 16, 1 << 20)
