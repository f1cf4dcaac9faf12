"""Lowers an EAGLE layer to a plan of its own, with a KV cache of its own, that shares what it can with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.eagle.checkpoint import EAGLE_1, Eagle
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import ONE, View
from llmc.compiler.medusa.lowering import StepBuilder, embedding_step, output_step, with_rounded
from llmc.compiler.quantize.sites import weight_view
from llmc.compiler.weights import Array, Cast, Concat, WeightSource
from llmc.errors import CheckpointError
from llmc.runtime.eagle import FEATURES, HIDDEN
from llmc.runtime.plan import Dim, KvSlot

if TYPE_CHECKING:
    from llmc.quantization.base import Method

TOKENS, ROWS = Dim(tokens=1), Dim(rows=1)


def lower_eagle(
    eagle: Eagle,
    model: LoweredGraph,
    factors: Sequence[float],
    shares_embedding: bool,
    dtype: str,
    method: Method | None,
    compute: str,
    positions: int,
) -> LoweredGraph:
    """The steps of the layer, and all weights that they read, those of the model too.

    Args:
        eagle: the checkpoint.
        model: the steps of the model, as they will be run.
        factors: what the input of its output layer is divided by, () if it is not.
        shares_embedding: whether the table is that of the model.
        dtype: of the weights.
        method: how the weights of the model are quantized; those of the layer are rounded to the same format.
        compute: what products with quantized weights compute with.
        positions: of a sequence at most.
    """
    layer = _Layer(eagle, model, factors, dtype)
    layer.take_features()
    embedded = layer.embed(shares_embedding)
    hidden = layer.decode(embedded, positions)
    logits = layer.head(hidden)
    build = layer.build
    shape = eagle.shape
    slot = KvSlot(shape.kv_heads, shape.head_dim, shape.head_dim)
    graph = LoweredGraph(
        build.steps, logits, layer.all_weights, {0: slot}, given=build.buffers_given, features=(hidden,)
    )
    if method is not None:
        graph = with_rounded(graph, build.matrices, method, compute)
    return graph


class _Layer:
    """The steps, from features and tokens to logits."""

    def __init__(self, eagle: Eagle, model: LoweredGraph, factors: Sequence[float], dtype: str) -> None:
        self.eagle, self.shape = eagle, eagle.shape
        self.build = StepBuilder(dtype, "eagle")
        self.shared: dict[str, Any] = {}
        self._model, self._factors = model, np.array(factors, np.float32)
        self._first = eagle.kind == EAGLE_1
        self.hidden: View

    @property
    def all_weights(self) -> dict[str, Any]:
        """Own ones, and those of the model."""
        return {**self.shared, **self.build.weights}

    def take_features(self) -> None:
        """What the model computed, if that is not yet what the layer goes on with: into ``hidden``."""
        build, shape = self.build, self.shape
        if self._first:
            self.hidden = build.buffer(HIDDEN, TOKENS, shape.hidden)
            if len(self._factors):  # a calibrated method has folded them into the norm
                raw = build.add_input(FEATURES, TOKENS, shape.hidden)
                self._scale(raw, self._factors, "eagle.feature_scale", self.hidden)
        else:
            raw = build.add_input(FEATURES, TOKENS, 3 * shape.target)
            self.hidden = build.buffer(HIDDEN, TOKENS, shape.hidden)
            build.linear("eagle.fc", raw, self._source("fc.weight"), self._bias("fc.bias"), self.hidden)
        build.given.append(self.hidden)

    def embed(self, shares: bool) -> View:
        """Both inputs side by side, [T, 2H]: embeddings, and what the layer goes on with."""
        build, width = self.build, self.shape.hidden
        both = build.buffer("both", TOKENS, 2 * width)
        first, second = (both.narrow(1, Dim(at), Dim(width)) for at in (0, width))
        raw = first if self._first else build.buffer("embedded", TOKENS, width)
        ids = build.batch("input_ids", TOKENS)
        if shares:
            step = embedding_step(self._model)
            assert step is not None, "it was looked for"
            self._share(step.inputs[1:])
            build.step("embedding", [ids, *step.inputs[1:]], raw, **step.attributes)
        else:
            source = self._source("embed_tokens.weight")
            name, source = "eagle.embed_tokens", source if source.dtype == build.dtype else Cast(source, build.dtype)
            build.weights[name] = PackedWeight(name, source)
            build.step("embedding", (ids, weight_view(build.weights[name])), raw)
        if self._first:
            build.step("elementwise", (self.hidden,), second, function="copy")
        else:
            self._norm(raw, "input_layernorm.weight", first)
            self._norm(self.hidden, "hidden_norm.weight", second)
        return both

    def decode(self, both: View, positions: int) -> View:
        """The decoder layer: what the next row goes on with, [T, H]."""
        build, shape, width = self.build, self.shape, self.shape.hidden
        if self._first:
            x = build.buffer("joined", TOKENS, width)
            residual = build.linear("eagle.fc", both, self._source("fc.weight"), self._bias("fc.bias"), x)
        elif self.eagle.norm_first:
            x, residual = both, both.narrow(1, Dim(width), Dim(width))
        else:
            x, residual = both, self.hidden
        attended = self._attention(x, positions)
        out = build.buffer("projected", TOKENS, width)
        name = "self_attn.o_proj"
        build.linear(f"eagle.{name}", attended, self._source(f"{name}.weight"), self._bias(f"{name}.bias"), out)
        total, normed = (build.buffer(name, TOKENS, width) for name in ("attended", "normed"))
        weight = build.weight("eagle.post_attention_layernorm", self._source("post_attention_layernorm.weight"))
        norm: dict[str, Any] = {"epsilon": self.eagle.epsilon, "kind": "rms", "offset": 0.0}
        build.steps.append(LoweredStep("add_norm", (residual, out, weight, None), (total, normed), norm, "eagle"))
        units = build.buffer("gate_up", TOKENS, 2 * shape.inner)
        build.linear("eagle.mlp.gate_up", normed, self._joined("mlp.gate_proj", "mlp.up_proj"), None, units)
        gated = build.buffer("gated", TOKENS, shape.inner)
        halves = [units.narrow(1, Dim(at), Dim(shape.inner)) for at in (0, shape.inner)]
        build.step("glu", halves, gated, function=self.eagle.function)
        down = build.buffer("down", TOKENS, width)
        build.linear("eagle.mlp.down_proj", gated, self._source("mlp.down_proj.weight"), None, down)
        return build.step("elementwise", (total, down), build.buffer("features", TOKENS, width), function="add")

    def head(self, hidden: View) -> View:
        """Logits [N, tokens of the draft] of some rows."""
        build, width = self.build, self.shape.hidden
        rows = build.step("gather", (hidden, build.batch("logit_rows", ROWS)), build.buffer("picked", ROWS, width))
        if not self._first:
            rows = self._norm(rows, "norm.weight", build.buffer("last", ROWS, width))
        logits = build.buffer("logits", ROWS, self.shape.vocabulary)
        if "lm_head.weight" in self.eagle.tensors:
            return build.linear("eagle.lm_head", rows, self._source("lm_head.weight"), None, logits)
        if len(self._factors):
            rows = self._scale(rows, 1 / self._factors, "eagle.input_scale", build.buffer("scaled", ROWS, width))
        last = output_step(self._model)
        self._share(last.inputs[1:])
        build.steps.append(LoweredStep(last.op, (rows, *last.inputs[1:]), (logits,), last.attributes, "eagle"))
        return logits

    def _attention(self, x: View, positions: int) -> View:
        """[T, heads * size]."""
        build, shape = self.build, self.shape
        heads, keys, size = shape.heads, shape.kv_heads, shape.head_dim
        made = build.buffer("qkv", TOKENS, (heads + 2 * keys) * size)
        names = [f"self_attn.{name}_proj" for name in "qkv"]
        bias = None
        if f"{names[0]}.bias" in self.eagle.tensors:
            parts = [weights.read(self._source(f"{name}.bias")).astype(np.float32) for name in names]
            bias = build.weight("eagle.self_attn.qkv.bias", Array(np.concatenate(parts)))
        build.linear("eagle.self_attn.qkv", x, self._joined(*names), bias, made)
        table = build.weight("eagle.rope_table", Array(self._rope(positions)))
        index, sign = (build.weight(f"eagle.rope_{i}", Array(a)) for i, a in enumerate(_halves(size)))
        places = build.batch("position_ids", TOKENS)
        inputs, at = [], 0
        for name, count in (("q", heads), ("k", keys), ("v", keys)):
            part = made.narrow(1, Dim(at), Dim(count * size)).reshape((TOKENS, Dim(count), Dim(size)))
            assert part is not None, "columns can be split"
            if name != "v":
                turned = build.buffer(name, TOKENS, count * size).reshape((TOKENS, Dim(count), Dim(size)))
                assert turned is not None, "it is contiguous"
                part = build.step("rope", (part, places, table, index, sign), turned)
            inputs.append(part)
            at += count * size
        flat = build.buffer("attention", TOKENS, heads * size)
        out = flat.reshape((TOKENS, Dim(heads), Dim(size)))
        assert out is not None, "it is contiguous"
        attributes: dict[str, Any] = {"slot": 0, "write": True, "scale": size**-0.5, "softcap": 0.0}
        build.step("paged_attention", (*inputs, None, None), out, window=0, chunk=0, **attributes)
        return flat

    def _rope(self, positions: int) -> NDArray[np.float32]:
        """Cosines and sines [positions, size], by the configuration of the checkpoint."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        given, size = self.eagle.config, self.shape.head_dim
        keys = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
        sizes = {"hidden_size": size * self.shape.heads, "num_attention_heads": self.shape.heads, "head_dim": size}
        try:
            config = LlamaConfig(**{key: given[key] for key in keys if given.get(key) is not None}, **sizes)
            cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(f"{self.eagle.path / 'config.json'}: its rope can't be made ({problem})") from None
        half = size // 2
        return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).numpy().astype(np.float32)

    def _scale(self, x: View, factors: NDArray[Any], name: str, y: View) -> View:
        view = self.build.weight(name, Array(factors.astype(np.float32)))
        spread = View(view.buffer, x.shape, (Dim(0), ONE))
        return self.build.step("elementwise", (x, spread), y, function="mul")

    def _norm(self, x: View, name: str, y: View) -> View:
        weight = self.build.weight(f"eagle.{name.removesuffix('.weight')}", self._source(name))
        return self.build.step("norm", (x, weight, None), y, epsilon=self.eagle.epsilon, kind="rms", offset=0.0)

    def _share(self, views: Sequence[View | None]) -> None:
        names = [view.buffer.name for view in views if view is not None]
        self.shared |= {name: self._model.weights[name] for name in names}

    def _source(self, name: str) -> WeightSource:
        return self.eagle.tensors[name]

    def _bias(self, name: str) -> View | None:
        tensor = self.eagle.tensors.get(name)
        return None if tensor is None else self.build.weight(f"eagle.{name}", tensor)

    def _joined(self, *names: str) -> WeightSource:
        return Concat(tuple(self._source(f"{name}.weight") for name in names))


def _halves(size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """``index`` and ``sign`` of a rope that turns the two halves against each other."""
    half, out = size // 2, np.arange(size)
    index = np.stack([out, out % half, (out + half) % size, half + out % half])
    sign = np.stack([np.ones(size), np.where(out < half, -1.0, 1.0)])
    return index.astype(np.int32), sign.astype(np.float32)
