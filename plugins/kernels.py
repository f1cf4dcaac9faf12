"""The compiled kernels: what this machine can run, and one op at a time for tests and measurements."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmc.errors import KernelError

try:
    from llmc.plugins import _kernels
except ImportError as error:  # pragma: no cover - depends on the installation
    raise KernelError(
        "the native module llmc.plugins._kernels is missing; in a clone, install it (pip install -e .) and start "
        "Python with -P or outside of the clone's root"
    ) from error

Attributes: TypeAlias = Mapping[str, bool | int | float | str]
Int32: TypeAlias = NDArray[np.int32]
Kv = _kernels.Kv
"""A paged cache of its own: ``Kv(slots=[(kv_heads, key_dim, value_dim)], dtype, block_size, blocks)``; see KvSlot in
csrc/kernel.h for the layout of ``keys(slot)`` and ``values(slot)``, which come as [blocks, numbers of a block]."""


class BatchLike(Protocol):
    """The part of llmc.runtime.batch.Batch that kernels see."""

    @property
    def position_ids(self) -> Int32: ...  # noqa: D102
    @property
    def cu_seqlens(self) -> Int32: ...  # noqa: D102
    @property
    def num_computed(self) -> Int32: ...  # noqa: D102
    @property
    def block_tables(self) -> Int32: ...  # noqa: D102
    @property
    def tree_mask(self) -> NDArray[np.uint64] | None: ...  # noqa: D102
    @property
    def state_slots(self) -> Int32 | None: ...  # noqa: D102


def isas() -> list[str]:
    """The instruction sets that kernels were compiled for and this machine has, best last."""
    return _kernels.isas()


def best_isa() -> str:
    """The last of ``isas()``."""
    return isas()[-1]


def ops() -> list[str]:
    """The ops that have a kernel."""
    return _kernels.ops()


def ceilings(threads: int, size: int = 1 << 31) -> dict[str, float]:
    """What this machine can do at most, in 10**9 a second.

    ``read_bandwidth``: bytes read of a buffer of ``size`` bytes. For the instructions there are, ``fp32``, ``bf16``,
    ``amx_bf16`` (floating-point operations) and ``int8`` (operations). Takes about a second.
    """
    return _kernels.ceilings(threads, size)


def draw_token(scores: NDArray[np.float32], highest: float, temperature: float, least: float, draw: float) -> int:
    """An index, drawn by the softmax of ``scores / temperature``; ``highest`` is the largest score, and finite.

    It is the first at which the cumulative sum of exp((score - highest) / temperature), of those that are ``least`` or
    more, exceeds ``draw`` times the whole sum.
    """
    return _kernels.draw_token(scores, highest, temperature, least, draw)


def native_batch(batch: BatchLike) -> _kernels.Batch:
    """The native form of a batch; its arrays are used in place."""
    return _kernels.Batch(
        batch.position_ids,
        batch.cu_seqlens,
        batch.num_computed,
        batch.block_tables,
        batch.tree_mask,
        batch.state_slots,
    )


def run_op(
    op: str,
    inputs: Sequence[NDArray[Any] | None],
    outputs: Sequence[NDArray[Any]],
    attributes: Attributes | None = None,
    *,
    isa: str | None = None,
    threads: int = 1,
    batch: BatchLike | None = None,
    kv: Kv | None = None,
) -> None:
    """Run one op on numpy arrays of any strides; the outputs are written in place.

    Weights come packed, as in a plan. bfloat16 arrays have ml_dtypes.bfloat16. ``isa``: one of ``isas()``, default the
    best.

    Raises:
        KernelError: there is no such kernel, or it does not take these arguments.
    """
    for output in outputs:
        if not output.flags.writeable:
            raise KernelError(f"llmc::{op}: an output array is read-only")
    _kernels.run_op(
        op,
        [_view(op, array) for array in inputs],
        [_view(op, array) for array in outputs],
        dict(attributes or {}),
        isa or best_isa(),
        threads,
        None if batch is None else native_batch(batch),
        kv,
    )


def _view(op: str, array: NDArray[Any] | None) -> tuple[int, str, list[int], list[int]] | None:
    """(address, dtype, shape, strides in elements)."""
    if array is None:
        return None
    size = array.dtype.itemsize
    if any(stride % size for stride in array.strides):
        raise KernelError(f"llmc::{op}: an array has strides that are no multiple of its item size")
    return array.ctypes.data, array.dtype.name, list(array.shape), [stride // size for stride in array.strides]
