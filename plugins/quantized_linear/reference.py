"""What llmc::quantized_linear means."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmc.errors import KernelError
from llmc.plugins.glu.reference import reference as glu
from llmc.plugins.op import Sample
from llmc.plugins.quantized_linear import packing

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""What the largest |x| becomes."""


def reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None,
    *,
    format: str,
    group: int,
    compute: str,
    x_group: int,
    function: str = "",
) -> Tensor:
    """The product as defined; what is rounded to a few bits is rounded from float32, sums are in x's precision."""
    check(format, group, compute, x_group, weight.shape[1])
    if x_scale is not None and (x_group or compute not in LARGEST):
        raise KernelError("x_scale is for the whole of an x that is rounded to int8 or fp8; x_group must be 0")
    if x_scale is not None and len(x_scale) > 1 and compute != "int8":
        raise KernelError("the zero point of x is for int8")
    y = _product(x, weight, scale, zero, x_scale, format, group, compute, x_group)
    y = y if bias is None else y + bias.to(x.dtype)
    return y if not function else glu(*y.chunk(2, -1), function=function)


def fake(x: Tensor, weight: Tensor, *_: Tensor | None, **given: object) -> Tensor:
    """The shape of the result."""
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if given.get("function") else 1))


def check(format: str, group: int, compute: str, x_group: int, columns: int) -> None:
    """Refuse combinations that mean nothing.

    Raises:
        KernelError: says which.
    """
    packing.check_format(format, group)
    known = ("float32", "bfloat16", "fp8") if format == "fp8" else ("int8", "float32", "bfloat16")
    if compute not in known:
        raise KernelError(f"{format} weights can't be computed as {compute!r}; choose one of {', '.join(known)}")
    if x_group < 0 or (x_group and compute not in LARGEST):
        raise KernelError(f"x_group is {x_group}; it must be 0 where x is not rounded to int8 or fp8")
    if x_group and x_group < columns:
        in_group = not group or group >= columns or group % x_group == 0
        whole_lines = x_group == group or x_group % packing.LINE[format] == 0
        if not in_group or not whole_lines:
            raise KernelError(f"x_group {x_group} must divide the group {group} and be a multiple of a line's columns")


def dequantize(weight: Tensor, scale: Tensor, zero: Tensor | None, *, format: str, group: int) -> Tensor:
    """The numbers [..., rows, columns] that codes stand for, exactly as float32 gives them."""
    numpy = [None if part is None else part.numpy() for part in (weight, scale, zero)]
    if numpy[1] is not None and numpy[1].dtype == np.float64:
        numpy[1] = numpy[1].astype(np.float32)
    if numpy[2] is not None and numpy[2].dtype == np.float64:
        numpy[2] = numpy[2].astype(np.float32)
    codes, scales, zeros = numpy
    assert codes is not None and scales is not None
    return torch.from_numpy(packing.dequantize(format, group, codes, scales, zeros))


def _product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    x_scale: Tensor | None,
    format: str,
    group: int,
    compute: str,
    x_group: int,
) -> Tensor:
    """Without bias."""
    wide = x.dtype
    if compute == "float32":
        numbers = dequantize(weight, scale, zero, format=format, group=group).to(wide)
        return torch.nn.functional.linear(x, numbers)
    pieces = packing.blocks(weight.shape[1], group, x_group)
    values, factors = _rounded(x.float(), pieces, compute, x_scale)
    offsets = zero is not None and zero.dtype != torch.uint8
    scale = scale.float()
    y = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for number, block in enumerate(pieces):
        columns, g = slice(block.begin, block.end), block.group
        codes = _centred(weight[:, columns], zero if zero is None or offsets else zero[:, g : g + 1], format)
        dot = torch.nn.functional.linear(values[..., columns].to(wide), codes.to(wide))
        a = factors[..., number : number + 1]
        if not offsets:
            y = _fused(a.to(wide) * scale[:, g].to(wide), dot, y)
            continue
        assert zero is not None
        total = values[..., columns].to(wide).sum(-1, keepdim=True)
        inner = _fused(scale[:, g].to(wide).expand_as(dot), dot, zero[:, g].to(wide) * total)
        y = _fused(a.to(wide).expand_as(dot), inner, y)
    return y


def _rounded(x: Tensor, pieces: list[packing.Block], compute: str, x_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is multiplied, and the factor of each block [..., blocks]."""
    if compute == "bfloat16":
        return x.to(torch.bfloat16).float(), torch.ones(*x.shape[:-1], len(pieces))
    largest = torch.tensor(LARGEST[compute])
    values, factors = torch.zeros_like(x), []
    for number, block in enumerate(pieces):
        unit = [piece for piece in pieces if piece.unit == block.unit]
        columns = slice(unit[0].begin, unit[-1].end)
        amax = x[..., columns].abs().amax(-1, keepdim=True)
        finite = amax.isfinite()
        if x_scale is not None:
            a = x_scale[:1].float().expand_as(amax)
            q = x[..., columns] / a + x_scale[1:].float().sum()
        else:
            a, inverse = amax * (1 / largest), largest / amax
            q = torch.where(inverse.isfinite(), x[..., columns] * inverse, 0.0)
        least = torch.tensor(-128.0) if compute == "int8" and x_scale is not None else -largest
        q = torch.where(finite, q, 0.0).clamp(least, largest)
        factors.append(torch.where(finite, a, torch.nan))
        if number == pieces.index(unit[0]):
            values[..., columns] = q.round() if compute == "int8" else q.to(torch.float8_e4m3fn).float()
    return values, torch.cat(factors, -1) if factors else torch.ones(*x.shape[:-1], 0)


def _centred(codes: Tensor, zero: Tensor | None, format: str) -> Tensor:
    """Codes minus their zero; with float zeros, and in fp8, what they are."""
    if format == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if zero is not None:
        return codes.float() - (zero.float() if zero.dtype == torch.uint8 else 0)
    return codes.float() - packing.MIDDLE[format]


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A * b + c, rounded once."""
    return (a.double() * b.double() + c.double()).to(c.dtype)


def random_weight(
    rng: np.random.Generator, rows: int, columns: int, format: str, group: int, zeros: str = ""
) -> tuple[Any, Any, Any]:
    """(codes, scale, zero) of a weight of about 1 / sqrt(columns); ``zeros``: "", "uint8" or "float32"."""
    count = packing.groups(columns, group)
    scale = (rng.random((rows, count), np.float32) + 0.5) / np.sqrt(max(columns, 1), dtype=np.float32)
    codes = rng.integers(0, packing.CODES[format], (rows, columns), np.uint8)
    if format == "fp8":
        codes[codes & 0x7F == 0x7F] = 0
        return codes, scale / np.float32(128), None
    scale /= np.float32(packing.MIDDLE[format])
    if rng.integers(2):
        scale = scale.astype(np.float16).astype(np.float32)
    if zeros == "uint8":
        return codes, scale, rng.integers(0, packing.CODES[format], (rows, count), np.uint8)
    if zeros == "float32":
        return codes, scale, -scale * rng.integers(4, 9, (rows, count)).astype(np.float32)
    return codes, scale, None


SIZES = ((1, 64, 32), (2, 33, 17), (3, 7, 1), (5, 300, 40), (8, 100, 5), (17, 272, 50), (70, 130, 33))
"""(rows of x, K, N)."""


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Every format, way to compute and kind of zeros; sizes that fill no line, group or panel; codes not packed."""
    computes = {"int8": ("int8", "bfloat16", "float32"), "fp8": ("bfloat16", "fp8", "float32")}
    variants = [
        (format, compute, zeros)
        for format in packing.LINE
        for compute in computes.get(format, computes["int8"])
        for zeros in (("",) if format == "fp8" else ("", "uint8", "float32"))
    ]
    for number, (format, compute, zeros) in enumerate(variants):
        for turn, (rows, inner, outer) in enumerate(SIZES):
            group = (16, 32, 64, 100, 128, 256, 0)[(number + turn) % 7]
            x = rng.standard_normal((rows, inner), np.float32) * np.float32(0.5 + turn)
            weight = random_weight(rng, outer, inner, format, group, zeros)
            bias = rng.standard_normal(outer, np.float32) if turn % 2 else None
            given = [0.03, -40.0][: 1 + (compute == "int8" and turn > 3)]
            static = np.array(given, np.float32) if compute in LARGEST and turn % 4 == 3 else None
            units = (0, group, min(group, 128), 0 if group else 48)
            x_group = units[(number + turn) % 4] if compute in LARGEST and static is None else 0
            x_group = x_group if x_group in (0, group) or (x_group % 8 == 0 and group % x_group == 0) else 0
            attributes = {"format": format, "group": group, "compute": compute, "x_group": x_group}
            yield Sample((x, *weight, bias, static), attributes)
            if outer % 2 == 0:
                yield Sample((x, *weight, bias, static), attributes | {"function": ("silu", "gelu_tanh")[turn % 2]})
