"""Checkpoints of torchao that transformers saved: the metadata of their files says how each weight is kept.

https://github.com/pytorch/ao. A weight ``m.weight`` [N, K] of a class of torchao has the tensors ``m._weight_qdata``,
``m._weight_scale`` and, if its numbers are not symmetric, ``m._weight_zero_point``:

    Int8Tensor, IntxUnpackedToInt8Tensor   int8 [N, K] in blocks [b, k] with a scale each: (code - zero point) * scale
    Int4Tensor                             two signed codes a byte, the first below, in groups of columns; scales and
                                           offsets [K / group, N]: code * scale + offset
    Float8Tensor                           E4M3 [N, K] with scales as above

Inputs that the library would round row by row are computed with as ``--compute`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmc.compiler.prequantized.base import FLOATS, Kind, Options, Tensors, input_scale
from llmc.compiler.prequantized.sources import Bits, Made, Recent, Spread, Unpacked, transposed
from llmc.compiler.quantized_weights import grouped, with_x_scale
from llmc.compiler.weights import Reshape, WeightSource, read
from llmc.errors import CheckpointError, CompileError
from llmc.runtime import strict

INTEGERS = {f"int{bits}": bits for bits in range(1, 9)}
RECENT = 9


def _read(options: Options, tensors: Tensors) -> None:
    options.ignore("quant_type", "quant_type_kwargs", "modules_to_not_convert")
    options.ignore("include_input_output_embeddings", "untie_embedding_weights")
    recent = Recent(RECENT)
    for name, text in tensors.metadata.items():
        module, _, parameter = name.rpartition(".")
        stem = f"{module}._{parameter}_"
        if f"{stem}qdata" not in tensors.left:
            continue
        where = f"{tensors.where}: metadata of {name!r}"
        values = strict.parse_json(text.encode(), where, CheckpointError)
        if not isinstance(values, dict) or values.get("_type") not in CLASSES:
            kind = values.get("_type") if isinstance(values, dict) else values
            raise CompileError(
                f"{where}: {kind!r} is not supported; supported: {', '.join(CLASSES)}. Others are laid out for one "
                "kind of device: save the model in one of these, or use the unquantized one"
            )
        data = Options({}, where, options.dtype).nested("_data", values.get("_data"))
        data.where = where
        for part in _tensors_of(values, where):
            if f"{stem}{part}" not in tensors.left:
                raise tensors.fail(f"{stem}{part}", f"is missing, and the metadata of {name!r} names it")
        if f"{stem}act_pre_scale" in tensors.left:
            raise CompileError(f"{where}: factors of the inputs (act_pre_scale) are not supported")
        tensors.put(name, CLASSES[values["_type"]](data, tensors, stem, recent))
    if lost := [name for name in tensors.left if name.endswith("_weight_qdata")]:
        raise tensors.fail(lost[0], "the metadata of the file does not say what it is")


def _tensors_of(values: Mapping[str, Any], where: str) -> list[str]:
    """What a weight is made of: without one of them, such as its zero points, it would mean other numbers."""
    names = values.get("_tensor_data_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: _tensor_data_names must be a list of names, found {names!r}")
    return names


def _integers(data: Options, tensors: Tensors, stem: str, recent: Recent) -> WeightSource:
    """Int8Tensor, and IntxUnpackedToInt8Tensor: codes of up to 8 bits in bytes of their own."""
    bits = 8
    if data.has("target_dtype"):
        bits = INTEGERS[_dtype(data, "target_dtype", tuple(INTEGERS))]
    format, middle = ("int4", 8) if bits <= 4 else ("int8", 128)
    qdata = tensors.take(f"{stem}qdata", "int8", (None, None))
    scale, spread, group = _blocks(data, tensors, stem, qdata.shape)
    zeros: WeightSource | None = None
    zero = f"{stem}zero_point"
    if zero in tensors.left or data.has("target_dtype"):  # only Int8Tensor may be without
        stored = tensors.take(zero, "int8", scale.shape)
        found = read(stored).astype(np.int64)
        if found.min() + middle < 0 or found.max() + middle >= 2 * middle:
            raise tensors.fail(zero, f"has numbers from {found.min()} to {found.max()}, for codes of {bits} bits")
        zeros = spread(Bits(stored, middle)) if found.any() else None
    x_scale: tuple[float, ...] = ()
    if f"{stem}act_quant_scale" in tensors.left:
        x_scale = input_scale(tensors, f"{stem}act_quant_scale", f"{stem}act_quant_zero_point")
    to = _dtype(data, "dtype", FLOATS)
    weight = grouped(Bits(qdata, middle), spread(scale), zeros, format, group, qdata.shape, to)
    return with_x_scale(weight, x_scale)


def _int4(data: Options, tensors: Tensors, stem: str, recent: Recent) -> WeightSource:
    rows, columns = _sizes(data, "shape")
    ones, group = _sizes(data, "block_size")
    if ones != 1 or group < 1 or columns % 2:
        raise CompileError(f"{data.where}: blocks of {ones} x {group} in a weight of {rows} x {columns}")
    packed = tensors.take(f"{stem}qdata", ("int8", "uint8"), (rows, columns // 2))
    grid = (-(-columns // group), rows)
    scale = tensors.take(f"{stem}scale", FLOATS, grid)
    point = tensors.take(f"{stem}zero_point", FLOATS, grid)

    def offsets() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """The codes are stored with 8 added: code * scale + offset = (code + 8) * scale + (offset - 8 * scale)."""
        values = read(point).astype(np.float32) - np.float32(8) * read(scale).astype(np.float32)
        return np.ascontiguousarray(values.T)

    zeros = Made(offsets, (rows, grid[0]), "float32", recent) if read(point).astype(np.float32).any() else None
    codes = _Signed(Bits(packed), 4, columns)
    group = 0 if group >= columns else group
    return grouped(codes, transposed(scale, recent), zeros, "int4", group, (rows, columns), scale.dtype)


class _Signed(Unpacked):
    """Nibbles of two's complement, as unsigned codes with 8 added."""

    def rows(self, start: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Unpacked."""
        return super().rows(start, stop) ^ np.uint8(8)


def _float8(data: Options, tensors: Tensors, stem: str, recent: Recent) -> WeightSource:
    qdata = tensors.take(f"{stem}qdata", "float8_e4m3fn", (None, None))
    scale, spread, group = _blocks(data, tensors, stem, qdata.shape)
    return grouped(Bits(qdata), spread(scale), None, "fp8", group, qdata.shape, _dtype(data, "dtype", FLOATS))


def _blocks(
    data: Options, tensors: Tensors, stem: str, shape: tuple[int, ...]
) -> tuple[WeightSource, Callable[[WeightSource], WeightSource], int]:
    """The scales of blocks; what makes them and zero points [N, G]; and the columns of a group, 0 if it is a row."""
    rows, columns = shape
    tall, wide = _sizes(data, "block_size") if data.has("block_size") else shape
    if tall < 1 or wide < 1 or rows % tall or columns % wide:
        raise CheckpointError(f"{data.where}: blocks of {tall} x {wide} don't divide {rows} x {columns}")
    grid = (rows // tall, columns // wide)
    scale = tensors.take(f"{stem}scale", FLOATS)
    if scale.shape != grid and not (grid == (1, 1) and scale.shape in ((), (1,))):
        raise tensors.fail(f"{stem}scale", f"has the shape {list(scale.shape)}, expected {list(grid)}")

    def spread(values: WeightSource) -> WeightSource:
        flat = Reshape(values, grid)
        return flat if tall == 1 else Spread(flat, tall, rows)

    return scale, spread, 0 if wide == columns else wide


def _sizes(data: Options, name: str) -> tuple[int, int]:
    found = data.get(name, list)
    if len(found) != 2 or any(type(size) is not int for size in found):
        raise CompileError(f"{data.where}: {name} {found!r} is not supported; two numbers are")
    return found[0], found[1]


def _dtype(data: Options, name: str, allowed: tuple[str, ...]) -> str:
    """A dtype is written as an object."""
    found: str = data.nested(name, data.get(name, dict)).get("_data", str, allowed=allowed)
    return found


CLASSES = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Int4Tensor": _int4,
    "Float8Tensor": _float8,
}

TORCHAO = Kind("torchao", _read)
