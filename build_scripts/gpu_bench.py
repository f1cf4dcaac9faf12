"""What gpu_check.py measures: our kernels in turns with torch, beside ceilings measured on the same machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from attention_cuda import PLAIN, Pool, Rows
from contract import call_of, launches_of
from gpu import Gpu, arch_of, device

from llmc.plugins.cuda import SM_90A, Launch
from llmc.plugins.linear import cuda_packing as plain
from llmc.plugins.quantized_linear import cuda_packing as quantized

ROUNDS = 5
CACHE_BYTES = 128 << 20
"""More than the second cache of any chip: what is measured begins anew behind so many bytes."""


@dataclass(frozen=True)
class Sizes:
    """Of what is measured. ``repeats``: of each kernel in one measurement."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    context: int = 32768
    batch: int = 8
    prompt: int = 4096
    copy: int = 1 << 30
    square: int = 8192
    layers: int = 16
    model: int = 2048
    vocabulary: int = 32000
    tokens: int = 128
    repeats: int = 20


SMALL = Sizes(64, 96, 4, 2, 16, 40, 2, 24, 1 << 12, 32, 1, 64, 67, 4, 2)
"""For the stand-in driver: figures mean nothing there."""


@dataclass(frozen=True)
class Row:
    """A figure. ``of``: the share of the ceiling; ``ratio``: speed of ours over that of the peer."""

    name: str
    seconds: float
    value: float
    unit: str
    ceiling: str = ""
    of: float = 0.0
    peer: str = ""
    ratio: float = 0.0


class Bench:
    """``where``: torch's device. ``compiled``: torch.compile, or what leaves functions as they are."""

    def __init__(self, sizes: Sizes, where: str = "cuda", compiled: Callable[..., Any] = torch.compile) -> None:
        self.sizes, self.where, self.compiled = sizes, where, compiled
        self.gpu, self.rng = Gpu(), np.random.default_rng(1)
        self.ceilings: dict[str, float] = {}

    def rows(self) -> Iterator[Row]:
        """All figures, one after the other."""
        yield from self._ceilings()
        yield from self._products()
        for part in (self._decode, self._prefill):
            yield part()
            self.gpu.free()
        yield self._model()

    def _turns(self, *functions: Callable[[], Any]) -> list[float]:
        """The best seconds of each, measured in turns."""
        best = [float("inf")] * len(functions)
        for round_number in range(ROUNDS + 1):
            for place, function in enumerate(functions):
                self._wait()
                start = time.perf_counter()
                function()
                self._wait()
                if round_number:  # the first one compiles and warms up
                    best[place] = min(best[place], time.perf_counter() - start)
        return best

    def _wait(self) -> None:
        device().sync()
        if self.where == "cuda":
            torch.cuda.synchronize()

    def _replayed(self, launches: Sequence[Launch]) -> Callable[[], None]:
        device().run(launches)
        device().sync()
        graph = device().capture(launches)
        return lambda: device().replay(graph)

    def _repeated(self, function: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(self.sizes.repeats):
                function()

        return run

    def _row(self, name: str, found: Sequence[float], work: float, ceiling: str, peer: str = "") -> Row:
        """``work``: bytes or operations of one repeat."""
        ours = found[0] / self.sizes.repeats
        ratio = found[1] / found[0] if len(found) > 1 else 0.0
        unit = "GB/s" if ceiling == "copy" else "TFLOP/s"
        value = work / ours / (1e9 if unit == "GB/s" else 1e12)
        self.ceilings.setdefault(ceiling, value)
        return Row(name, ours, value, unit, ceiling, value / self.ceilings[ceiling], peer, ratio)

    def _ceilings(self) -> Iterator[Row]:
        source = torch.zeros(self.sizes.copy, dtype=torch.uint8, device=self.where)
        target = torch.empty_like(source)
        found = self._turns(self._repeated(lambda: target.copy_(source)))
        yield self._row("ceiling: copy (torch)", found, 2 * self.sizes.copy, "copy")
        n = self.sizes.square
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.where) for _ in range(2))
        yield self._row("ceiling: bf16 matmul (torch)", self._turns(self._repeated(lambda: a @ b)), 2 * n**3, "matmul")

    def _products(self) -> Iterator[Row]:
        n, k = self.sizes.inner, self.sizes.hidden
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=self.where)
        times: dict[tuple[str, int], float] = {}
        for rows in (1, 16, self.sizes.prompt):
            x = torch.randn(rows, k, dtype=torch.bfloat16, device=self.where)
            wide = ("bf16 wgmma", "int4 wgmma", "fp8 wgmma") if device().capability == 90 else ()
            for format in ("bf16", "int4", *wide):
                launches, size = self._product(format, rows, n, k)
                product = self.compiled(lambda x, weight: x @ weight.T)
                found = self._turns(self._replayed(launches), self._repeated(lambda p=product, x=x: p(x, weight)))
                times[format, rows] = found[0]
                self.gpu.free()
                name = f"{format} product, {rows} x {k} x {n}"
                name += f" ({times['bf16', rows] / found[0]:.2f} x bf16)" if format != "bf16" else ""
                few = rows <= 16
                work = size + 2 * rows * (n + k) if few else 2 * rows * n * k
                yield self._row(name, found, work, "copy" if few else "matmul", "compiled bf16 matmul")

    def _product(self, format: str, rows: int, n: int, k: int) -> tuple[list[Launch], int]:
        """Launches that read other copies of a weight each time, and its bytes."""
        capability = SM_90A if format.endswith(" wgmma") else device().capability
        format = format.removesuffix(" wgmma")
        if format == "bf16":
            op, attributes, shape = "linear", {}, plain.layout(n, k).shape
            arrays: list[Any] = [self._numbers(*shape)]
        else:
            group, compute = (0, "fp8") if format == "fp8" else (32, "bfloat16")
            op, attributes = "quantized_linear", {"format": format, "group": group, "compute": compute, "x_group": 0}
            shape = quantized.layout(format, group, compute, 0, n, k, capability).shape
            scale = (self.rng.random(quantized.scale_shape(n, k, group)) / 100).astype(np.float16)
            arrays = [self.rng.integers(0, 256, shape, np.uint8), scale]
        size = sum(array.nbytes for array in arrays)
        copies = [[self.gpu.tensor(a) for a in arrays] for _ in range(1 + CACHE_BYTES // size)]
        x, y = self.gpu.tensor(self._numbers(rows, k)), self.gpu.empty((rows, n), "bfloat16")
        inputs = lambda i: (x, *copies[i % len(copies)], *([None, None] if op != "linear" else [None]))  # noqa: E731
        made = (
            launches_of(op, call_of(self.gpu, inputs(i), (y,), attributes, capability=capability))
            for i in range(self.sizes.repeats)
        )
        return [launch for launches in made for launch in launches], size

    def _numbers(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    def _attention(self, past: int, new: int, batch: int) -> Callable[[], None]:
        heads, s = (self.sizes.kv_heads, self.sizes.dim, self.sizes.dim), self.sizes
        attributes = PLAIN | {"scale": s.dim**-0.5}
        pool = Pool(self.gpu, heads, "bfloat16", [past + new] * batch, attributes=attributes)
        q, k = self._numbers(max(past, new), s.heads, s.dim), self._numbers(max(past, new), s.kv_heads, s.dim)
        for sequence in range(batch if past else 0):
            pool.store([Rows(sequence, 0, q[:past], k[:past], k[:past])])
        launches, _ = pool.launches([Rows(i, past, q[:new], k[:new], k[:new]) for i in range(batch)])
        return self._replayed(launches * s.repeats)

    def _heads(self, batch: int, queries: int, keys: int) -> list[torch.Tensor]:
        s = self.sizes
        sizes = ((s.heads, queries), (s.kv_heads, keys), (s.kv_heads, keys))
        return [torch.randn(batch, h, n, s.dim, dtype=torch.bfloat16, device=self.where) for h, n in sizes]

    def _decode(self) -> Row:
        s = self.sizes
        q, k, v = self._heads(s.batch, 1, s.context)
        peer = self._repeated(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        found = self._turns(self._attention(s.context - 1, 1, s.batch), peer)
        size = s.batch * s.context * s.kv_heads * s.dim * 4
        return self._row(f"decode attention, {s.batch} x {s.context} keys", found, size, "copy", "SDPA")

    def _prefill(self) -> Row:
        s = self.sizes
        q, k, v = self._heads(1, s.prompt, s.prompt)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        peer = self._repeated(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True))
        found = self._turns(self._attention(0, s.prompt, 1), peer)
        work = 2 * s.heads * s.dim * s.prompt**2
        return self._row(f"prefill attention, {s.prompt} tokens", found, work, "matmul", "SDPA")

    def _model(self) -> Row:
        """Decode of one sequence by a model of random weights, beside transformers with a static cache."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from llmc import LLM, SamplingParams
        from llmc.compiler.api import build_engine
        from llmc.compiler.config import BuildConfig

        s = self.sizes
        config = LlamaConfig(
            vocab_size=s.vocabulary, hidden_size=s.model, intermediate_size=4 * s.model, num_hidden_layers=s.layers,
            num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, max_position_embeddings=512,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(Path(folder) / "model")
            target = f"cuda:{arch_of(device().capability)}"
            options = BuildConfig(target=target, dtype="bfloat16", max_batch_tokens=32, max_sequences=1)
            build_engine(Path(folder) / "model", Path(folder) / "engine", options)
            llm = LLM(Path(folder) / "engine")
            prompt = [5 + i for i in range(16)]
            params = SamplingParams(max_tokens=s.tokens, temperature=0, ignore_eos=True)
            model.to(self.where)
            if self.where == "cuda":
                model.forward = self.compiled(model.forward, mode="reduce-overhead", fullgraph=True)
            ids = torch.tensor([prompt], device=self.where)
            length = {"max_new_tokens": s.tokens, "min_new_tokens": s.tokens, "do_sample": False}
            peer = lambda: model.generate(ids, cache_implementation="static", **length)  # noqa: E731
            ours, theirs = self._turns(lambda: llm.generate([prompt], params), peer)
            llm.close()
        name = f"decode of a Llama of {s.layers} layers, {s.model} wide"
        return Row(
            name, ours / s.tokens, s.tokens / ours, "tokens/s", "", 0.0, "transformers, static cache", theirs / ours
        )
