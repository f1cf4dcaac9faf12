import operator

import torch
from torch import Tensor, nn

from llmc.passes.fx.nodes import add_buffer, arguments, call, get_attr, op_name, position_rows, same_shape, tensor

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 6)

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return torch.add(x.split(3, -1)[1], 1.0, alpha=2)


def test_names_and_arguments(export) -> None:
    graph = export(Model()).graph
    names = [op_name(node) for node in graph.nodes]
    assert names[-4:] == ["aten.split", "getitem", "aten.add", "output"]
    (split,) = (n for n in graph.nodes if op_name(n) == "aten.split")
    (total,) = (n for n in graph.nodes if op_name(n) == "aten.add")
    assert arguments(split, ("split_size", "dim")) == [3, -1]
    assert arguments(total, ("other", "alpha")) == [1.0, 2]
    assert arguments(graph.find_nodes(op="call_function", target=aten.embedding.default)[0], ("sparse",)) == [False]


def test_new_nodes_have_a_value_and_a_module(export) -> None:
    module = export(Model())
    (total,) = (n for n in module.graph.nodes if op_name(n) == "aten.add")
    with module.graph.inserting_before(total):
        halves = call(module.graph, aten.chunk.default, (total.args[0], 3, -1), total)
        first = call(module.graph, operator.getitem, (halves, 0), total)
    assert [int(size) for size in tensor(first).shape[2:]] == [1]
    assert str(tensor(first).shape[1]) == str(tensor(total).shape[1])
    assert first.meta.get("nn_module_stack") == total.meta.get("nn_module_stack")
    assert not same_shape(first, total) and same_shape(total, total.args[0]) and not same_shape(halves, total)


def test_buffers_get_free_names_and_one_node(export) -> None:
    module = export(Model())
    anchor = next(n for n in module.graph.nodes if op_name(n) == "aten.embedding")
    names = [add_buffer(module, "table", torch.zeros(n, dtype=torch.int32)) for n in (2, 3)]
    assert names == ["table_0", "table_1"]
    node = get_attr(module, "table_1", anchor)
    assert get_attr(module, "table_1", anchor) is node
    assert tensor(node).shape == (3,) and tensor(node).dtype == torch.int32
    module.graph.lint()


def test_positions_come_before_all_calls(export) -> None:
    module = export(Model())
    rows = position_rows(module)
    assert position_rows(module) is rows
    assert next(n for n in module.graph.nodes if n.op == "call_function") is rows
    assert tensor(rows).dim() == 1
