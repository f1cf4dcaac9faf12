"""What the lowering rules work with: views of the values so far, new buffers, weights, and the list of steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.constants import Constants
from llmc.compiler.lowering.sizes import compute_sizes
from llmc.compiler.lowering.values import ONE, Buffer, Shape, View, contiguous, dims, product, show
from llmc.compiler.weights import Array, Cast, WeightSource
from llmc.errors import CompileError
from llmc.plugins import all_ops
from llmc.plugins.linear import packing
from llmc.runtime.plan import DTYPES, Attribute, Dim, KvSlot, Storage

_FLOATS = frozenset(("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"))
SHARE_BYTES = 64 << 20
"""Constants in memory up to this size are compared with each other, so that equal ones are stored once."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A tensor of weights.safetensors, in the form in which kernels read it.

    ``source`` is [rows, columns] or [experts, rows, columns] where ``panels`` is set (plugins/linear/packing.py), and
    the tensor itself otherwise.
    """

    name: str
    source: WeightSource
    panels: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of the elements."""
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as stored."""
        if not self.panels:
            return self.source.shape
        *experts, rows, columns = self.source.shape
        return (*experts, *packing.packed_shape(rows, columns, self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        count = 1
        for size in self.shape:
            count *= size
        return count * weights.numpy_dtype(self.dtype).itemsize

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The bytes in order, as C-contiguous arrays of about 16 MiB, or of one row, panel or expert if larger."""
        if not self.panels:
            for chunk in weights.stream(self.source):
                yield np.ascontiguousarray(chunk)
        elif len(self.source.shape) == 2:
            rows, columns = self.source.shape
            yield from packing.pack_stream(self.source.rows, rows, columns)
        else:
            for expert in range(self.source.shape[0]):
                yield packing.pack(self.source.rows(expert, expert + 1)[0])


@dataclass(eq=False)
class LoweredStep:
    """A step over views; memory.py places their buffers."""

    op: str
    inputs: tuple[View | None, ...]
    outputs: tuple[View, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    module: str = ""


Rule = Callable[["Builder", ir.Node], Sequence[View]]
"""Lowers a node: appends steps, and returns what its outputs became."""


class Builder:
    """Collects steps. The rules of this package call it; each is given the node that it lowers."""

    def __init__(self, constants: Constants, dtype: str, multiplied: Collection[Hashable]) -> None:
        """``multiplied``: identities of the weights that linears have, so that a tied table is stored once."""
        self.constants = constants
        self.dtype = dtype
        self.multiplied = multiplied
        self.steps: list[LoweredStep] = []
        self.weights: dict[str, PackedWeight] = {}
        self.kv_slots: dict[int, KvSlot] = {}
        self.module = ""
        self._views: dict[ir.Value, View] = {}
        self._sizes: dict[ir.Value, Shape] = {}
        self._converted: dict[tuple[View, str], View] = {}
        self._stored: dict[Any, View] = {}
        self._names: set[str] = set()
        self._stem = ""

    def enter(self, node: ir.Node) -> None:
        """Name what follows after this node."""
        self._stem = node.outputs[0].name or node.name or node.op_type
        self.module = node.metadata_props.get("module", "")

    def bind(self, value: ir.Value, view: View) -> None:
        """Set what a value of the graph became."""
        self._views[value] = view

    # ------------------------------------------------------------------------------------------------ operands
    def is_constant(self, value: ir.Value | None) -> bool:
        """Whether a value depends on weights only."""
        return value is not None and value in self.constants

    def raw(self, value: ir.Value | None) -> View:
        """What a value became. Integers of the batch may be int32 where the graph says int64."""
        assert value is not None, "a required input is absent"
        if value in self._sizes:
            raise CompileError(f"{value.name!r} is a number of tokens, which is not supported as data")
        if value not in self._views:
            assert self.is_constant(value), f"{value.name} is read before it is computed"
            self._views[value] = self.stored(self.constants.source(value), value.name or self._stem)
        return self._views[value]

    def view(self, value: ir.Value | None) -> View:
        """What a value became, in the dtype that the graph gives it."""
        view = self.raw(value)
        assert value is not None
        return view if value.dtype is None else self.convert(view, plan_dtype(value.dtype, f"value {value.name!r}"))

    def optional(self, node: ir.Node, index: int) -> View | None:
        """An input that may be absent."""
        if index >= len(node.inputs) or node.inputs[index] is None:
            return None
        return self.view(node.inputs[index])

    def constant(self, node: ir.Node, index: int) -> NDArray[Any] | None:
        """An input that has to be known now (axes, sizes), or None if it is absent.

        Raises:
            CompileError: it depends on the tokens.
        """
        if index >= len(node.inputs) or node.inputs[index] is None:
            return None
        value = node.inputs[index]
        if not self.is_constant(value):
            raise CompileError(f"input {index} depends on the tokens; it has to be a constant")
        assert value is not None
        return self.constants.array(value)

    def ints(self, node: ir.Node, index: int) -> list[int] | None:
        """A constant input as a list of ints, or None if it is absent."""
        array = self.constant(node, index)
        return None if array is None else [int(x) for x in array.reshape(-1)]

    def sizes(self, value: ir.Value | None) -> Shape:
        """A list of sizes, which may depend on T and N.

        Raises:
            CompileError: it depends on data.
        """
        assert value is not None, "a required input is absent"
        if self.is_constant(value):
            return dims(int(x) for x in self.constants.array(value).reshape(-1))
        if value not in self._sizes:
            raise CompileError(f"the sizes {value.name!r} depend on data")
        return self._sizes[value]

    def bind_sizes(self, node: ir.Node) -> bool:
        """Whether a node only computes sizes; then they are known now, and there is no step for it."""
        found = compute_sizes(node, self)
        if found is None:
            return False
        self._sizes[node.outputs[0]] = found
        return True

    def known_sizes(self, value: ir.Value | None) -> Shape | None:
        """Sizes that depend on T or N, or None if the value is something else."""
        return None if value is None else self._sizes.get(value)

    # ------------------------------------------------------------------------------------------------ weights
    def stored(self, source: WeightSource, name: str) -> View:
        """A constant as kernels read it in general: float32, or ints or bools as they are."""
        if weights.numpy_dtype(source.dtype).kind not in "iub":
            dtype = "float32"
        else:
            dtype = {"int32": "int32", "bool": "bool"}.get(source.dtype, "int64")
        if source.dtype != dtype:
            source = Cast(source, dtype)
        key: Any = ("plain", weights.identity(source))
        if isinstance(source, Array | Cast) and source.nbytes <= SHARE_BYTES and _in_memory(source):
            array = np.ascontiguousarray(weights.read(source))
            source = Array(array)
            key = (dtype, array.shape, hashlib.sha256(array.tobytes()).digest())
        return self._store(key, source, name)

    def table(self, source: WeightSource, name: str) -> View:
        """A matrix of which rows are read (embedding), in the dtype of the engine; in panels if a linear has it too."""
        if weights.identity(source) in self.multiplied:
            return self.packed(source, name)
        if source.dtype != self.dtype:
            source = Cast(source, self.dtype)
        return self._store(("table", weights.identity(source)), source, name)

    def packed(self, source: WeightSource, name: str) -> View:
        """A matrix, or one for each expert, in panels, in the dtype of the engine."""
        if source.dtype != self.dtype:
            source = Cast(source, self.dtype)
        return self._store(("panels", weights.identity(source)), source, name, panels=True)

    def _store(self, key: Any, source: WeightSource, name: str, panels: bool = False) -> View:
        if key not in self._stored:
            weight = PackedWeight(self._unique(name), source, panels)
            self.weights[weight.name] = weight
            shape = dims(weight.shape)
            buffer = Buffer(weight.name, Storage.WEIGHT, weight.dtype, product(shape))
            self._stored[key] = View(buffer, shape, contiguous(shape))
        return self._stored[key]

    def number(self, value: float | int | bool, dtype: str) -> View:
        """A scalar."""
        return self.stored(Array(np.array(value, weights.numpy_dtype(dtype))), "constant")

    def array(self, array: NDArray[Any], name: str = "constant") -> View:
        """A small array made here."""
        return self.stored(Array(array), name)

    # ------------------------------------------------------------------------------------------------ steps
    def allocate(self, shape: Sequence[Dim], dtype: str, name: str | None = None, rows_first: bool = False) -> View:
        """A new buffer, named after the node: contiguous, or with the axis of the tokens outermost in memory.

        ``rows_first`` is for ops that write results of any strides. What is computed of a token then lies together
        wherever its axis is, strides are constants, and most transpositions and reshapes that follow stay views.
        """
        try:
            elements, strides = product(shape), packed_strides(shape) if rows_first else contiguous(shape)
        except ValueError:
            raise CompileError(f"a tensor of {show(shape)} is not linear in the tokens of a step") from None
        buffer = Buffer(self._unique(name or self._stem), Storage.ARENA, dtype, elements)
        return View(buffer, tuple(shape), strides)

    def emit(self, op: str, inputs: Sequence[View | None], outputs: Sequence[View], **attributes: Attribute) -> None:
        """Append a step; attributes are those that the op declares."""
        declared = all_ops()[op].attributes
        assert set(attributes) == set(declared), f"{op} has the attributes {set(declared)}, not {set(attributes)}"
        self.steps.append(LoweredStep(op, tuple(inputs), tuple(outputs), attributes, self.module))

    def emit_rows(self, op: str, inputs: Sequence[View], outputs: Sequence[View], **attributes: Attribute) -> None:
        """Append a step that treats the first axes alike: those of size 1 are left out."""
        views = [*inputs, *outputs]
        while all(view.rank > 1 and view.shape[0] == ONE for view in views):
            views = [view.squeeze([0]) for view in views]
        self.emit(op, views[: len(inputs)], views[len(inputs) :], **attributes)

    def elementwise(self, function: str, *operands: View, dtype: str | None = None, out: View | None = None) -> View:
        """Apply a function to operands that broadcast; the result has ``dtype``, by default that of the last."""
        shape = broadcast_shape([operand.shape for operand in operands])
        result = out if out is not None else self.allocate(shape, dtype or operands[-1].dtype, rows_first=True)
        views = [_dropped(operand.expand(result.shape), result) for operand in (*operands, result)]
        self.emit("elementwise", views[:-1], views[-1:], function=function)
        return result

    def convert(self, view: View, dtype: str) -> View:
        """The view in another dtype; the result is shared by all who ask for it."""
        if view.dtype == dtype:
            return view
        key = (view, dtype)
        if key not in self._converted:
            self._converted[key] = self.elementwise("copy", view, dtype=dtype)
        return self._converted[key]

    def copy(self, view: View) -> View:
        """The view made contiguous by a step."""
        return self.elementwise("copy", view, out=self.allocate(view.shape, view.dtype))

    def copy_rows(self, view: View) -> View:
        """The view copied, with the axis of the tokens outermost in memory."""
        return self.elementwise("copy", view, dtype=view.dtype)

    def reshape(self, view: View, shape: Sequence[Dim]) -> View:
        """The view under another shape, copied where strides can't say it."""
        found = view.reshape(shape)
        if found is None and replace(view, strides=packed_strides(view.shape)).reshape(shape) is not None:
            found = self.copy_rows(view).reshape(shape)
        elif found is None:
            found = self.copy(view).reshape(shape)
        if found is None:
            raise CompileError(f"can't reshape {show(view.shape)} to {show(shape)}")
        return found

    def gather(self, data: View, ids: View, axis: int) -> View:
        """Positions ``ids`` (int32 or int64) of an axis; their axes take its place."""
        front = data.transpose([axis, *(i for i in range(data.rank) if i != axis)])
        result = self.allocate([*ids.shape, *front.shape[1:]], data.dtype)
        self.emit("gather", [_without_ones(front, 1), ids.squeeze()], [result.squeeze()])
        lead = list(range(ids.rank, ids.rank + axis))
        return result.transpose([*lead, *range(ids.rank), *range(ids.rank + axis, result.rank)])

    def unit_inner(self, view: View) -> View:
        """The view, or a copy if the elements of its last axis don't lie one behind the other."""
        return view if view.has_unit_inner_stride else self.copy(view)

    def vector(self, view: View) -> View:
        """Without leading axes of size 1: [N]."""
        return view.squeeze(range(view.rank - 1)) if view.rank > 1 else view

    def rows(self, view: View, rank: int = 2, keep: int = 1) -> View:
        """Leading axes merged so that ``rank`` are left, and a unit inner stride; a copy where that is no view."""
        view = self.unit_inner(view)
        return view.collapse(rank, keep) or _must(self.copy(view).collapse(rank, keep))

    def _unique(self, name: str) -> str:
        unique, count = name, 0
        while unique in self._names:
            count += 1
            unique = f"{name}.{count}"
        self._names.add(unique)
        return unique


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape that all of them broadcast to.

    Raises:
        CompileError: they don't.
    """
    rank = max(len(shape) for shape in shapes)
    result = [ONE] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size == ONE:
                continue
            if result[axis] not in (ONE, size):
                raise CompileError(f"shapes {' and '.join(map(show, shapes))} don't broadcast")
            result[axis] = size
    return tuple(result)


def packed_strides(shape: Sequence[Dim]) -> Shape:
    """Strides without gaps, the axis of the tokens outermost."""
    order = sorted(range(len(shape)), key=lambda axis: shape[axis].is_constant)
    strides = contiguous([shape[axis] for axis in order])
    return tuple(strides[order.index(axis)] for axis in range(len(shape)))


def plan_dtype(dtype: ir.DataType, where: str) -> str:
    """The dtype of an activation: every float is float32.

    Raises:
        CompileError: no kernel works on such values.
    """
    if dtype.name in _FLOATS:
        return "float32"
    name = {"INT64": "int64", "INT32": "int32", "BOOL": "bool"}.get(dtype.name)
    if name is None:
        raise CompileError(f"{where}: {dtype.name} is not supported; known: {', '.join(DTYPES)}")
    return name


def _dropped(view: View, like: View) -> View:
    """Without the axes in which ``like`` has size 1."""
    gone = [axis for axis, size in enumerate(like.shape) if size == ONE]
    return view.squeeze(gone) if gone else view


def _without_ones(view: View, start: int) -> View:
    """Without the axes of size 1 from ``start`` on."""
    return view.squeeze([axis for axis in range(start, view.rank) if view.shape[axis] == ONE])


def _in_memory(source: WeightSource) -> bool:
    return isinstance(source, Array) or (isinstance(source, Cast) and _in_memory(source.source))


def _must(view: View | None) -> View:
    assert view is not None, "a contiguous view can be collapsed"
    return view
