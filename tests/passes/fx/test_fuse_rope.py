from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from llmc.passes.fx.fuse_rope import FuseRope

Spell = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q [1, H, T, 16], k [1, 2, T, 16], cos [1, T, 16], sin, angles [1, T, 8]) -> rotated q and k"""


class Model(nn.Module):
    """Four query heads and two key heads of 16, rotated; stands in for an attention layer."""

    def __init__(self, spell: Spell, scale: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 32)
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(8) / 8), persistent=False)
        self.spell, self.scale = spell, scale

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids)
        q = self.q(x).view(1, -1, 4, 16).transpose(1, 2)
        k = self.k(x).view(1, -1, 2, 16).transpose(1, 2)
        angles = position_ids[:, :, None].float() * self.inv_freq[None, None, :]
        both = torch.cat((angles, angles), -1)
        q, k = self.spell(q, k, both.cos() * self.scale, both.sin() * self.scale, angles)
        return q.transpose(1, 2).tanh(), k.transpose(1, 2).tanh()


def half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q, k, cos, sin)


def interleaved_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return glm4(q, k, cos[..., :8], sin[..., :8])


def permuted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary_pos_emb_interleave(q, k, cos, sin)


def complex_numbers(q: Tensor, k: Tensor, _: Tensor, __: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary_emb(q, k, torch.polar(torch.ones_like(angles), angles))


def partial_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    rotated = llama(q[..., :12], k[..., :12], cos[..., :12], sin[..., :12])
    return torch.cat((rotated[0], q[..., 12:]), -1), torch.cat((rotated[1], k[..., 12:]), -1)


def scaled_by_position(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    q, k = llama(q, k, cos, sin)
    return q * (1 + torch.log1p(torch.floor(angles[..., :1] / 8)))[:, None], k


def by_matrix(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    turn = torch.zeros(16, 16)
    turn[torch.arange(8) + 8, torch.arange(8)] = -1
    turn[torch.arange(8), torch.arange(8) + 8] = 1
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + (q @ turn) * sin, k * cos + (k @ turn) * sin


SPELLINGS = [half, interleaved_partial, permuted, complex_numbers, partial_half, scaled_by_position, by_matrix]


def names(module: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("spell", SPELLINGS, ids=lambda f: f.__name__)
def test_finds_every_spelling(spell: Spell, export, run) -> None:
    module = export(Model(spell, scale=1.2))
    before = run(module)
    assert FuseRope()(module)
    assert names(module).count("llmc.rope.default") == 2
    assert not any(word in name for name in names(module) for word in ("cos", "sin", "mul", "cat", "complex"))
    for a, b in zip(run(module), before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert not FuseRope()(module), "a second run changes nothing"


def test_tables_are_compact_and_shared(export) -> None:
    module = export(Model(half))
    FuseRope()(module)
    tables = {name: b for name, b in module.named_buffers() if name.startswith("rope_")}
    assert {name: tuple(b.shape) for name, b in tables.items()} == {
        "rope_table_0": (300, 16),
        "rope_index_0": (4, 16),
        "rope_sign_0": (2, 16),
    }
    angles = torch.arange(300)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    torch.testing.assert_close(tables["rope_table_0"], torch.cat((angles.cos(), angles.sin()), 1))
    assert tables["rope_index_0"][0].tolist() == list(range(16))
    assert tables["rope_index_0"][2].tolist() == [*range(8, 16), *range(8)]
    assert tables["rope_sign_0"].tolist() == [[1.0] * 16, [-1.0] * 8 + [1.0] * 8]


def two_tensors(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return q[:, :2] * cos[:, None] + k * sin[:, None], k


def test_a_sum_of_two_tensors_is_two_regions(export, run) -> None:
    module = export(Model(two_tensors))
    before = run(module)
    FuseRope()(module)
    assert names(module).count("llmc.rope.default") == 2
    for a, b in zip(run(module), before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_keeps_the_modules_of_what_it_replaces(export) -> None:
    module = export(Model(half))
    FuseRope()(module)
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
            assert "nn_module_stack" in node.meta or node.args[0].name == "position_ids", node


def added_position(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return q + cos[:, None], k - sin[:, None]


def not_linear(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return cos[:, None] / q, torch.atan2(k, sin[:, None])


def no_position(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat((-q[..., 8:], q[..., :8]), -1) * 0.5, k


def across_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos[:, None] + q.flip(1) * sin[:, None], k


def unlike_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos[:, None] * torch.arange(1, 5)[None, :, None, None], k


def three_terms(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos[:, None] + q.roll(1, -1) * sin[:, None] + q.roll(2, -1), k


@pytest.mark.parametrize(
    "spell",
    [added_position, not_linear, no_position, across_heads, unlike_heads, three_terms],
    ids=[
        "rule 1: a sum",
        "rule 1: a divisor",
        "rule 1: no position",
        "rule 3: heads",
        "rule 3: unlike",
        "rule 3: terms",
    ],
)
def test_leaves_near_misses_alone(spell: Spell, export) -> None:
    module = export(Model(spell))
    before = names(module)
    assert not FuseRope()(module)
    assert names(module) == before
