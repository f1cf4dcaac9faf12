"""bitsandbytes: LLM.int8 (int8 rows with their largest number, SCB), and the 4-bit floats nf4 and fp4 of QLoRA.

4-bit codes lie two in a byte, the first in the upper half, in row-major order; ``absmax`` has the scale of each block
of them, and may itself be stored in 8 bits (``nested_...``); ``quant_state.bitsandbytes__nf4`` is JSON with the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.prequantized.base import Kind, Options, Tensors
from llmc.compiler.prequantized.sources import Bits
from llmc.compiler.quantized_weights import Grouped
from llmc.compiler.weights import Reshape, Sized, WeightSource, numpy_dtype, read
from llmc.errors import CheckpointError, CompileError
from llmc.runtime import strict

STATE = ".quant_state.bitsandbytes__"
FLOATS = ("float16", "bfloat16", "float32")
ONE_127TH = np.float32(7.874015718698502e-3)


def _read(options: Options, tensors: Tensors) -> None:
    eight = options.get("load_in_8bit", bool, False) or options.get("_load_in_8bit", bool, False)
    four = options.get("load_in_4bit", bool, False) or options.get("_load_in_4bit", bool, False)
    if eight == four:
        raise CheckpointError(f"{options.where}: exactly one of load_in_8bit and load_in_4bit must be true")
    kind = options.get("bnb_4bit_quant_type", str, "fp4", allowed=("nf4", "fp4"))
    options.ignore("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant")
    options.ignore("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_has_fp16_weight")
    options.ignore("llm_int8_enable_fp32_cpu_offload")
    if eight:
        for stem in tensors.stems(".SCB"):
            tensors.put(f"{stem}.weight", _int8(options, tensors, stem))
        return
    for stem in tensors.stems(f".weight{STATE}{kind}"):
        tensors.put(f"{stem}.weight", _float4(tensors, f"{stem}.weight", kind))
    tensors.notes[f"{kind} weights are dequantized: there are no kernels for these 4-bit floats"] = None


def _int8(options: Options, tensors: Tensors, stem: str) -> WeightSource:
    weight = tensors.take(f"{stem}.weight", "int8", (None, None), "its SCB is there")
    rows, columns = weight.shape
    scb = tensors.take(f"{stem}.SCB", "float32", (rows,))
    order = tensors.pop(f"{stem}.weight_format")
    if order is not None and (found := read(order).reshape(-1)[:9].tolist()) != [0]:
        raise CompileError(f"{tensors.where}: {stem}.weight_format is {found}; only 0 (rows) is supported")
    return Int8(Bits(weight, 128), _Scaled(Reshape(scb, (rows, 1))), None, "int8", 0, (rows, columns), options.dtype)


@dataclass(frozen=True, eq=False)
class _Scaled(Sized):
    """SCB / 127, in one rounding."""

    scb: WeightSource
    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scb.shape

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        scaled: NDArray[Any] = self.scb.rows(start, stop) * ONE_127TH
        return scaled


@dataclass(frozen=True, eq=False)
class Int8(Grouped):
    """Its numbers are rounded like those of the library: code times SCB, then times 1/127.

    The codes times SCB / 127 may differ from that in the last bit of a float32.
    """

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Dequantized as bitsandbytes does."""
        assert isinstance(self.scale, _Scaled), "made above"
        codes = self.codes.rows(start, stop).astype(np.float32) - 128
        values: NDArray[Any] = codes * self.scale.scb.rows(start, stop) * ONE_127TH
        return values.astype(numpy_dtype(self.to))


@dataclass(frozen=True, eq=False)
class Float4(Sized):
    """4-bit floats of a table, times the scale of their block."""

    packed: WeightSource
    table: NDArray[np.float32]
    absmax: WeightSource
    block: int
    sizes: tuple[int, ...]
    to: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.sizes

    @property
    def dtype(self) -> str:
        """What it was before it was quantized."""
        return self.to

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Blocks run across the ends of rows."""
        width = math.prod(self.sizes[1:])
        first, last = start * width, stop * width
        if first == last:
            return np.empty((stop - start, *self.sizes[1:]), numpy_dtype(self.to))
        begin, end = first // 2, -(-last // 2)
        pairs = self.packed.rows(begin, end).reshape(-1)
        codes = np.stack([pairs >> 4, pairs & 15], 1).reshape(-1)[first - 2 * begin :][: last - first]
        blocks = np.arange(first, last) // self.block
        scales = self.absmax.rows(int(blocks[0]), int(blocks[-1]) + 1)
        values: NDArray[Any] = self.table[codes] * scales[blocks - blocks[0]]
        return values.astype(numpy_dtype(self.to)).reshape(stop - start, *self.sizes[1:])


@dataclass(frozen=True, eq=False)
class _Nested(Sized):
    """Scales that are 8-bit floats of a table, with scales for blocks of them, plus a number."""

    codes: WeightSource
    table: NDArray[np.float32]
    absmax: WeightSource
    block: int
    plus: np.float32
    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        blocks = np.arange(start, stop) // self.block
        scales = read(self.absmax)[blocks]
        values: NDArray[Any] = self.table[self.codes.rows(start, stop)] * scales + self.plus
        return values


def _float4(tensors: Tensors, name: str, kind: str) -> WeightSource:
    state = _state(tensors, f"{name}{STATE}{kind}")
    sizes: tuple[Any, ...] = tuple(state["shape"]) if isinstance(state.get("shape"), list) else ()
    block: Any = state.get("blocksize")
    fits = all(type(size) is int and size > 0 for size in (*sizes, block))
    if len(sizes) != 2 or not fits or state.get("quant_type") != kind or state.get("dtype") not in FLOATS:
        raise tensors.fail(f"{name}{STATE}{kind}", f"describes no {kind} matrix: {state}")
    count = math.prod(sizes)
    blocks = -(-count // block)
    packed = tensors.take(name, "uint8", why="it holds 4-bit floats")
    if math.prod(packed.shape) != -(-count // 2):
        raise tensors.fail(name, f"has the shape {list(packed.shape)}; {list(sizes)} take {-(-count // 2)} bytes")
    table = read(tensors.take(f"{name}.quant_map", "float32", (16,)))
    nested = "nested_offset" in state
    absmax = tensors.take(f"{name}.absmax", "uint8" if nested else "float32", (blocks,), f"for blocks of {block}")
    if nested:
        absmax = _nested(tensors, name, absmax, state)
    return Float4(Reshape(packed, (math.prod(packed.shape),)), table, absmax, block, sizes, state["dtype"])


def _nested(tensors: Tensors, name: str, codes: WeightSource, state: Mapping[str, Any]) -> WeightSource:
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(block) is not int or block < 1 or type(offset) is not float or state.get("nested_dtype") != "float32":
        raise tensors.fail(f"{name}.absmax", f"can't be read with {state}")
    table = read(tensors.take(f"{name}.nested_quant_map", "float32", (256,)))
    absmax = tensors.take(f"{name}.nested_absmax", "float32", (-(-codes.shape[0] // block),))
    return _Nested(codes, table, absmax, block, np.float32(offset))


def _state(tensors: Tensors, name: str) -> Mapping[str, Any]:
    content = read(tensors.take(name, "uint8", (None,))).tobytes()
    state = strict.parse_json(content, f"{tensors.where}: {name}", CheckpointError)
    if not isinstance(state, dict):
        raise tensors.fail(name, "is no JSON object")
    return state


BITSANDBYTES = Kind("bitsandbytes", _read)
