"""Runs torch.export over a model on the meta device and hands back a plain FX graph with the names of the model."""

from __future__ import annotations

import contextlib
import inspect
import io
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from llmc.errors import CompileError, LlmcError

EXAMPLE_TOKENS = 37
"""Tokens of the example input: a prime that no size of a model is likely to equal."""


def export(model: nn.Module, max_seq_len: int) -> fx.GraphModule:
    """The model as an FX graph of aten and llmc ops; its symbolic sizes are T (tokens) and N (logit rows).

    Targets of get_attr nodes are names of the model; a tensor with two names (tied weights) has one target.

    Raises:
        CompileError: the model's code can't be traced, or branches on the number of tokens.
    """
    wrapped = _Wrapped(model)
    name = type(model).__name__
    ids = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long)
    rows = torch.zeros(3, dtype=torch.long)
    auto = torch.export.Dim.AUTO
    try:
        # torch prints a graph that it could not finish; the error says what matters
        quiet = contextlib.redirect_stderr(io.StringIO())
        with quiet, torch.no_grad(), mock.patch.object(FakeTensorMode, "from_tensor", _fake_on_cpu):
            program = torch.export.export(
                wrapped,
                (ids, torch.zeros_like(ids), rows),
                dynamic_shapes=({1: auto}, {1: auto}, {0: auto}),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except Exception as problem:
        raise _readable(name, problem) from problem
    _check_dynamic(program, name, max_seq_len)
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule), f"torch.export gave {type(module)}"
    return _renamed(module, wrapped)


_from_tensor = FakeTensorMode.from_tensor


def _fake_on_cpu(self: FakeTensorMode, tensor: Tensor, **options: Any) -> Any:
    """Let parameters on the meta device be traced as if they were on the CPU.

    Constants that the model makes on the device of its parameters then keep their numbers, and the graph names no
    device that it can't run on.
    """
    fake = _from_tensor(self, tensor, **options)
    if isinstance(fake, FakeTensor) and fake.fake_device.type == "meta":
        fake.fake_device = torch.device("cpu")
    return fake


class _Wrapped(nn.Module):
    """(input_ids [1, T], position_ids [1, T], logit_rows [N]) -> logits [1, N, V]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        own = set(inspect.signature(model.forward).parameters)
        base = getattr(model, model.base_model_prefix, model)
        inner = set(inspect.signature(base.forward).parameters)
        self.takes_positions = "position_ids" in own | inner
        self.takes_rows = "logits_to_keep" in own
        if not self.takes_rows:
            self._rows: Tensor | None = None
            head = model.get_output_embeddings()
            if head is None:
                raise CompileError(f"{type(model).__name__}: it has no output embeddings that compute its logits")
            head.register_forward_pre_hook(lambda module, args: (args[0][:, self._rows], *args[1:]))

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        torch._check(input_ids.shape[1] == position_ids.shape[1])
        options: dict[str, Any] = {"use_cache": False}
        if self.takes_positions:
            options["position_ids"] = position_ids
        if self.takes_rows:
            options["logits_to_keep"] = logit_rows
        else:
            self._rows = logit_rows
        out = self.model(input_ids=input_ids, **options)
        logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
        return logits


def _readable(name: str, problem: BaseException) -> CompileError:
    """One of our own errors from the chain of causes, else the first line of what torch says."""
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, LlmcError):
            return CompileError(f"{name}: {cause}")
        cause = cause.__cause__ or cause.__context__
    line = next((text for text in str(problem).splitlines() if text.strip()), repr(problem))
    return CompileError(f"{name}: its code can't be traced ({type(problem).__name__}: {line})")


def _check_dynamic(program: torch.export.ExportedProgram, name: str, max_seq_len: int) -> None:
    """T and N have to stay free: from 1 row to at least one longest sequence."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    for argument, axis in (("input_ids", 1), ("logit_rows", 0)):
        size = values[argument].shape[axis]
        what = "tokens" if axis else "logit rows"
        if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
            raise CompileError(f"{name}: its code works for one number of {what} only ({int(size)})")
        bounds = program.range_constraints.get(size.node.expr)
        if bounds is not None and axis and (int(bounds.lower) > 2 or bounds.upper < max_seq_len):
            raise CompileError(
                f"{name}: its code branches on the number of {what}: traced for {bounds.lower} to {bounds.upper} of "
                f"them, but sequences may have up to {max_seq_len}"
            )


def _renamed(module: fx.GraphModule, wrapped: _Wrapped) -> fx.GraphModule:
    """Targets without the wrapper's prefix, and the first name of tensors that have two."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    model = wrapped.model
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names[f"model.{name}"] = first.setdefault(id(tensor), name)
    root = nn.Module()
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = _attribute(module, str(node.target))
            node.target = names.get(str(node.target), str(node.target).replace(".", "_"))
            _register(root, node.target, value)
        elif node.op == "call_module":  # guards, which are switched off
            graph.erase_node(node)
        elif node.op == "output":
            node.args = (fx.node.map_arg(node.args[0], lambda n: n)[0],)  # a tuple of one
    _strip_wrapper(graph)
    graph.set_codegen(fx.graph.CodeGen())
    return fx.GraphModule(root, graph, type(model).__name__)


def _strip_wrapper(graph: fx.Graph) -> None:
    """Module paths as the model names them."""
    stacks: dict[int, Any] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            if id(stack) not in stacks:
                inner = {key: (path.removeprefix("model."), kind) for key, (path, kind) in stack.items() if path}
                stacks[id(stack)] = inner
            node.meta["nn_module_stack"] = stacks[id(stack)]


def _attribute(module: nn.Module, target: str) -> Tensor:
    path, _, last = target.rpartition(".")
    value: Tensor = getattr(module.get_submodule(path), last)
    return value


def _register(root: nn.Module, target: str, value: Tensor) -> None:
    *path, last = target.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if last not in owner._buffers:
        owner.register_buffer(last, value.detach(), persistent=False)
