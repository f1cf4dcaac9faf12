"""Adds ONNX nodes to a graph, each with the dtype and the exact shape of what it computes.

A value's shape in terms of T and N is ``value.meta["dims"]``, a tuple of ``runtime.plan.Dim``; ``value.shape`` says the
same with names, for people and other tools.
"""

# long: one method for each ONNX op that the compiler uses

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from llmc.errors import CompileError
from llmc.runtime.plan import Dim

Dims = tuple[Dim, ...]
ONE = Dim(1)
MAX_SLICE = (1 << 63) - 1
"""What ONNX's Slice takes for "to the end"."""

FLOAT, INT32, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL
OPSETS = {"": 23, "llmc": 1}


def dims_of(value: ir.Value) -> Dims:
    """The exact shape."""
    dims: Dims = value.meta["dims"]
    return dims


def show(dims: Dims) -> str:
    """A shape as text: ``[2, T, 64]``."""
    return f"[{', '.join(str(_shown(dim)) for dim in dims)}]"


class GraphBuilder:
    """Collects nodes and initializers. ``module`` is the Hugging Face module that new nodes belong to."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.module = ""
        self.tokens: ir.Value | None = None
        """A value of shape [T], for sizes that are computed."""
        self.rows: ir.Value | None = None
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._names: dict[str, int] = {}
        self._sizes: dict[Dim, ir.Value] = {}

    # Values ------------------------------------------------------------------

    def value(self, name: str, dtype: ir.DataType, dims: Dims) -> ir.Value:
        """A value that some node is about to compute, or a graph input."""
        shape = ir.Shape([_shown(dim) for dim in dims])
        made = ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
        made.meta["dims"] = dims
        return made

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A weight or constant, by name."""
        sizes = tensor.shape.numpy()
        made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(sizes), const_value=tensor)
        made.meta["dims"] = tuple(Dim(int(size)) for size in sizes)
        assert name not in self.initializers, f"two initializers are called {name}"
        self.initializers[name] = made
        return made

    def constant(self, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant; equal ones are one value."""
        data = np.asarray(array, None if dtype is None else dtype.numpy())
        key = (str(data.dtype), data.shape, data.tobytes())
        if key not in self._constants:
            name = self.fresh("c")
            self._constants[key] = self.initializer(
                name, ir.tensor(np.ascontiguousarray(data).reshape(data.shape), name=name)
            )
        return self._constants[key]

    def fresh(self, stem: str) -> str:
        """A name that is not taken."""
        number = self._names.get(stem, 0)
        self._names[stem] = number + 1
        return f"_{stem}.{number}"  # neither torch nor transformers has such names

    # Nodes -------------------------------------------------------------------

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[ir.DataType, Dims]],
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> list[ir.Value]:
        """Any node: the one way in which nodes are made."""
        name = self.fresh(op.lower())
        names = [name] if len(outputs) == 1 else [f"{name}.{i}" for i in range(len(outputs))]
        values = [self.value(n, dtype, dims) for n, (dtype, dims) in zip(names, outputs, strict=True)]
        node = ir.node(op, list(inputs), dict(attributes or {}), domain=domain, outputs=values, name=name)
        if self.module:
            node.metadata_props["module"] = self.module
        self.nodes.append(node)
        return values

    def op(
        self, op: str, inputs: Sequence[ir.Value | None], dtype: ir.DataType, dims: Dims, **attributes: Any
    ) -> ir.Value:
        """A standard node with one output."""
        return self.node(op, inputs, [(dtype, dims)], attributes)[0]

    # Elementwise -------------------------------------------------------------

    def unary(self, op: str, x: ir.Value, dtype: ir.DataType | None = None, **attributes: Any) -> ir.Value:
        """A standard elementwise op of one input."""
        return self.op(op, [x], dtype or _dtype(x), dims_of(x), **attributes)

    def binary(self, op: str, a: ir.Value, b: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
        """A standard elementwise op of two inputs of the same dtype."""
        assert a.dtype == b.dtype, f"{op} of {a.dtype} and {b.dtype}"
        return self.op(op, [a, b], dtype or _dtype(a), broadcast(dims_of(a), dims_of(b)))

    def function(self, name: str, *inputs: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
        """One of llmc::elementwise, for what the standard ops lack."""
        dims = broadcast(*map(dims_of, inputs))
        padded = [*inputs, *[None] * (3 - len(inputs))]
        return self.node("elementwise", padded, [(dtype or _dtype(inputs[0]), dims)], {"function": name}, "llmc")[0]

    def where(self, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """A where the condition holds, else b."""
        assert a.dtype == b.dtype, f"Where of {a.dtype} and {b.dtype}"
        return self.op("Where", [condition, a, b], _dtype(a), broadcast(*map(dims_of, (condition, a, b))))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Converted, or itself."""
        return x if x.dtype == dtype else self.op("Cast", [x], dtype, dims_of(x), to=int(dtype))

    # Layout ------------------------------------------------------------------

    def reshape(self, x: ir.Value, dims: Dims) -> ir.Value:
        """The same elements under another shape."""
        if dims_of(x) == dims:
            return x
        return self.op("Reshape", [x, self.shape(dims, reshape=True)], _dtype(x), dims)

    def transpose(self, x: ir.Value, order: Sequence[int]) -> ir.Value:
        """Axis i of the result is axis ``order[i]``."""
        order = [axis % len(order) for axis in order]
        if order == sorted(order):
            return x
        return self.op("Transpose", [x], _dtype(x), tuple(dims_of(x)[i] for i in order), perm=order)

    def unsqueeze(self, x: ir.Value, *axes: int) -> ir.Value:
        """With axes of size 1, which are ``axes`` of the result."""
        rank = len(dims_of(x)) + len(axes)
        dims = list(dims_of(x))
        for axis in sorted(axis % rank for axis in axes):
            dims.insert(axis, ONE)
        return (
            self.op("Unsqueeze", [x, self.ints(*sorted(a % rank for a in axes))], _dtype(x), tuple(dims)) if axes else x
        )

    def squeeze(self, x: ir.Value, *axes: int) -> ir.Value:
        """Without these axes, which have size 1."""
        gone = sorted(axis % len(dims_of(x)) for axis in axes)
        dims = tuple(dim for i, dim in enumerate(dims_of(x)) if i not in gone)
        return self.op("Squeeze", [x, self.ints(*gone)], _dtype(x), dims) if gone else x

    def expand(self, x: ir.Value, dims: Dims) -> ir.Value:
        """Broadcast to a shape."""
        old = dims_of(x)
        if old == dims:
            return x
        assert broadcast(old, dims) == dims, f"{show(old)} can't be broadcast to {show(dims)}"
        lead = len(dims) - len(old)
        # An axis that is as long already may be named by 1; that keeps most targets constant.
        target = tuple(ONE if i >= lead and old[i - lead] == dim else dim for i, dim in enumerate(dims))
        return self.op("Expand", [x, self.shape(target)], _dtype(x), dims)

    def slice(self, x: ir.Value, axis: int, start: Dim, stop: Dim, step: int = 1) -> ir.Value:
        """Positions start, start + step, ... below stop; both within the axis."""
        dims = list(dims_of(x))
        axis %= len(dims)
        if start == Dim(0) and stop == dims[axis] and step == 1:
            return x
        size = stop + start * -1
        if step != 1:
            if not size.is_constant:
                raise CompileError(
                    f"{self.module or 'graph'}: every {step}th of the tokens is taken, which is not supported"
                )
            size = Dim(max(0, -(-size.constant // step)))
        bounds = [self.size_list([bound]) for bound in (start, stop)]
        dims[axis] = size
        return self.op("Slice", [x, *bounds, self.ints(axis), self.ints(step)], _dtype(x), tuple(dims))

    def split(self, x: ir.Value, axis: int, sizes: Sequence[Dim]) -> list[ir.Value]:
        """Cut along an axis."""
        axis %= len(dims_of(x))
        if len(sizes) == 1:
            return [x]
        outputs = [(_dtype(x), (*dims_of(x)[:axis], size, *dims_of(x)[axis + 1 :])) for size in sizes]
        return self.node("Split", [x, self.size_list(sizes)], outputs, {"axis": axis})

    def concat(self, parts: Sequence[ir.Value], axis: int) -> ir.Value:
        """One after another along an axis."""
        if len(parts) == 1:
            return parts[0]
        axis %= len(dims_of(parts[0]))
        dims = list(dims_of(parts[0]))
        for part in parts[1:]:
            dims[axis] += dims_of(part)[axis]
        return self.op("Concat", parts, _dtype(parts[0]), tuple(dims), axis=axis)

    # Along axes --------------------------------------------------------------

    def reduce(self, op: str, x: ir.Value, axes: Sequence[int], keep: bool) -> ir.Value:
        """ReduceSum and its like."""
        gone = sorted({axis % len(dims_of(x)) for axis in axes})
        dims = [ONE if i in gone else dim for i, dim in enumerate(dims_of(x)) if keep or i not in gone]
        if not gone:
            return x
        return self.op(op, [x, self.ints(*gone)], _dtype(x), tuple(dims), keepdims=int(keep))

    def arg_reduce(self, op: str, x: ir.Value, axis: int, keep: bool) -> ir.Value:
        """ArgMax or ArgMin; the lowest index of equals."""
        axis %= len(dims_of(x))
        dims = [ONE if i == axis else dim for i, dim in enumerate(dims_of(x)) if keep or i != axis]
        return self.op(op, [x], INT64, tuple(dims), axis=axis, keepdims=int(keep), select_last_index=0)

    def softmax(self, x: ir.Value, axis: int, log: bool = False) -> ir.Value:
        """Softmax or its logarithm."""
        return self.unary("LogSoftmax" if log else "Softmax", x, axis=axis % len(dims_of(x)))

    def cumsum(self, x: ir.Value, axis: int, exclusive: bool = False) -> ir.Value:
        """Running sums."""
        axis %= len(dims_of(x))
        return self.op("CumSum", [x, self.constant(axis, INT64)], _dtype(x), dims_of(x), exclusive=int(exclusive))

    def topk(self, x: ir.Value, k: int, axis: int, largest: bool) -> list[ir.Value]:
        """Values and indices, sorted; the lowest index of equals first."""
        axis %= len(dims_of(x))
        dims = (*dims_of(x)[:axis], Dim(k), *dims_of(x)[axis + 1 :])
        attributes = {"axis": axis, "largest": int(largest), "sorted": 1}
        return self.node("TopK", [x, self.ints(k)], [(_dtype(x), dims), (INT64, dims)], attributes)

    # Indices -----------------------------------------------------------------

    def gather(self, data: ir.Value, ids: ir.Value, axis: int) -> ir.Value:
        """Positions of an axis; the axes of ids take its place."""
        axis %= len(dims_of(data))
        dims = (*dims_of(data)[:axis], *dims_of(ids), *dims_of(data)[axis + 1 :])
        return self.op("Gather", [data, ids], _dtype(data), dims, axis=axis)

    def gather_elements(self, data: ir.Value, ids: ir.Value, axis: int) -> ir.Value:
        """For each place of ids, the element of data that is there but for its place on the axis."""
        return self.op("GatherElements", [data, ids], _dtype(data), dims_of(ids), axis=axis % len(dims_of(data)))

    def scatter_elements(self, data: ir.Value, ids: ir.Value, src: ir.Value, axis: int, reduction: str) -> ir.Value:
        """Data with the elements of src at, or added at, the places that ids name."""
        attributes = {"axis": axis % len(dims_of(data)), "reduction": reduction}
        return self.op("ScatterElements", [data, ids, src], _dtype(data), dims_of(data), **attributes)

    # Products ----------------------------------------------------------------

    def matmul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """[..., M, K] @ [..., K, N], each of rank 2 or more."""
        first, second = dims_of(a), dims_of(b)
        assert first[-1] == second[-2], f"matmul of {show(first)} and {show(second)}"
        return self.op("MatMul", [a, b], _dtype(a), (*broadcast(first[:-2], second[:-2]), first[-2], second[-1]))

    def linear(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Product of x [..., K] and the transpose of weight [N, K]."""
        first, second = dims_of(x), dims_of(weight)
        assert first[-1] == second[1], f"linear of {show(first)} and {show(second)}"
        return self.node("linear", [x, weight, bias], [(FLOAT, (*first[:-1], second[0]))], domain="llmc")[0]

    # Sizes -------------------------------------------------------------------

    def ints(self, *numbers: int) -> ir.Value:
        """A list of constants."""
        return self.constant(np.array(numbers, np.int64))

    def shape(self, dims: Dims, reshape: bool = False) -> ir.Value:
        """A shape as a list; in a Reshape one size that changes is -1."""
        changing = [i for i, dim in enumerate(dims) if not dim.is_constant]
        if reshape and len(changing) == 1 and all(dim.constant for dim in dims if dim.is_constant):
            return self.ints(*(-1 if i in changing else dim.constant for i, dim in enumerate(dims)))
        return self.size_list(dims)

    def size_list(self, dims: Sequence[Dim]) -> ir.Value:
        """Sizes as a list of int64, computed from the shapes of the inputs where they change."""
        if all(dim.is_constant for dim in dims):
            return self.ints(*(dim.constant for dim in dims))
        return self.concat([self._size(dim) for dim in dims], 0)

    def _size(self, dim: Dim) -> ir.Value:
        if dim not in self._sizes:
            self._sizes[dim] = self._computed_size(dim)
        return self._sizes[dim]

    def _computed_size(self, dim: Dim) -> ir.Value:
        total = self.ints(dim.constant) if dim.constant or dim.is_constant else None
        for count, source in ((dim.tokens, self.tokens), (dim.rows, self.rows)):
            if not count:
                continue
            assert source is not None, "the builder knows no value of that size"
            term = self.op("Shape", [source], INT64, (ONE,))
            if count != 1:
                term = self.binary("Mul", term, self.ints(count))
            total = term if total is None else self.binary("Add", total, term)
        assert total is not None, f"{dim} has no terms"
        return total

    def arange(self, size: Dim) -> ir.Value:
        """0, 1, 2, ... as int64."""
        if size.is_constant:
            return self.constant(np.arange(size.constant, dtype=np.int64))
        return self.cumsum(self.expand(self.ints(1), (size,)), 0, exclusive=True)


def broadcast(*shapes: Dims) -> Dims:
    """The common shape.

    Raises:
        CompileError: there is none.
    """
    rank = max(map(len, shapes))
    result = []
    for axis in range(-rank, 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis} - {ONE}
        if len(sizes) > 1:
            raise CompileError(f"shapes {' and '.join(map(show, shapes))} can't be broadcast")
        result.append(sizes.pop() if sizes else ONE)
    return tuple(result)


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None, f"{value.name} has no dtype"
    return value.dtype


def _shown(dim: Dim) -> int | str:
    if dim.is_constant:
        return dim.constant
    terms = [f"{count}*{name}" if count != 1 else name for count, name in ((dim.tokens, "T"), (dim.rows, "N")) if count]
    return "+".join([*terms, *([str(dim.constant)] if dim.constant else [])])
