from typing import Any

import numpy as np
from numpy.typing import NDArray

_Size = tuple[int, int, int]
_View = tuple[int, str, list[int], list[int]] | None
_Value = tuple[str, str, int, str, list[_Size], list[_Size], _Size]
_Step = tuple[str, str, list[int], list[int], dict[str, Any]]

def isas() -> list[str]: ...
def ops() -> list[str]: ...
def draw_token(scores: NDArray[np.float32], highest: float, temperature: float, least: float, draw: float) -> int: ...
def ceilings(threads: int, bytes: int) -> dict[str, float]: ...
def run_op(
    op: str,
    inputs: list[_View],
    outputs: list[_View],
    attributes: dict[str, Any],
    isa: str,
    threads: int,
    batch: Batch | None,
    kv: Kv | None,
) -> None: ...

class Batch:
    def __init__(
        self,
        position_ids: NDArray[np.int32],
        cu_seqlens: NDArray[np.int32],
        num_computed: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        tree_mask: NDArray[np.uint64] | None = None,
        state_slots: NDArray[np.int32] | None = None,
    ) -> None: ...

class Kv:
    def __init__(self, slots: list[tuple[int, int, int]], dtype: str, block_size: int, blocks: int) -> None: ...
    def keys(self, slot: int) -> NDArray[Any]: ...
    def values(self, slot: int) -> NDArray[Any]: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def move_positions(
        self, blocks: NDArray[np.int32], sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> None: ...
    def poison_block(self, block: int) -> None: ...

class Executor:
    def __init__(
        self,
        values: list[_Value],
        steps: list[_Step],
        arena_bytes: int,
        weights: list[NDArray[np.uint8]],
        kv_slots: list[tuple[int, int, int]],
        kv_dtype: str,
        block_size: int,
        blocks: int,
        threads: int,
        isa: str,
        poison: bool,
    ) -> None: ...
    def run(
        self,
        input_ids: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        batch: Batch,
        upto: int,
        adapters: NDArray[np.int32] | None = None,
        choose_from: int = -1,
    ) -> None: ...
    def chosen(self) -> tuple[list[int], list[float]]: ...
    def resume(self, begin: int, upto: int) -> None: ...
    def view(self, value: int) -> NDArray[Any]: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def move_positions(
        self, blocks: NDArray[np.int32], sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> None: ...
    def poison_block(self, block: int) -> None: ...
    def keys(self, slot: int) -> NDArray[Any]: ...
    def values(self, slot: int) -> NDArray[Any]: ...
    def trace(self, on: bool) -> None: ...
    def take_times(self) -> list[tuple[int, int, int]]: ...
