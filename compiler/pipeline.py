"""Runs the passes: on the FX graph, then, after emission, on the onnx_ir graph.

``LLMC_DUMP=dir`` receives the graph after each pass that changed it, ``LLMC_CHECK=1`` runs the references before and
after each pass, on random weights and inputs, and compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
from torch import fx

from llmc import debug
from llmc.compiler import verify
from llmc.compiler.check import Checker
from llmc.compiler.graph import Traced, emit
from llmc.compiler.weights import WeightSource
from llmc.passes import ordered_passes
from llmc.passes.fx import WEIGHT_DTYPES, ordered_fx_passes
from llmc.passes.fx.evaluate import module_path


def make_graph(
    program: Traced,
    weight_source: Callable[[str], WeightSource] | None = None,
    more: Callable[[ir.Graph], None] | None = None,
) -> ir.Model:
    """Fuse, emit and optimise a traced program, whose module is changed in place.

    Args:
        program: what compiler/trace.py made.
        weight_source: where the numbers of a parameter are, by its Hugging Face name; without it the module has them.
        more: adds outputs to the graph before it is optimised (compiler/features.py).

    Raises:
        CompileError: the graph holds an op that can't be expressed.
        GateError: a pass changed numbers (seen with ``LLMC_CHECK``).
    """
    module = program.module
    watch = _Watch(program)
    if weight_source is not None:
        names = program.parameter_names
        module.meta[WEIGHT_DTYPES] = {target: weight_source(name).dtype for target, name in names.items()}
    watch.fx_graph("trace", module)
    verify.traced(module, {*program.parameter_names, *program.buffers})
    for fx_pass in ordered_fx_passes():
        watch.fx_graph(fx_pass.__name__, module, fx_pass()(module))
    verify.fused(module)
    model = emit(program, weight_source)
    if more is not None:
        more(model.graph)
    watch.graph("Emit", model)
    verify.emitted(model)
    for graph_pass in ordered_passes():
        watch.graph(graph_pass.__name__, model, bool(graph_pass()(model).modified))
        verify.emitted(model)
    return model


class _Watch:
    """Sees the graph after every stage: numbers the stages, and does what the debug variables ask for."""

    def __init__(self, program: Traced) -> None:
        self._number = 0
        self._directory = debug.dump_dir()
        self._checker = Checker(program) if debug.enabled("LLMC_CHECK") else None

    def fx_graph(self, stage: str, module: fx.GraphModule, changed: bool = True) -> None:
        if changed and self._directory:
            self._write(self._directory, stage, show_fx(module))
        if changed and self._checker:
            self._checker.see(stage, self._checker.run_fx(module))
        self._number += 1

    def graph(self, stage: str, model: ir.Model, changed: bool = True) -> None:
        if changed and self._directory:
            self._write(self._directory, stage, show_graph(model))
        if changed and self._checker:
            self._checker.see(stage, self._checker.run_graph(model))
        self._number += 1

    def _write(self, directory: Path, stage: str, text: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{self._number:02}-{_snake_case(stage)}.txt").write_text(text, encoding="utf-8")


def show_fx(module: fx.GraphModule) -> str:
    """One line a node: ``add: float32[1, T, 64] = aten.add.Tensor(x, y)   # model.layers.0``."""
    lines = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        shape = f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else ""
        arguments = [*map(str, node.args), *(f"{key}={item}" for key, item in node.kwargs.items())]
        path = module_path(node)
        lines.append(f"{node.name}{shape} = {node.target}({', '.join(arguments)}){f'   # {path}' if path else ''}")
    return "\n".join(lines) + "\n"


def show_graph(model: ir.Model) -> str:
    """One line a node: ``y: FLOAT[1,T,64] = llmc::norm(x, weight) epsilon=1e-05   # model.layers.0``."""

    def typed(value: ir.Value) -> str:
        return f"{value.name}: {value.dtype}{value.shape}"

    lines = [f"{typed(value)} = input" for value in model.graph.inputs]
    lines += [f"{typed(value)} = initializer" for value in model.graph.initializers.values()]
    for node in model.graph:
        op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        inputs = ", ".join(str(value.name) if value is not None else "-" for value in node.inputs)
        attributes = "".join(f" {name}={item.value}" for name, item in node.attributes.items())
        path = node.metadata_props.get("module", "")
        outputs = ", ".join(map(typed, node.outputs))
        lines.append(f"{outputs} = {op}({inputs}){attributes}{f'   # {path}' if path else ''}")
    lines += [f"output {value.name}" for value in model.graph.outputs]
    return "\n".join(lines) + "\n"


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
