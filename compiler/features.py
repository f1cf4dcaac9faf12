"""What a model computes on the way to its logits and a draft layer goes on with: more outputs of the graph."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from llmc.errors import CompileError
from llmc.passes.pick_rows_early import picked_axis

HEAD = -1
"""Instead of a layer: what goes into the head of the model, of all tokens."""

_LAYER = re.compile(r"(.*?\.)(\d+)(?:\..*)?")


def usual_layers(graph: ir.Graph) -> tuple[int, int, int]:
    """Those that EAGLE-3 looks at: near the beginning, in the middle and near the end; what goes into them counts.

    Raises:
        CompileError: the model has too few layers for three.
    """
    count = len(_first_nodes(graph))
    layers = (2, count // 2, count - 3)
    if not 2 < layers[1] < layers[2]:
        raise CompileError(
            f"--eagle: the model has {count} layers, too few for the usual three; name three in config.json of the "
            'layer: "eagle_aux_hidden_state_layer_ids": [...]'
        )
    return layers


def add_features(graph: ir.Graph, layers: Sequence[int]) -> None:
    """Let the graph also return what goes into these layers, [.., T, width]; or into the `HEAD`.

    Raises:
        CompileError: it can't be found.
    """
    first = _first_nodes(graph)
    for layer in layers:
        graph.outputs.append(_of_head(graph) if layer == HEAD else _of_layer(first, layer))


def _first_nodes(graph: ir.Graph) -> dict[int, ir.Node]:
    """The first node of each layer; layers are the modules of the longest numbered list."""
    found: dict[str, dict[int, ir.Node]] = {}
    for node in graph:
        if (match := _LAYER.fullmatch(node.metadata_props.get("module", ""))) is not None:
            found.setdefault(match[1], {}).setdefault(int(match[2]), node)
    return max(found.values(), key=len, default={})


def _of_layer(first: dict[int, ir.Node], layer: int) -> ir.Value:
    """What its first node reads: if that adds and norms, what it adds."""
    if layer not in first:
        raise CompileError(f"--eagle: it looks at layer {layer}, but the model has {len(first)} layers")
    node = first[layer]
    value = node.outputs[0] if node.op_type == "add_norm" else node.inputs[0]
    if value is None or value.is_graph_input() or value.shape is None or len(value.shape) not in (2, 3):
        raise CompileError(f"--eagle: what goes into layer {layer} of this model can't be found")
    return value


def _of_head(graph: ir.Graph) -> ir.Value:
    values = [node.inputs[0] for node in graph if picked_axis(node) is not None]
    if len(values) != 1 or values[0] is None:
        raise CompileError("--eagle: what goes into the head of this model can't be found")
    return values[0]
