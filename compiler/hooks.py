"""What transformers calls while a model is traced: attention, masks and experts become ``llmc::`` ops."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmc.compiler.probe import ExpertFunction, expert_function
from llmc.compiler.torch_ops import register_ops
from llmc.errors import CompileError

NAME = "llmc"
"""The attention and experts implementation that the hooks are registered as."""

UNLIMITED = 1 << 30
"""A window or chunk of this size is none; it stands for a window that the config leaves out."""

_OWN_ATTENTION = (
    "it computes attention by itself and not through the attention interface of transformers; such a family needs a "
    "fix in compiler/families"
)
_MASKS = {
    "create_bidirectional_mask": "bidirectional",
    "create_causal_mask": "causal",
    "create_sliding_window_causal_mask": "sliding",
    "create_chunked_causal_mask": "chunked",
}
_HARMLESS = frozenset(
    ("position_ids", "output_attentions", "output_hidden_states", "output_router_logits", "use_cache", "cache_position")
) | {"position_embeddings", "dropout", "training", "deterministic", "num_items_in_batch", "logits_to_keep"}


@contextmanager
def installed() -> Iterator[None]:
    """Register the hooks; within, transformers doesn't look for packed sequences, which are the runtime's business."""
    register_ops()
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None):
        yield


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention: q [1, H, T, D], k and v [1, Hkv, T, ...] -> [1, T, H, Dv]. For hooks and family fixes.

    The KV slot is numbered later, in the order of the calls in the graph.
    """
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.dim() != 4 or x.shape[0] != 1:
            raise CompileError(f"attention: the {name} has shape {tuple(x.shape)}; expected [1, heads, tokens, size]")
    if str(q.shape[2]) != str(k.shape[2]) or str(k.shape[2]) != str(v.shape[2]):
        raise CompileError(
            f"attention: {q.shape[2]} queries on {k.shape[2]} keys; cross attention and caches of the model's own are "
            "not supported"
        )
    out: Tensor = torch.ops.llmc.paged_attention(
        *(x.squeeze(0).transpose(0, 1) for x in (q, k, v)),
        sinks,
        slopes,
        slot=0,
        write=True,
        scale=float(scale),
        window=window if window < UNLIMITED else 0,
        chunk=chunk if chunk < UNLIMITED else 0,
        softcap=float(softcap),
    )
    return out.unsqueeze(0)


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    function: ExpertFunction,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Experts: x [T, H], ids and weights [T, K], gate_up [E, 2I, H], down [E, H, I] -> [T, H]. See llmc::moe."""
    tensors = (x, ids, weights, gate_up, down, gate_up_bias, down_bias)
    y: Tensor = torch.ops.llmc.moe(*tensors, **function.attributes())
    return y


class AllTokens:
    """Stands in for the indices that sparse attention attends to, where these are all tokens that there can be."""


class _OwnAttentionError(CompileError, AttributeError):
    """A model treats its mask as a tensor; ``hasattr`` on a mask is false all the same."""


@dataclass(frozen=True)
class Mask:
    """Stands in for a mask tensor: says which mask the model asked for, and flows to the attention hook unchanged."""

    kind: str
    """causal, sliding, chunked or bidirectional; the last may be made (decoders make one for an encoder that they don't
    have), but not used."""
    reach: int = 0
    """Size of the window or chunk."""

    @property
    def window(self) -> int:
        """Size of the sliding window, or 0. Raises CompileError if the mask is not causal."""
        return self._reach_of("sliding")

    @property
    def chunk(self) -> int:
        """Size of the chunks, or 0. Raises CompileError if the mask is not causal."""
        return self._reach_of("chunked")

    def _reach_of(self, kind: str) -> int:
        if self.kind == "bidirectional":
            raise CompileError("attention to later tokens (no causal mask) is not supported")
        return self.reach if self.kind == kind else 0

    def __getitem__(self, index: Any) -> Mask:  # some models cut the mask to the number of keys
        return self

    def to(self, *_: Any, **__: Any) -> Mask:
        """Itself: it has no dtype and no device."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise _OwnAttentionError(_OWN_ATTENTION)

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Refuse arithmetic with the mask."""
        raise CompileError(_OWN_ATTENTION)


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> Mask:
    """The mask hook. Who asks says which mask it is: sliding and chunked both come with ``local_size``."""
    caller = sys._getframe(1)
    name = caller.f_code.co_name
    if name not in _MASKS:
        raise CompileError(f"attention mask: {name} is not supported; only {', '.join(_MASKS)} are")
    custom = ("or_mask_function", "and_mask_function", "block_sequence_ids", "packed_sequence_mask")
    for argument in custom:
        if caller.f_locals.get(argument) is not None:
            raise CompileError(f"attention mask: the model gives {name} a mask of its own ({argument}), not supported")
    kind = _MASKS[name]
    return Mask(kind if local_size or kind == "bidirectional" else "causal", int(local_size or 0))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention hook. The mask decides on the window, as it does in eager attention."""
    where = type(module).__name__
    if isinstance(others.get("indices"), AllTokens):
        del others["indices"]
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise CompileError(f"{where}: attention with {', '.join(unknown)} is not supported")
    if attention_mask is None:
        if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
            raise CompileError(f"{where}: attention to later tokens (no causal mask) is not supported")
        attention_mask = Mask("sliding" if sliding_window else "causal", int(sliding_window or 0))
    if not isinstance(attention_mask, Mask):
        raise CompileError(f"{where}: attention with a mask of the model's own is not supported")
    out = attend(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=attention_mask.window,
        chunk=attention_mask.chunk,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out, None


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts hook, for every class that has ``use_experts_implementation``."""
    found = expert_function(self)
    gate_up = self.gate_up_proj if self.has_gate else self.up_proj
    gate_up_bias, down_bias = None, None
    if self.has_bias:
        gate_up_bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        down_bias = self.down_proj_bias
    down = self.down_proj
    if self.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    top_k = top_k_index.shape[-1]
    ids, scores = top_k_index.reshape(-1, top_k), top_k_weights.reshape(-1, top_k)
    if not getattr(self, "has_post_expert_norm", False):
        return moe(x, ids, scores, gate_up, down, found, gate_up_bias, down_bias).reshape(hidden_states.shape)
    # A norm of each expert's output: one choice at a time, weighted after the norm.
    y = torch.zeros_like(x)
    for one_id, score in zip(ids.split(1, 1), scores.split(1, 1), strict=True):
        one = moe(x, one_id, torch.ones_like(score), gate_up, down, found, gate_up_bias, down_bias)
        y = y + self.post_expert_norm(one) * score
    return y.reshape(hidden_states.shape)
