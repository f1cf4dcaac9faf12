"""8-bit floats as transformers writes them (DeepSeek, Qwen): E4M3 with a scale for each block of 128 x 128.

A weight [..., N, K] is float8_e4m3fn; beside it, ``weight_scale_inv`` [..., N / b, K / b] holds what its numbers are
multiplied by, in spite of the name, or one number for the whole weight. With the activation_scheme "static" a module
has the scale of its inputs too, ``activation_scale``.
"""

from __future__ import annotations

from llmc.compiler.prequantized.base import Kind, Options, Tensors, input_scale
from llmc.compiler.prequantized.sources import Bits, Spread
from llmc.compiler.quantized_weights import grouped, with_x_scale
from llmc.compiler.weights import Reshape, WeightSource
from llmc.errors import CheckpointError

SUFFIX = "_scale_inv"
INPUTS = ("activation_scale", "input_scale")


def _read(options: Options, tensors: Tensors) -> None:
    block = options.get("weight_block_size", list, [])
    if block and (len(block) != 2 or any(type(size) is not int or size < 1 for size in block)):
        raise CheckpointError(f"{options.where}: weight_block_size must be two numbers above 0, found {block!r}")
    options.get("fmt", str, "e4m3", allowed=("e4m3",))
    static = options.get("activation_scheme", str, "dynamic", allowed=("dynamic", "static")) == "static"
    options.ignore("modules_to_not_convert", "dequantize")
    for stem in tensors.stems(SUFFIX):
        weight = _weight(options, tensors, stem, block)
        module = stem.removesuffix(".weight")
        names = [f"{module}.{name}" for name in INPUTS]
        if static and module != stem:
            found = next((name for name in names if name in tensors.left), names[0])
            weight = with_x_scale(weight, input_scale(tensors, found))
        tensors.put(stem, weight)
    for name in [name for name in tensors.left if name.endswith(INPUTS)]:
        tensors.notes["static scales of the inputs of experts are not used: the engine chooses scales by row"] = None
        tensors.pop(name)
    for name, source in tensors.left.items():
        if source.dtype == "float8_e4m3fn":
            raise tensors.fail(name + SUFFIX, "is missing")


def _weight(options: Options, tensors: Tensors, name: str, block: list[int]) -> WeightSource:
    weight = tensors.take(name, "float8_e4m3fn", why="its scale is there")
    if len(weight.shape) not in (2, 3):
        raise tensors.fail(name, f"has the shape {list(weight.shape)}; a matrix or a stack of them was expected")
    *lead, rows, columns = weight.shape
    tall, wide = block or (rows, columns)
    grid = (*lead, -(-rows // tall), -(-columns // wide))
    scale = tensors.take(name + SUFFIX, ("float32", "bfloat16", "float16"))
    if scale.shape != grid and not (not block and scale.shape in ((), (1,), tuple(lead))):
        raise tensors.fail(
            name + SUFFIX, f"has the shape {list(scale.shape)}, expected {list(grid)} for {list(weight.shape)}"
        )
    count = lead[0] if lead else 1
    if rows % tall and lead:
        raise tensors.fail(name, f"has {rows} rows, which is no multiple of the {tall} of a block")
    flat = Reshape(scale, (count * grid[-2], grid[-1]))
    codes = Reshape(Bits(weight), (count * rows, columns))
    group = 0 if wide >= columns else wide
    return grouped(codes, Spread(flat, tall, count * rows), None, "fp8", group, weight.shape, options.dtype)


FP8 = Kind("fp8", _read)
