"""Emission: weights as stored, exact shapes, models that equal transformers, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from configs import CONFIGS
from exported import Program, program_of
from packed import expected_logits, random_ids, random_model
from torch import Tensor, nn

from llmc.compiler.graph import emit
from llmc.compiler.pipeline import make_graph
from llmc.compiler.reference_run import run_graph
from llmc.compiler.trace import trace
from llmc.compiler.weights import Array, SourceTensor, WeightSource
from llmc.errors import CompileError, GateError
from llmc.passes.fx import FxPass, ordered_fx_passes
from llmc.runtime.plan import Dim


class Small(nn.Module):
    """Tied embedding, a linear, a scale and a matrix [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(32, 8), nn.Linear(8, 16)
        self.scale, self.conv = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16, 8))
        self.register_buffer("shift", torch.arange(8.0), persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = torch.addmm(self.shift, (self.up(self.embed(input_ids)) * self.scale)[0], self.conv)
        return nn.functional.linear(x[logit_rows][None], self.embed.weight)


class Stored:
    """Where the numbers of a model are, in a dtype of the checkpoint."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.dtype = dtype
        self.sources: dict[str, WeightSource] = {}
        self.weights = {name: p.detach().numpy() for name, p in model.named_parameters()}

    def __call__(self, name: str) -> WeightSource:
        if name not in self.sources:
            dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
            self.sources[name] = Array(self.weights[name].astype(dtype))
        return self.sources[name]


def nodes(model: ir.Model, op: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op]


def inputs(tokens: int = 29) -> dict[str, np.ndarray]:
    positions = np.arange(tokens, dtype=np.int32)
    return {"input_ids": positions % 31, "position_ids": positions, "logit_rows": positions[::-1].copy()}


def test_weights_of_linears_keep_their_dtype_and_all_others_are_cast() -> None:
    model = Small()
    graph = emit(program_of(model), Stored(model, "bfloat16"))
    assert {
        name: value.dtype.name
        for name, value in graph.graph.initializers.items()
        if name in dict(model.named_parameters())
    } == {name: "BFLOAT16" for name in ("embed.weight", "up.weight", "up.bias", "scale", "conv")}
    (embedding,) = nodes(graph, "embedding")
    linears = nodes(graph, "linear")
    weight = graph.graph.initializers["embed.weight"]
    assert embedding.inputs[1] is weight and linears[-1].inputs[1] is weight
    assert linears[0].inputs[1] is graph.graph.initializers["up.weight"]
    assert linears[0].inputs[2].dtype == ir.DataType.FLOAT, "a bias is float32"
    transposed = linears[1].inputs[1]
    assert transposed.producer().op_type == "Transpose" and transposed.dtype == ir.DataType.BFLOAT16
    assert sorted(n.inputs[0].name for n in nodes(graph, "Cast") if n.inputs[0].is_initializer()) == [
        "scale",
        "up.bias",
    ]


def test_numbers_of_weights_are_not_read() -> None:
    class Unread:
        shape, dtype, nbytes = (32, 8), "float16", 512

        def rows(self, start: int, stop: int) -> np.ndarray:
            raise AssertionError("read")

    model = Small()
    stored = Stored(model, "float16")
    stored.sources["embed.weight"] = Unread()
    graph = emit(program_of(model), stored)
    tensor = graph.graph.initializers["embed.weight"].const_value
    assert isinstance(tensor, SourceTensor) and tensor.source is stored.sources["embed.weight"]


def test_tied_parameters_are_one_initializer() -> None:
    model = Small()
    program = program_of(model)
    stored = Stored(model, "float32")
    stored.sources["scale"] = stored.sources["other"] = Array(stored.weights["scale"])
    twice = Program(program.module, {**program.parameter_names, "scale": "scale"}, program.buffers)
    assert len([n for n in emit(twice, stored).graph.initializers if n in ("scale", "other")]) == 1


def test_another_shape_in_the_checkpoint_is_refused() -> None:
    model = Small()
    stored = Stored(model, "float32")
    stored.sources["scale"] = Array(np.zeros(15, np.float32))
    with pytest.raises(CompileError, match=r"scale: shape \(15,\) in the checkpoint, \(16,\) in the model"):
        emit(program_of(model), stored)


def test_every_value_has_a_dtype_an_exact_shape_and_every_node_its_module() -> None:
    model = Small()
    graph = emit(program_of(model)).graph
    assert [(v.name, v.dtype.name, v.meta["dims"]) for v in graph.inputs] == [
        ("input_ids", "INT32", (Dim(tokens=1),)),
        ("position_ids", "INT32", (Dim(tokens=1),)),
        ("logit_rows", "INT32", (Dim(rows=1),)),
    ]
    assert [(v.name, v.dtype.name, v.meta["dims"]) for v in graph.outputs] == [
        ("logits", "FLOAT", (Dim(rows=1), Dim(32)))
    ]
    for node in graph:
        for value in node.outputs:
            assert value.dtype is not None and len(value.shape) == len(value.meta["dims"]), value
    assert nodes(ir.Model(graph, ir_version=11), "embedding")[0].metadata_props["module"] == "embed"
    assert {node.domain for node in graph} == {"", "llmc"}


@pytest.mark.parametrize(
    "name", ["llama_tied_bias", "gemma3n_text", "gpt2", "falcon_new", "deepseek_v3", "phimoe", "apertus"]
)
def test_models_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes, each checked; the file that comes out passes ONNX's checker and is read back."""
    monkeypatch.setenv("LLMC_CHECK", "1")
    entry = CONFIGS[name]
    config = entry.make()
    model = random_model(config, entry.reference)
    weights = model.state_dict()
    graph = make_graph(trace(config, max_seq_len=entry.max_len), lambda name: Array(weights[name].numpy()))
    ir.save(graph, tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    ids = random_ids(config, a=29)["a"]
    given = inputs() | {"input_ids": ids[0].numpy().astype(np.int32)}
    found = run_graph(ir.load(tmp_path / "model.onnx"), given)["logits"]
    expected = expected_logits(model, ids)[0].numpy()[given["logit_rows"]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


class Unsupported(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.embed, self.what = nn.Embedding(32, 8), what

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.what == "attention":
            heads = x[:, None]
            x = nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
        elif self.what == "angle":
            x = torch.atan2(x, x + 1)
        elif self.what == "over tokens":
            x = x.cumsum(1)
        elif self.what == "convolution":
            x = nn.functional.conv1d(x.transpose(1, 2), torch.ones(8, 1, 3), padding=1, groups=8).transpose(1, 2)
        elif self.what == "bits":
            x = x * (input_ids & 3)[..., None]
        return x[:, logit_rows]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("attention", "aten.scaled_dot_product_attention is attention that does not go through"),
        ("angle", "aten.atan2 is an op of torch .* which no kernel does. Give the model's family a fix"),
        ("over tokens", "aten.cumsum sums over the tokens, which are of several requests"),
        ("convolution", r"aten.conv1d is a convolution of width \[3\] with 8 groups over the tokens"),
        ("bits", "aten.(bitwise_and|__and__) combines the bits of integers"),
    ],
)
def test_what_cannot_be_expressed_is_named(what: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        emit(program_of(Unsupported(what)))


def test_dumps_the_graph_after_each_pass_that_changed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_DUMP", str(tmp_path / "dump"))
    make_graph(program_of(Small()))
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    number = len(ordered_fx_passes()) + 1
    assert names[0] == "00-trace.txt" and f"{number:02}-emit.txt" in names
    assert any(name.endswith("-form_linears.txt") for name in names)
    text = (tmp_path / "dump" / f"{number:02}-emit.txt").read_text()
    assert "logits: FLOAT[N,32] = " in text and "llmc::linear(" in text


def test_the_check_names_the_pass_that_changed_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class BreakScale(FxPass):
        def call(self, module: torch.fx.GraphModule) -> bool:
            (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
            node.replace_all_uses_with(node.args[0])
            return True

    monkeypatch.setenv("LLMC_CHECK", "1")
    monkeypatch.setattr("llmc.compiler.pipeline.ordered_fx_passes", lambda: [BreakScale])
    with pytest.raises(GateError, match="LLMC_CHECK: BreakScale changed the logits by"):
        make_graph(program_of(Small()))
