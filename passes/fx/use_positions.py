"""Models that count the tokens of their input -> position_ids, since the rows of a step are of several requests."""

import torch
from torch import fx

from llmc.passes.fx.base import FxPass
from llmc.passes.fx.nodes import arguments, is_dynamic, op_name, position_rows, tensor

aten = torch.ops.aten
INDEXING = {
    "aten.index": "indices",
    "aten.index_put": "indices",
    "aten.index_select": "index",
    "aten.gather": "index",
    "aten.scatter": "index",
    "aten.scatter_add": "index",
    "aten.index_add": "index",
    "aten.index_copy": "index",
}


class UsePositions(FxPass):
    """arange(T) -> position_ids[0]: for one whole sequence they are the same, for packed rows only one is meant.

    1. It counts all tokens from 0 by 1.
    2. No index of rows is made of it: that one counts rows, whatever request they are of.
    """

    runs_after = ("CleanUp",)

    def call(self, module: fx.GraphModule) -> bool:
        """See FxPass."""
        changed = False
        for node in [n for n in module.graph.nodes if op_name(n) == "aten.arange" and _counts_tokens(n)]:
            readers = [user for user in node.users if not _becomes_index(node, user)]
            if readers:
                positions = position_rows(module)
                for user in readers:
                    user.replace_input_with(node, positions)
                changed = True
        if changed:
            module.graph.eliminate_dead_code()
        return changed


def _counts_tokens(node: fx.Node) -> bool:
    found = tensor(node)
    if found is None or not is_dynamic(found.shape[0]) or found.dtype not in (torch.int64, torch.float32):
        return False
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    start = arguments(node, ("start",))[0] if "start" in names else 0
    step = arguments(node, ("step",))[0] if "step" in names else 1
    return start == 0 and step == 1 and bool(found.shape[0].node.expr.is_symbol)  # type: ignore[attr-defined]


def _becomes_index(counted: fx.Node, user: fx.Node) -> bool:
    """Whether the numbers, or what is computed of them, say which rows are read or written."""
    seen: set[tuple[fx.Node, fx.Node]] = set()
    pending = [(counted, user)]
    while pending:
        edge = pending.pop()
        if edge in seen:
            continue
        seen.add(edge)
        source, reader = edge
        name = op_name(reader)
        if name in INDEXING:
            (indices,) = arguments(reader, (INDEXING[name],))
            if source is indices or (isinstance(indices, list | tuple) and source in indices):
                return True
        found = tensor(reader)
        if found is not None and not found.dtype.is_floating_point and found.dtype != torch.bool:
            pending += [(reader, following) for following in reader.users]
    return False
