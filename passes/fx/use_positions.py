"""Models that count the tokens of their input -> position_ids, since the rows of a step are of several requests."""

import torch
from torch import fx

from llmc.passes.fx.base import FxPass
from llmc.passes.fx.nodes import arguments, call, is_dynamic, op_name, position_rows, replace, tensor

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
    2. No index of rows is made of it: that one counts rows, whatever request they are of. An index into a table of a
       fixed size is no such index.
    3. A table of a fixed size that is cut to the number of tokens is looked up: table[:T] -> table[position_ids[0]].
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
        for node in [n for n in module.graph.nodes if op_name(n) == "aten.slice" and _cuts_table(n)]:
            table, dim = arguments(node, ("self", "dim"))
            positions = position_rows(module)
            with module.graph.inserting_before(node):
                replace(node, call(module.graph, aten.index_select.default, (table, dim, positions), node))
            module.graph.erase_node(node)
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


def _cuts_table(node: fx.Node) -> bool:
    """Rule 3: all sizes of the table are fixed, and it is cut from 0 to the number of tokens."""
    before, after = tensor(node.args[0]), tensor(node)
    if before is None or after is None or any(map(is_dynamic, before.shape)):
        return False
    dim, start, step = arguments(node, ("dim", "start", "step"))
    size = after.shape[dim]
    return start in (None, 0) and step == 1 and is_dynamic(size) and bool(size.node.expr.is_symbol)


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
            table = tensor(reader.args[0])
            if source is indices or (isinstance(indices, list | tuple) and source in indices):
                if table is None or any(map(is_dynamic, table.shape)):
                    return True
                continue
        found = tensor(reader)
        if found is not None and not found.dtype.is_floating_point and found.dtype != torch.bool:
            pending += [(reader, following) for following in reader.users]
    return False
