"""Trains heads on features: AdamW, a cosine schedule, and a loss over some of the vocabulary (arXiv:2401.10774)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmc.compiler.medusa.collect import Features, write_whole
from llmc.compiler.medusa.output_layer import OutputLayer
from llmc.compiler.medusa.settings import STATE, HeadTraining
from llmc.compiler.progress import Progress
from llmc.errors import CompileError
from llmc.plugins import kernels

SAVE_SECONDS = 60.0
WARM_UP = 0.03
"""The share of the training in which the learning rate rises."""

LOSS_ROWS = 256
"""Rows whose logits are in memory at once."""

TOP = (1, 5)
"""Accuracy: whether the token is among so many."""

EVALUATED, EVALUATED_LAST = 1024, 8192
"""Held-out rows that accuracy is measured on, in between and at the end."""

BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclass
class Trained:
    """Weights [K, L, H, H] and biases [K, L, H] of the heads, what they make of tokens [K, H, E], what is known."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    token: NDArray[np.float32] | None
    steps: int
    loss: float
    accuracy: list[dict[str, float]] = field(default_factory=list)
    """Of each head, on the held-out texts: {"top1": ..., "top5": ...}."""


def train_heads(
    features: Features,
    output: OutputLayer,
    table: NDArray[np.float32] | None,
    settings: HeadTraining,
    folder: Path,
    share_of_time: Callable[[], float],
    kept: Callable[[], None],
    progress: Progress,
) -> Trained:
    """Train, going on from the state in the folder if there is one.

    Args:
        features: texts that the model wrote.
        output: its output layer, which stays as it is.
        table: the embeddings [V, E] of its tokens, if heads are to see them.
        settings: how.
        folder: where the state is kept.
        share_of_time: the part of the time for training that has passed, 1 at its end; 0 if there is no limit.
        kept: called when the state was saved.
        progress: told how far it is, and the accuracy now and then.

    Raises:
        CompileError: there is nothing to learn from, or the loss is not finite.
    """
    return _Training(features, output, table, settings, folder, progress).run(share_of_time, kept)


class _Training:
    def __init__(
        self,
        features: Features,
        output: OutputLayer,
        table: NDArray[np.float32] | None,
        settings: HeadTraining,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._settings, self._folder, self._progress = settings, folder, progress
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        quick = self._device.type == "cuda" or "avx512bf16" in kernels.isas()
        self._dtype = torch.bfloat16 if quick else torch.float32
        targets = features.targets(settings.heads)
        texts = int(features.texts[-1]) + 1
        held = max(1, round(texts * settings.held_out))
        useful = targets[:, 0] >= 0
        self._rows = torch.from_numpy(features.rows.view(np.int16)).view(torch.bfloat16)
        self._targets = torch.from_numpy(targets)
        self._learnt = np.flatnonzero(useful & (features.texts < texts - held))
        self._held = np.flatnonzero(useful & (features.texts >= texts - held))
        if not len(self._learnt) or not len(self._held):
            raise CompileError(
                "the texts that the model wrote are too short to learn from; use more, or another prompt"
            )
        self._full = self._put(output.weight)
        self._full_bias = None if output.bias is None else self._put(output.bias)
        self._choose_candidates(targets, len(output.weight))
        hidden = self._rows.shape[1]
        self._parameters = {
            "weight": self._zeros(settings.heads, settings.layers, hidden, hidden),
            "bias": self._zeros(settings.heads, settings.layers, hidden),
        }
        if table is not None:
            self._tokens, self._root = torch.from_numpy(features.tokens), float(np.sqrt(np.mean(table**2))) or 1.0
            self._table = self._put(table / self._root)  # of size 1, as rates suit what comes out of norms
            self._parameters["token"] = self._zeros(settings.heads, hidden, table.shape[1])
        self._optimizer = torch.optim.AdamW(list(self._parameters.values()), betas=BETAS, eps=EPSILON, weight_decay=0.0)
        self._per_epoch = math.ceil(len(self._learnt) / settings.batch)
        self._total = self._per_epoch * settings.epochs
        self._loss = math.nan

    def run(self, share_of_time: Callable[[], float], kept: Callable[[], None]) -> Trained:
        settings, progress = self._settings, self._progress
        step = self._load()
        progress.step("training heads", self._total, "steps")
        progress.advance(step)
        saved = time.monotonic()
        order, epoch = None, -1
        while step < self._total and (share := max(step / self._total, share_of_time())) < 1:
            if step // self._per_epoch != epoch:
                epoch = step // self._per_epoch
                order = np.random.default_rng((settings.seed, epoch)).permutation(self._learnt)
            assert order is not None, "made above"
            begin = step % self._per_epoch * settings.batch
            self._learn(order[begin : begin + settings.batch], share)
            step += 1
            progress.advance(1)
            if time.monotonic() - saved > SAVE_SECONDS:
                self._save(step)
                kept()
                progress.note(f"step {step}: loss {self._loss:.3f}; {_text(self._accuracy(EVALUATED))}")
                saved = time.monotonic()
        self._save(step)
        progress.step("measuring the heads")
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in self._parameters.items()}
        token = np.float32(1 / self._root) * arrays["token"] if "token" in arrays else None
        accuracy = self._accuracy(EVALUATED_LAST)
        return Trained(arrays["weight"], arrays["bias"], token, step, self._loss, accuracy)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self._device, requires_grad=True)

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, self._dtype)

    def _choose_candidates(self, targets: NDArray[np.int64], vocabulary: int) -> None:
        """The tokens that the loss is over, and the targets as numbers of these."""
        used = np.unique(targets[targets >= 0])
        others = np.setdiff1d(np.arange(vocabulary), used)
        more = max(0, (self._settings.candidates or vocabulary) - len(used))
        drawn = np.random.default_rng(self._settings.seed).permutation(others)[:more]
        candidates = np.sort(np.concatenate([used, drawn]))
        numbers = np.full(vocabulary + 1, -1, np.int64)  # the last one is for -1
        numbers[candidates] = np.arange(len(candidates))
        self._numbers = torch.from_numpy(numbers[targets])
        chosen = torch.from_numpy(candidates).to(self._device)
        self._some = self._full[chosen].contiguous()
        self._some_bias = None if self._full_bias is None else self._full_bias[chosen]

    def _heads(self, index: Tensor) -> Tensor:
        """[heads, rows, H]: what each head gives to the output layer at these places."""
        rows, parameters = self._rows[index].to(self._device), self._parameters
        x = rows.float().expand(self._settings.heads, *rows.shape)
        if "token" in parameters:
            seen = self._table[self._tokens[index].to(self._device)].float().expand(self._settings.heads, -1, -1)
            x = torch.baddbmm(x, seen, parameters["token"].transpose(1, 2))
        for layer in range(self._settings.layers):
            y = torch.baddbmm(parameters["bias"][:, layer, None], x, parameters["weight"][:, layer].transpose(1, 2))
            x = x + torch.nn.functional.silu(y)
        return x

    def _learn(self, chosen: NDArray[np.int64], share: float) -> None:
        settings = self._settings
        rate = settings.learning_rate * min(1.0, (share + 1e-3) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        index = torch.from_numpy(chosen)
        hidden = self._heads(index).flatten(0, 1)
        targets = self._numbers[index].T.reshape(-1).to(self._device)
        factors = torch.tensor([settings.decay**i for i in range(settings.heads)], device=self._device)
        weights = factors.repeat_interleave(len(index)) / len(index)
        known = targets >= 0
        loss = _Loss.apply(  # type: ignore[no-untyped-call]
            hidden[known], targets[known], weights[known], self._some, self._some_bias
        )
        self._loss = float(loss.detach())
        if not math.isfinite(self._loss):
            raise CompileError("the loss is not finite any more; use a lower --learning-rate")
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def _accuracy(self, most: int) -> list[dict[str, float]]:
        """Of each head on held-out rows, over the whole vocabulary."""
        step = max(1, len(self._held) // most)
        held = torch.from_numpy(self._held[::step][:most])
        hits = np.zeros((self._settings.heads, len(TOP)))
        counts = np.zeros(self._settings.heads)
        for index in held.split(LOSS_ROWS // 4):
            hidden = self._heads(index).to(self._dtype)
            for head in range(self._settings.heads):
                logits = hidden[head] @ self._full.T
                if self._full_bias is not None:
                    logits += self._full_bias
                targets = self._targets[index, head].to(self._device)
                best = logits.topk(min(TOP[-1], logits.shape[1]), dim=1).indices == targets[:, None]
                counts[head] += int((targets >= 0).sum())
                hits[head] += [int(best[:, :top].sum()) for top in TOP]
        shares = hits / np.maximum(counts, 1)[:, None]
        return [{f"top{top}": round(float(share), 4) for top, share in zip(TOP, row, strict=True)} for row in shares]

    def _save(self, step: int) -> None:
        arrays: dict[str, Any] = {"step": np.int64(step), "loss": np.float64(self._loss)}
        for name, tensor in self._parameters.items():
            arrays[name] = tensor.detach().cpu().numpy()
            state = self._optimizer.state.get(tensor, {})
            arrays |= {f"{name}.{key}": value.cpu().numpy() for key, value in state.items()}
        write_whole(self._folder / STATE, lambda file: np.savez(file, **arrays))

    def _load(self) -> int:
        path = self._folder / STATE
        if not path.exists():
            return 0
        with np.load(path, allow_pickle=False) as arrays:
            for name, tensor in self._parameters.items():
                tensor.data.copy_(torch.from_numpy(arrays[name]))
                keys = [key for key in arrays.files if key.startswith(f"{name}.")]
                state = {key.removeprefix(f"{name}."): torch.from_numpy(arrays[key]) for key in keys}
                if state:
                    self._optimizer.state[tensor] = {
                        key: value if key == "step" else value.to(self._device) for key, value in state.items()
                    }
            self._loss = float(arrays["loss"])
            return int(arrays["step"])


class _Loss(torch.autograd.Function):
    """Cross entropy, weighted and summed; the gradient is made on the way, so that no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weights: Tensor, output: Tensor, bias: Tensor | None
    ) -> Tensor:
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for begin in range(0, len(hidden), LOSS_ROWS):
            part = slice(begin, begin + LOSS_ROWS)
            logits = (hidden[part].to(output.dtype) @ output.T).float()
            if bias is not None:
                logits += bias
            right, factors = targets[part, None], weights[part, None]
            logits -= logits.amax(1, keepdim=True)
            score = logits.gather(1, right)
            sums = logits.exp_().sum(1, keepdim=True)
            total += ((sums.log() - score) * factors).sum()
            logits *= factors / sums
            logits.scatter_add_(1, right, -factors)
            gradient[part] = logits.to(output.dtype) @ output
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[0].to(gradient.dtype), None, None, None, None)


def _text(accuracy: Sequence[dict[str, float]]) -> str:
    """For people: head 1: 41% (top 5: 60%); ... ."""
    return "; ".join(f"head {i}: {a['top1']:.0%} (top 5: {a['top5']:.0%})" for i, a in enumerate(accuracy, 1))
