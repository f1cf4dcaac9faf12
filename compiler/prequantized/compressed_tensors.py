"""Checkpoints of compressed-tensors, which llm-compressor writes: packed integers, plain int8, and 8-bit floats.

https://github.com/vllm-project/compressed-tensors. A module [N, K] has ``weight_packed`` int32 [N, K * bits / 32] and
``weight_shape``, or ``weight`` as int8 or float8; ``weight_scale`` [N, G], [N, 1], [1] or for blocks [N / b, K / b];
and ``weight_zero_point``. Codes and zero points are signed: packed ones have half their range added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.prequantized.base import FLOATS, Kind, Options, Tensors, act_order, group_size, input_scale
from llmc.compiler.prequantized.sources import Bits, Made, Recent, Spread, Unpacked, ordered, unpack, words
from llmc.compiler.quantized_weights import with_x_scale
from llmc.compiler.weights import Reshape, WeightSource, read
from llmc.errors import CheckpointError, CompileError

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point")


@dataclass(frozen=True)
class _Scheme:
    """How the weights of a group of modules are stored."""

    targets: tuple[str, ...]
    format: str
    kind: str
    bits: int
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]
    inputs: str
    """What the inputs are rounded to with one scale for all: int8, fp8 or nothing."""
    centred: bool
    """Whether those inputs have no zero point."""


def _read(options: Options, tensors: Tensors) -> None:
    format = options.get("format", str)
    if format != "mixed-precision":
        options.get("format", str, allowed=FORMATS)
    if options.get("kv_cache_scheme", dict, {}):
        tensors.notes["kv_cache_scheme is not used: --kv-dtype says how keys and values are stored"] = None
        for name in [name for name in tensors.left if name.endswith(CACHE_SCALES)]:
            tensors.pop(name)
    options.get("sparsity_config", dict, {}, allowed=({}, {"format": "dense"}))
    options.get("transform_config", dict, {}, allowed=({},))
    options.ignore("ignore", "global_compression_ratio", "quantization_status", "version")
    schemes = [
        _scheme(options.nested(f"config_groups.{name}", values), format, tensors)
        for name, values in options.get("config_groups", dict).items()
    ]
    parameters = Recent(9)
    for stem in tensors.stems(".weight_scale"):
        tensors.put(f"{stem}.weight", _weight(tensors, stem, _of_module(schemes, stem, options), parameters))
    if lost := tensors.stems(".weight_packed"):
        raise tensors.fail(f"{lost[0]}.weight_scale", "is missing")


def _scheme(options: Options, format: str, tensors: Tensors) -> _Scheme:
    format = options.get("format", str, format, allowed=FORMATS)
    targets = options.get("targets", list)
    values = options.nested("weights", options.get("weights", dict))
    inputs, outputs = options.get("input_activations", dict, {}), options.get("output_activations", dict, {})
    if outputs:
        raise CompileError(f"{options.where}: quantized outputs (output_activations) are not supported")
    kind = values.get("type", str, allowed=("int", "float"))
    bits = values.get("num_bits", int, allowed=(2, 3, 4, 8) if format == "pack-quantized" else (8,))
    group = group_size(values, "group_size") if values.has("group_size") else 0
    default = "group" if group else "channel" if values.has("group_size") else "tensor"
    strategy = values.get("strategy", str, default, allowed=STRATEGIES)
    block = values.get("block_structure", list, [])
    if (strategy == "group") != bool(group) or (strategy == "block") != bool(block):
        raise CheckpointError(f"{values.where}: strategy {strategy!r} does not fit group_size and block_structure")
    if block and (len(block) != 2 or any(type(size) is not int or size < 1 for size in block)):
        raise CheckpointError(f"{values.where}: block_structure must be two numbers above 0, found {block!r}")
    if (kind == "float") != (format == "float-quantized") and format != "naive-quantized":
        raise CheckpointError(f"{values.where}: numbers of type {kind} in the format {format}")
    if values.get("dynamic", bool, False):
        raise CheckpointError(f"{values.where}: weights can't be dynamic")
    symmetric = values.get("symmetric", bool, True)
    rows_columns = (block[0], block[1]) if block else (0, 0)
    static = _static(options.nested("input_activations", inputs), kind, tensors)
    centred: bool = options.nested("input_activations", inputs).get("symmetric", bool, True)
    names = tuple(map(str, targets))
    return _Scheme(names, format, kind, bits, symmetric, strategy, group, rows_columns, static, centred)


def _static(values: Options, kind: str, tensors: Tensors) -> str:
    """What ``_Scheme.inputs`` says; others than those that go with the weights are not used, which is noted."""
    if not values.has("num_bits") or values.get("dynamic", bool, False):
        return ""
    numbers = values.get("type", str, "int", allowed=("int", "float"))
    bits, strategy = values.get("num_bits", int), values.get("strategy", str, "tensor")
    if numbers == kind and bits == 8 and strategy == "tensor":
        return "fp8" if kind == "float" else "int8"
    tensors.notes[
        f"static scales of inputs of {bits} bits ({numbers}, by {strategy}) beside {kind} weights are not used: "
        "the engine chooses scales by row"
    ] = None
    return ""


def _of_module(schemes: list[_Scheme], stem: str, options: Options) -> _Scheme:
    """The scheme of a module: one that names it goes before one whose pattern fits, and that before a class."""
    for fits in (_is_named, _is_matched, _is_class):
        for scheme in schemes:
            if any(fits(target, stem) for target in scheme.targets):
                return scheme
    raise CheckpointError(f"{options.where}: {stem} has quantized weights, but no group of config_groups is for it")


def _is_named(target: str, stem: str) -> bool:
    return target == stem


def _is_matched(target: str, stem: str) -> bool:
    try:
        return target.startswith("re:") and re.match(target[3:], stem) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def _is_class(target: str, stem: str) -> bool:
    """A class of modules, such as Linear: tensors don't tell which, but only linears are quantized."""
    return not target.startswith("re:") and "." not in target


def _weight(tensors: Tensors, stem: str, scheme: _Scheme, recent: Recent) -> WeightSource:
    zero = f"{stem}.input_zero_point"
    if scheme.inputs and not scheme.centred and zero not in tensors.left:
        raise tensors.fail(zero, "is missing, though the inputs are not symmetric")
    x_scale = input_scale(tensors, f"{stem}.input_scale", zero) if scheme.inputs else ()
    if len(x_scale) > 1 and scheme.inputs == "fp8":
        raise tensors.fail(zero, "is not zero, though 8-bit floats have none")
    for name in ("input_scale", "input_zero_point", "output_scale", "output_zero_point"):
        tensors.pop(f"{stem}.{name}")
    codes = _codes(tensors, stem, scheme)
    shape = codes.shape
    scale = tensors.take(f"{stem}.weight_scale", FLOATS)
    scales: WeightSource = _spread(tensors, f"{stem}.weight_scale", scale, scheme, shape)
    zeros: WeightSource | None = _zeros(tensors, stem, scheme, shape, recent)
    group = scheme.block[1] if scheme.strategy == "block" else scheme.group
    order = act_order(tensors, f"{stem}.weight_g_idx", shape[1], scheme.group)
    format = "fp8" if scheme.kind == "float" else "int8" if scheme.bits == 8 else "int4"
    weight = ordered(order, codes, scales, zeros, format, group, shape, scale.dtype)
    return with_x_scale(weight, x_scale)


def _codes(tensors: Tensors, stem: str, scheme: _Scheme) -> WeightSource:
    """Unsigned; without zero points, zero is the middle of the format that they are kept in."""
    if scheme.kind == "float":
        return Bits(tensors.take(f"{stem}.weight", "float8_e4m3fn", (None, None), f"as {scheme.format}"))
    if scheme.format != "pack-quantized":
        return Bits(tensors.take(f"{stem}.weight", "int8", (None, None), f"as {scheme.format}"), 128)
    rows, columns = read(tensors.take(f"{stem}.weight_shape", ("int32", "int64"), (2,))).tolist()
    why = f"for a weight of {rows} x {columns} and {scheme.bits} bits"
    packed = tensors.take(f"{stem}.weight_packed", "int32", (rows, words(columns, scheme.bits)), why)
    codes = Unpacked(packed, scheme.bits, columns)
    middle = 8 - (1 << scheme.bits - 1) if scheme.symmetric and scheme.bits < 4 else 0
    return Bits(codes, middle) if middle else codes


def _zeros(tensors: Tensors, stem: str, scheme: _Scheme, shape: tuple[int, ...], recent: Recent) -> WeightSource | None:
    """Unsigned zero points [N, G]; None where they are all in the middle."""
    name = f"{stem}.weight_zero_point"
    if scheme.symmetric or scheme.kind == "float":
        found = tensors.pop(name)
        if found is not None and read(found).astype(np.float32).any():
            raise tensors.fail(name, "is not zero, though the scheme is symmetric")
        return None
    middle = 1 << scheme.bits - 1
    if scheme.format != "pack-quantized" or scheme.strategy not in ("group", "channel"):
        return _spread(tensors, name, Bits(tensors.take(name, "int8"), middle), scheme, shape)
    rows, count = shape[0], -(-shape[1] // scheme.group) if scheme.group else 1
    packed = tensors.take(name, "int32", (words(rows, scheme.bits), count), f"for {rows} rows and {count} groups")

    def unpacked() -> NDArray[np.uint8]:
        return np.ascontiguousarray(unpack(read(packed).T, scheme.bits, rows).T)

    return Made(unpacked, (rows, count), "uint8", recent)


def _spread(tensors: Tensors, name: str, source: WeightSource, scheme: _Scheme, shape: tuple[int, ...]) -> WeightSource:
    """Scales or zero points as they are stored -> [N, G]."""
    rows, columns = shape
    (tall, wide) = scheme.block if scheme.strategy == "block" else (1, scheme.group or columns)
    if scheme.strategy == "tensor":
        tall, allowed = rows, [(), (1,), (1, 1)]
    elif scheme.strategy == "channel":
        allowed = [(rows, 1), (rows,)]
    else:
        allowed = [(-(-rows // tall), -(-columns // wide))]
    if source.shape not in allowed:
        expected = " or ".join(str(list(sizes)) for sizes in allowed)
        raise tensors.fail(
            name, f"has the shape {list(source.shape)}, expected {expected} for {rows} x {columns} ({scheme.strategy})"
        )
    flat = Reshape(source, (-(-rows // tall), -(-columns // wide)))
    return flat if tall == 1 else Spread(flat, tall, rows)


COMPRESSED_TENSORS = Kind("compressed-tensors", _read)
