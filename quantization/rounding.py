"""Rounding to integers with scales: what all methods for int4 and int8 share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.quantization.base import BITS, CodeArray, FloatArray, Method, Quantized, Scheme
from llmc.quantization.options import option

SEARCH_ROWS = 1024
"""Factors of inputs are chosen by the errors of so many outputs. (Qwen2.5-0.5B, gate and up of layer 12, 9728 rows: the
same factors, or those of the next exponent, as by all of them, in a tenth of the time.)"""

LOWEST_SHARE, SHARE_STEPS = 0.5, 20


@dataclass(frozen=True)
class IntegerMethod(Method):
    """A method that stores int4 or int8 in groups."""

    bits: int = option(4, "bits of a weight", choices=(4, 8))
    group: int = option(128, "columns that share a scale: 16 to 256 in steps of 16; 0 or -1: a whole row")
    sym: bool = option(True, "no zero points")

    def __post_init__(self) -> None:
        _ = self.weights  # refuses groups that don't exist

    @property
    def weights(self) -> Scheme:
        """How the weights are stored."""
        return Scheme(f"int{self.bits}", self.group, self.sym)


@dataclass(frozen=True, eq=False)
class Grid:
    """The numbers that the codes of a group stand for: scale [...], zero [...] as float32 (8 or 128 if symmetric)."""

    scale: FloatArray
    zero: FloatArray


def round_scale(scale: npt.NDArray[Any]) -> FloatArray:
    """Rounds to 11 significant bits, so that float16 holds it exactly if it is in its normal range; 0 becomes 1."""
    mantissa, exponent = np.frexp(np.asarray(scale, np.float32))
    rounded = np.atleast_1d(np.ldexp(np.rint(mantissa * np.float32(2048)) / np.float32(2048), exponent))
    rounded[rounded == 0] = 1
    return np.asarray(rounded, np.float32)


def split_groups(values: npt.NDArray[Any], group: int) -> npt.NDArray[Any]:
    """[..., K] -> [..., G, group], the last group filled up with zeros."""
    columns = values.shape[-1]
    size = group or columns
    count = -(-columns // size)
    if count * size != columns:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, count * size - columns)]
        values = np.pad(values, padding)
    return values.reshape(*values.shape[:-1], count, size)


def join_groups(values: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """[..., G, group] -> [..., K]."""
    return values.reshape(*values.shape[:-2], -1)[..., :columns]


def spread_rows(weight: FloatArray) -> FloatArray:
    """At most SEARCH_ROWS rows of a weight [N, K], evenly spread."""
    if len(weight) <= SEARCH_ROWS:
        return weight
    return weight[np.arange(SEARCH_ROWS) * len(weight) // SEARCH_ROWS]


def fit(groups: FloatArray, scheme: Scheme, clip: npt.NDArray[Any] | np.float32 | float = 1.0) -> Grid:
    """The grid that spans the numbers of each group [..., group], or a share of that span (a number, or [...]).

    Symmetric codes reach one step further down than up. A share below 0 is for scheme.symmetric only: a scale below 0,
    which turns that round. So 7/8 and -7/8 of the span cut nothing off where the largest number is at the longer end.
    """
    levels = (1 << scheme.bits) - 1
    clip = np.asarray(clip, np.float32)
    if scheme.symmetric:
        half = 1 << (scheme.bits - 1)
        scale = round_scale(np.abs(groups).max(-1) * clip / np.float32(half - 1))
        return Grid(scale, np.full_like(scale, half))
    low = np.minimum(groups.min(-1), 0) * clip
    high = np.maximum(groups.max(-1), 0) * clip
    scale = round_scale((high - low) / np.float32(levels))
    return Grid(scale, np.clip(np.rint(-low / scale), 0, levels).astype(np.float32))


def to_codes(groups: FloatArray, grid: Grid, bits: int) -> FloatArray:
    """The nearest codes [..., group], as float32."""
    codes: FloatArray = np.rint(groups / grid.scale[..., None])
    codes += grid.zero[..., None]
    np.clip(codes, 0, (1 << bits) - 1, out=codes)
    return codes


def to_values(codes: FloatArray, grid: Grid) -> FloatArray:
    """The numbers that codes [..., group] stand for."""
    values: FloatArray = codes - grid.zero[..., None]
    values *= grid.scale[..., None]
    return values


def shares(scheme: Scheme) -> list[np.float32]:
    """Those of a span that a search tries: from 1 down to LOWEST_SHARE, and where ``fit`` takes them, below 0."""
    steps = [np.float32(1 - (1 - LOWEST_SHARE) * step / SHARE_STEPS) for step in range(SHARE_STEPS + 1)]
    return [sign * share for share in steps for sign in (1, -1)] if scheme.symmetric else steps


def search_clip(groups: FloatArray, scheme: Scheme, importance: FloatArray | None = None) -> npt.NDArray[np.float32]:
    """The share of each group's span [N, G], from ``shares``, with the least error of the weights.

    ``importance`` [G, group]: the squared error, each column's times a factor such as the mean square of its input; for
    methods that make up for errors elsewhere. None: the squared error, and that part of it that only makes the group
    smaller times the number of groups: such parts add up over a row where the rest cancels. (Without, SmolLM2-135M
    in groups of 128 has a perplexity of 53.5; with it 46.4; unclipped 45.8.) Ties keep the first one.
    """
    best = np.full(groups.shape[:-1], np.inf, np.float32)
    clip = np.ones(groups.shape[:-1], np.float32)
    size = np.maximum(np.square(groups).sum(-1), np.float32(1e-30))
    for share in shares(scheme):
        grid = fit(groups, scheme, share)
        error = to_values(to_codes(groups, grid, scheme.bits), grid) - groups
        if importance is None:
            smaller = np.square((error * groups).sum(-1)) / size
            loss = np.square(error).sum(-1) + groups.shape[-2] * smaller
        else:
            loss = (np.square(error) * importance).sum(-1)
        better = loss < best
        best = np.where(better, loss, best)
        clip = np.where(better, share, clip)
    return clip


def to_quantized(codes: npt.NDArray[Any], grid: Grid, scheme: Scheme, columns: int) -> Quantized:
    """Codes [N, G, group] and their grid -> a Quantized."""
    whole: CodeArray = np.ascontiguousarray(join_groups(codes, columns).astype(np.uint8))
    zero = None if scheme.symmetric else grid.zero.astype(np.uint8)
    return Quantized(scheme.format, scheme.group, columns, whole, grid.scale, zero)


def join_rows(parts: Sequence[Quantized]) -> Quantized:
    """Rows of one weight, part after part."""
    zeros: list[npt.NDArray[Any]] = [part.zero for part in parts if part.zero is not None]
    return replace(
        parts[0],
        codes=np.concatenate([part.codes for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        zero=np.concatenate(zeros) if zeros else None,
    )


def round_to_nearest(weight: FloatArray, scheme: Scheme, clip: npt.NDArray[Any] | float = 1.0) -> Quantized:
    """A weight [N, K] on the grid that spans each group."""
    assert scheme.format in BITS and scheme.format != "fp8", scheme.format
    groups = split_groups(weight, scheme.group)
    grid = fit(groups, scheme, clip)
    return to_quantized(to_codes(groups, grid, scheme.bits), grid, scheme, weight.shape[1])


def round_inputs(rows: FloatArray, group: int, largest: FloatArray | float | None = None) -> FloatArray:
    """Inputs [n, K] as int8 with a scale for so many columns of a row (0: a row), or that of a ``largest`` input."""
    groups = split_groups(rows, group)
    span = np.abs(groups).max(-1, keepdims=True) if largest is None else np.asarray(largest, np.float32)
    step = np.maximum(span, np.float32(1e-30)) / np.float32(127)
    return np.asarray(join_groups(np.clip(np.rint(groups / step), -127, 127) * step, rows.shape[1]), np.float32)
