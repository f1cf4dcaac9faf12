"""What a quantization method is: it sees a weight and statistics of its inputs, and returns codes and scales."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from llmc.errors import CompileError, UsageError
from llmc.quantization.float8 import decode_e4m3

FloatArray: TypeAlias = npt.NDArray[np.float32]
CodeArray: TypeAlias = npt.NDArray[np.uint8]
Notes: TypeAlias = dict[str, float | int | str]

BITS = {"int4": 4, "int8": 8, "fp8": 8}
"""The formats of stored weights, and the bits of a code."""


@dataclass(frozen=True)
class Scheme:
    """How the numbers of a weight are stored.

    ``group``: columns that share a scale, 16 to 256 in steps of 16; the last group of a row may be shorter. 0 (or -1,
    as GPTQ checkpoints write it) is one scale for a row. ``symmetric``: no zero points.
    """

    format: str = "int4"
    group: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.format not in BITS:
            raise UsageError(f"format {self.format}: unknown; known: {', '.join(BITS)}")
        if self.group == -1:
            object.__setattr__(self, "group", 0)
        if self.group and (self.group % 16 or not 16 <= self.group <= 256):
            raise UsageError(f"group={self.group}: expected a multiple of 16 up to 256, or 0 for one group per row")
        if self.format == "fp8" and not self.symmetric:
            raise UsageError("sym=false: fp8 has no zero points")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.format]

    @property
    def x_group(self) -> int:
        """Columns of the input that share a scale where it is quantized by groups: divides ``group``, up to 128."""
        if not self.group:
            return 128
        return self.group if self.group <= 128 else self.group // 2

    def groups(self, columns: int) -> int:
        """The number of scales of a row."""
        return -(-columns // self.group) if self.group else 1

    def bits_per_weight(self, columns: int) -> float:
        """Bits that a weight takes, with its share of the scales (float16) and zero points (a byte)."""
        return self.bits + self.groups(columns) * (16 + (0 if self.symmetric else 8)) / columns


@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight in logical form: how it is packed is the business of the op that multiplies it.

    ``codes`` [rows, columns] are unsigned, one a byte: int4 0..15, int8 0..255, fp8 the bit patterns of E4M3FN.
    ``scale`` [rows, G] with G = ceil(columns / group), or 1 if group is 0. ``zero`` [rows, G]: None, zero points
    (uint8), or offsets (float32).
    """

    format: str
    group: int
    columns: int
    codes: CodeArray
    scale: FloatArray
    zero: CodeArray | FloatArray | None = None

    def rows(self, begin: int, end: int) -> Quantized:
        """Some of the rows."""
        zero = None if self.zero is None else self.zero[begin:end]
        return replace(self, codes=self.codes[begin:end], scale=self.scale[begin:end], zero=zero)

    def dequantize(self) -> FloatArray:
        """The weights [rows, columns] that the codes stand for, each step rounded to float32.

        No zero: (code - 8 or 128) * scale. Zero points: (code - zero) * scale. Offsets: code * scale + zero.
        fp8: its value * scale.
        """
        values = decode_e4m3(self.codes) if self.format == "fp8" else self.codes.astype(np.float32)
        offset = self.zero is not None and self.zero.dtype == np.float32
        if self.zero is not None and not offset:
            values -= self._columns_of(self.zero)
        elif self.format != "fp8" and self.zero is None:
            values -= np.float32(1 << (BITS[self.format] - 1))
        values *= self._columns_of(self.scale)
        if self.zero is not None and offset:
            values += self._columns_of(self.zero)
        return values

    def _columns_of(self, values: npt.NDArray[Any]) -> FloatArray:
        """Values of groups [rows, G] -> of columns [rows, columns]."""
        repeated = np.repeat(values, self.group or self.columns, axis=1)[:, : self.columns]
        return repeated.astype(np.float32, copy=False)


class Statistics(enum.Enum):
    """What a method needs to know about the inputs of a layer."""

    NONE = "none"
    INPUTS = "inputs"  # a sample of rows, and the mean and maximum of |x| for each column
    HESSIAN = "hessian"  # the same, and the mean of x x^T


class Activations(enum.Enum):
    """What happens to the inputs of a product with a quantized weight."""

    PER_GROUP = "dynamic per group"  # int8 or left as they are, as --compute says: weight-only quantization
    PER_TOKEN = "dynamic per token"  # int8, one scale for a row
    STATIC = "static"  # int8, one scale for all, found by calibration
    FP8 = "fp8"  # E4M3, one scale for a row


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What calibration saw arrive at a product; see statistics.py, which collects it.

    ``count``: tokens seen (an expert sees its own only). ``mean_abs``, ``max_abs`` [K]. ``rows`` [n, K]: a sample,
    n up to `statistics.SAMPLE`. ``hessian`` [K, K] float32 or float64: the mean of x x^T.
    """

    count: int
    mean_abs: FloatArray
    max_abs: FloatArray
    rows: FloatArray
    hessian: npt.NDArray[Any] | None = None

    def divided(self, scale: FloatArray) -> LayerInputs:
        """What arrives once the producer's output is divided by a scale [K]."""
        hessian = None if self.hessian is None else self.hessian / np.outer(scale, scale)
        return LayerInputs(self.count, self.mean_abs / scale, self.max_abs / scale, self.rows / scale, hessian)


@dataclass(frozen=True)
class Method(ABC):
    """A way to choose codes and scales. The dataclass fields are its options; see options.py.

    ``sequential``: the layers that follow have to see the outputs of the quantized ones. ``folds``: it chooses scales
    of inputs, for the caller to fold into what produces them.
    """

    name: ClassVar[str]
    needs: ClassVar[Statistics] = Statistics.NONE
    sequential: ClassVar[bool] = False
    folds: ClassVar[bool] = False

    @property
    @abstractmethod
    def weights(self) -> Scheme:
        """How the weights are stored."""

    @property
    def activations(self) -> Activations:
        """What happens to the inputs."""
        return Activations.PER_GROUP

    @property
    def x_group(self) -> int:
        """Columns of the input that share a scale; 0 is a whole row."""
        return self.weights.x_group if self.activations is Activations.PER_GROUP else 0

    @property
    def row_block(self) -> int | None:
        """How many rows are rounded together, so that a weight may be quantized in pieces of so many; None: all."""
        return None if self.needs is Statistics.HESSIAN else 1

    def input_scale(
        self, weight: FloatArray, inputs: LayerInputs, *, name: str = "weight", tie: npt.NDArray[np.int64] | None = None
    ) -> FloatArray | None:
        """Positive factors [K]: the columns of the weight are to be multiplied by them, the inputs divided.

        ``weight`` [N, K] holds all weights that read the input, one below the other. Columns with the same number in
        ``tie`` [K] get the same factor. None: no scaling. Raises CompileError for weights that are not finite.
        """
        check_finite(weight, name, "weight")
        return None

    def activation_scale(self, inputs: LayerInputs) -> float | None:
        """The scale of static activations (of the inputs as they are after folding), else None."""
        return None

    def quantize(
        self, weight: FloatArray, inputs: LayerInputs | None = None, *, name: str = "weight"
    ) -> tuple[Quantized, Notes]:
        """Codes and scales of a weight [N, K], and figures for the report.

        ``inputs`` None or without tokens (an expert that none was routed to): the method does without, and notes it.
        Raises CompileError, with the ``name`` of the layer, for numbers that are not finite.
        """
        weight = np.ascontiguousarray(weight, np.float32)
        check_finite(weight, name, "weight")
        if inputs is None or inputs.count == 0:
            quantized, notes = self.round_weight(weight, None, name)
            return quantized, notes if self.needs is Statistics.NONE else {**notes, "inputs": "none seen"}
        for values in (inputs.mean_abs, inputs.max_abs, inputs.rows, inputs.hessian):
            if values is not None:
                check_finite(values, name, "input")
        return self.round_weight(weight, inputs, name)

    @abstractmethod
    def round_weight(self, weight: FloatArray, inputs: LayerInputs | None, name: str) -> tuple[Quantized, Notes]:
        """What ``quantize`` does once everything is known to be finite."""


def check_finite(values: npt.NDArray[Any], name: str, what: str) -> None:
    """Raises CompileError that names the layer and the first place."""
    finite = np.isfinite(values)
    if not finite.all():
        place = np.unravel_index(int(np.argmin(finite)), values.shape)
        bad = finite.size - int(np.count_nonzero(finite))
        where = "[" + ", ".join(str(int(i)) for i in place) + "]"
        raise CompileError(
            f"{name}: {bad} of {finite.size} numbers of the {what} are not finite, the first at {where}; the "
            "checkpoint is damaged, or its activations overflow: check the model, or leave this layer out"
        )


def parse_method(text: str) -> Method:
    """``awq:group=64,sym=false`` -> a method with its options; see options.py. Raises UsageError."""
    from llmc.quantization.options import parse

    return parse(text)
