"""The weights that products and embeddings read: where they stand, what they are called, and what role they play."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from llmc.compiler import weights
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import Buffer, View
from llmc.compiler.weights import Cast, Concat, Slice, WeightSource
from llmc.runtime.plan import Dim, Storage

WEIGHT_INPUTS: Mapping[str, tuple[int, ...]] = {"linear": (1,), "embedding": (1,), "moe": (3, 4)}
"""Which inputs of a step are matrices that can be stored in fewer bits."""

GATE_UP, DOWN = 3, 4
"""Those of moe."""


@dataclass(frozen=True)
class Part:
    """Rows of a weight that are one parameter of the model. ``name``: that of the parameter, as transformers has it."""

    name: str
    rows: int


@dataclass(frozen=True, eq=False)
class Site:
    """A weight [rows, columns], or [experts, rows, columns], and the steps that read it.

    ``role``: one of quantization.recipe.ROLES. ``source``: the numbers as the checkpoint stores them, before they are
    rounded to the engine's dtype.
    """

    name: str
    role: str
    source: WeightSource
    parts: tuple[Part, ...]
    readers: tuple[tuple[int, int], ...]
    """(step, input) in the order of the steps."""
    product: tuple[int, int] | None
    """The first of them that multiplies it; None for a table that rows are taken from only."""
    is_router: bool = False

    @property
    def experts(self) -> int | None:
        """How many matrices; None if it is one."""
        return self.source.shape[0] if len(self.source.shape) == 3 else None

    @property
    def rows(self) -> int:
        """Of a matrix."""
        return self.source.shape[-2]

    @property
    def columns(self) -> int:
        """Of a matrix."""
        return self.source.shape[-1]

    @property
    def label(self) -> str:
        """What people call it: its parameters."""
        return " + ".join(part.name for part in self.parts)

    @property
    def numbers(self) -> int:
        """How many it holds."""
        return (self.experts or 1) * self.rows * self.columns


def find_sites(graph: LoweredGraph, parameters: Mapping[str, WeightSource]) -> list[Site]:
    """All of them, in the order in which the steps read them.

    Args:
        graph: the lowered model.
        parameters: the sources of the model's parameters, for their names.
    """
    names: dict[Hashable, str] = {}
    for name, source in parameters.items():
        names.setdefault(weights.identity(source), name)
    readers: dict[str, list[tuple[int, int]]] = {}
    for number, step in enumerate(graph.steps):
        for index in WEIGHT_INPUTS.get(step.op, ()):
            view = step.inputs[index]
            if view is not None and isinstance(graph.weights.get(view.buffer.name), PackedWeight):
                readers.setdefault(view.buffer.name, []).append((number, index))
    roles, sites = _Roles(graph), []
    for name, places in readers.items():
        weight = graph.weights[name]
        assert isinstance(weight, PackedWeight), "checked above"
        source = unrounded(weight.source)
        if len(source.shape) < 2:
            continue
        numbers = {number for number, _ in places}
        parts = tuple(find_parts(source, names, name, graph.steps[places[0][0]].module))
        product = next((place for place in places if graph.steps[place[0]].op != "embedding"), None)
        sites.append(Site(name, roles.of(numbers), source, parts, tuple(places), product, numbers <= roles.routers))
    return sites


def unrounded(source: WeightSource) -> WeightSource:
    """The source of a weight before it was converted to the engine's dtype."""
    while isinstance(source, Cast) and weights.numpy_dtype(source.to).kind not in "iub":
        source = source.source
    return source


def find_parts(source: WeightSource, names: Mapping[Hashable, str], fallback: str, module: str) -> Iterator[Part]:
    """The parameters whose rows lie one below the other in a weight; one part if it is made in another way."""
    rows = source.shape[-2]
    known = names.get(weights.identity(source))
    if known is None and isinstance(source, Concat) and source.axis == 0 and len(source.shape) == 2:
        for part in source.parts:
            yield from find_parts(unrounded(part), names, fallback, module)
        return
    if known is None:
        inner = sorted(set(_parameters(source, names)))
        known = inner[0] if len(inner) == 1 else (f"{module}.weight" if module else fallback)
    yield Part(known, rows)


def _parameters(value: object, names: Mapping[Hashable, str]) -> Iterator[str]:
    """The parameters that a source is a view of."""
    if isinstance(value, WeightSource):
        name = names.get(weights.identity(value))
        if name is not None:
            yield name
            return
    children = getattr(value, "parts", None) or ([value.source] if hasattr(value, "source") else [])
    for child in children:
        yield from _parameters(child, names)


def split_parts(graph: LoweredGraph, site: Site, groups: Sequence[Sequence[Part]]) -> LoweredGraph:
    """A merged linear as several, one for each group of neighbouring parts, that write parts of the same rows.

    For weights such as q, k and v whose parts are quantized differently.
    """
    sizes = [sum(part.rows for part in group) for group in groups]
    steps: list[LoweredStep] = []
    made = dict(graph.weights)
    weight = made.pop(site.name)
    assert isinstance(weight, PackedWeight) and site.experts is None, "a merged linear"
    views: list[View] = []
    begin = 0
    for group, size in zip(groups, sizes, strict=True):
        part = replace(weight, name=group[0].name, source=_cut(weight.source, begin, begin + size))
        made[part.name] = part
        views.append(weight_view(part))
        begin += size
    for step in graph.steps:
        if step.op != "linear" or step.inputs[1] is None or step.inputs[1].buffer.name != site.name:
            steps.append(step)
            continue
        begin = 0
        bias = step.inputs[2] if len(step.inputs) > 2 else None
        for view, size in zip(views, sizes, strict=True):
            cut = Dim(begin), Dim(size)
            out = step.outputs[0].narrow(1, *cut)
            inputs = (step.inputs[0], view, None if bias is None else bias.narrow(0, *cut))
            steps.append(LoweredStep("linear", inputs, (out,), step.attributes, step.module))
            begin += size
    return replace(graph, steps=steps, weights=made)


def _cut(source: WeightSource, begin: int, end: int) -> WeightSource:
    """Rows of a weight; of a joined one the parts themselves, so that they are still known by their names."""
    if isinstance(source, Cast):
        return Cast(_cut(source.source, begin, end), source.to)
    if isinstance(source, Concat) and source.axis == 0:
        ends = list(accumulate(part.shape[0] for part in source.parts))
        parts = [
            part for part, stop in zip(source.parts, ends, strict=True) if begin <= stop - part.shape[0] and stop <= end
        ]
        if sum(part.shape[0] for part in parts) == end - begin:
            return weights.concat(parts)
    return Slice(source, (slice(begin, end),))


def weight_view(weight: PackedWeight) -> View:
    """The whole of a stored weight."""
    return stored_view(weight.name, weight.dtype, weight.shape)


def stored_view(name: str, dtype: str, shape: Sequence[int]) -> View:
    """The whole of a tensor of weights.safetensors."""
    from llmc.compiler.lowering.values import contiguous, dims, product

    sizes = dims(shape)
    return View(Buffer(name, Storage.WEIGHT, dtype, product(sizes)), sizes, contiguous(sizes))


class _Roles:
    """What linears are there for, as their neighbours tell."""

    def __init__(self, graph: LoweredGraph) -> None:
        self._steps = graph.steps
        self._head = self._behind({graph.logits.buffer}, _EXACT)
        chosen = {v.buffer for step in graph.steps if step.op == "moe" for v in step.inputs[1:3] if v is not None}
        self.routers = self._behind(chosen, _EXACT)
        asked = {v.buffer for s in graph.steps if s.op == "paged_attention" for v in s.inputs[:3] if v is not None}
        self._attention = self._behind(asked, _RESIDUAL) | self._after_attention()

    def of(self, numbers: set[int]) -> str:
        """The role of a weight that these steps read."""
        ops = {self._steps[number].op for number in numbers}
        if numbers & self._head:
            return "head"
        if ops == {"embedding"}:
            return "embedding"
        if "moe" in ops:
            return "experts"
        if numbers & self._attention:
            return "attention"
        return "mlp" if any(self._is_beside_activation(self._steps[n]) for n in numbers) else "other"

    def _behind(self, wanted: set[Buffer], ends: frozenset[str]) -> set[int]:
        """The linears whose outputs reach these buffers without passing one of ``ends``."""
        wanted, found = set(wanted), set()
        for number in range(len(self._steps) - 1, -1, -1):
            step = self._steps[number]
            if not any(view.buffer in wanted for view in step.outputs):
                continue
            if step.op == "linear":
                found.add(number)
            op = str(step.attributes.get("function", step.op)) if step.op == "elementwise" else step.op
            if op not in ends:
                wanted |= {view.buffer for view in step.inputs if view is not None}
        return found

    def _after_attention(self) -> set[int]:
        """The linears that read what attention computes."""
        reached: set[Buffer] = set()
        found = set()
        for number, step in enumerate(self._steps):
            if not any(view is not None and view.buffer in reached for view in step.inputs):
                if step.op == "paged_attention":
                    reached |= {view.buffer for view in step.outputs}
            elif step.op == "linear":
                found.add(number)
            elif step.op in ("elementwise", "norm", "gather"):
                reached |= {view.buffer for view in step.outputs}
        return found

    def _is_beside_activation(self, linear: LoweredStep) -> bool:
        ends = {linear.outputs[0].buffer, linear.inputs[0].buffer if linear.inputs[0] is not None else None}
        for step in self._steps:
            if step.op == "glu" or (step.op == "elementwise" and step.attributes["function"] in _ACTIVATIONS):
                views = [*step.inputs, *step.outputs]
                if any(view is not None and view.buffer in ends for view in views):
                    return True
        return False


_EXACT = frozenset(("linear", "norm", "add_norm", "paged_attention", "moe", "matmul", "embedding", "glu"))
_RESIDUAL = frozenset(("add_norm", "paged_attention", "moe", "matmul", "embedding", "glu", "add"))
_ACTIVATIONS = frozenset(("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh", "sigmoid"))
