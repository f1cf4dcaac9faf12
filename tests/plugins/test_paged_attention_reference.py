"""What paged attention means, against torch's attention with masks made by hand, and runs cut in pieces."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmc.plugins.paged_attention.reference import reference
from llmc.plugins.paged_attention.step import Cache, Step

OPTIONS = {"slot": 0, "write": True, "scale": 0.3, "window": 0, "chunk": 0, "softcap": 0.0}
LENGTH = 21


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(rows: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(rows, 4, 8, seed=seed), numbers(rows, 2, 8, seed=seed + 1), numbers(rows, 2, 6, seed=seed + 2)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return reference(q, k, v, options.pop("sinks", None), options.pop("slopes", None), **OPTIONS | options)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    return out.transpose(0, 1)


def i_and_j() -> tuple[Tensor, Tensor]:
    position = torch.arange(LENGTH)
    return position[:, None], position[None, :]


MASKS = {
    "causal": ({}, lambda i, j: j <= i),
    "window": ({"window": 4}, lambda i, j: (j <= i) & (i - j < 4)),
    "window of one": ({"window": 1}, lambda i, j: i == j),
    "chunk": ({"chunk": 5}, lambda i, j: (j <= i) & (i // 5 == j // 5)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    options, mask = MASKS[name]
    q, k, v = inputs()
    expected = torch_attention(q, k, v, mask(*i_and_j()))
    torch.testing.assert_close(attend(q, k, v, **options), expected)


def test_constants_of_keys_and_values_change_nothing() -> None:
    """What the cache may lack, in float64: softmax(q.(k - c)) = softmax(q.k), and weights add up to 1."""
    q, k, v = inputs()
    key_center, key_scale = 50 * numbers(2, 8, seed=5), numbers(2, 8, seed=6).exp()
    value_center, value_scale = 50 * numbers(2, 6, seed=7), numbers(2, 6, seed=8).exp()
    turned = attend(
        q / key_scale.repeat_interleave(2, 0), (k - key_center) * key_scale, (v - value_center) * value_scale
    )
    found = turned / value_scale.repeat_interleave(2, 0) + value_center.repeat_interleave(2, 0)
    torch.testing.assert_close(found, attend(q, k, v), rtol=1e-11, atol=1e-11)
    constants = [x.clone() for x in (key_center, key_scale, value_center, value_scale)]
    torch.testing.assert_close(reference(q, k, v, None, None, *constants, **OPTIONS), attend(q, k, v))


def test_alibi_is_added_to_the_scaled_scores() -> None:
    q, k, v = inputs()
    i, j = i_and_j()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    bias = (slopes[:, None, None] * (j - i)).masked_fill(j > i, float("-inf"))
    torch.testing.assert_close(attend(q, k, v, slopes=slopes), torch_attention(q, k, v, bias))


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    q, k, v = inputs()
    sinks = numbers(4)
    extended = attend(q, k, v, sinks=sinks)
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) * 0.3
    scores = scores.masked_fill(~(i_and_j()[1] <= i_and_j()[0]), float("-inf"))
    share = scores.exp().sum(-1) / (scores.exp().sum(-1) + sinks.exp()[:, None])
    torch.testing.assert_close(extended, attend(q, k, v) * share.T[:, :, None])


def test_softcap_bounds_the_scores() -> None:
    q, k, v = inputs()
    hard = attend(q * 1000, k, v, softcap=1e-9)
    mean = torch.stack([v.repeat_interleave(2, 1)[: i + 1].mean(0) for i in range(LENGTH)])
    torch.testing.assert_close(hard, mean)
    torch.testing.assert_close(attend(q, k, v, softcap=1e9), attend(q, k, v))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("cuts", [(21,), (1,) * 21, (16, 5), (7, 1, 1, 12)])
def test_pieces_equal_the_whole(name: str, cuts: tuple[int, ...]) -> None:
    q, k, v = inputs()
    cache: Cache = {}
    pieces = []
    for a, b, c in zip(*(x.split(list(cuts)) for x in (q, k, v)), strict=True):
        with Step(((7, len(a)),), cache):
            pieces.append(attend(a, b, c, **MASKS[name][0]))
    torch.testing.assert_close(torch.cat(pieces), attend(q, k, v, **MASKS[name][0]))


def test_packed_sequences_do_not_see_each_other() -> None:
    first, second = inputs(5), inputs(9, seed=10)
    with Step((("a", 5), ("b", 9))):
        both = attend(*(torch.cat(pair) for pair in zip(first, second, strict=True)))
    torch.testing.assert_close(both, torch.cat([attend(*first), attend(*second)]))


def test_slots_are_apart_and_may_be_shared() -> None:
    q, k, v = inputs(3)
    cache: Cache = {}
    with Step((("a", 3),), cache):
        written = attend(q, k, v, slot=4)
        shared = attend(q, k * 0, v * 0, slot=4, write=False)
    assert set(cache) == {(4, "a")}
    torch.testing.assert_close(shared, written)
    with Step((("a", 3),), cache), pytest.raises(AssertionError, match="slot 5 is read before it is written"):
        attend(q, k, v, slot=5, write=False)


@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=["causal", "window"])
def test_a_row_of_a_tree_sees_its_ancestors(options: dict[str, Any]) -> None:
    """Two branches behind row 0: rows 1, 3 and rows 2, 4. Each path equals the path alone."""
    past, tree = inputs(6), inputs(5, seed=20)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    mask = np.array([[0b00001], [0b00011], [0b00101], [0b01011], [0b10101]], np.uint64)
    cache: Cache = {}
    with Step((("a", 6),), cache):
        attend(*past, slopes=slopes, **options)
    with Step((("a", 5),), dict(cache), mask):
        together = attend(*tree, slopes=slopes, **options)
    for path in ([0, 1, 3], [0, 2, 4]):
        with Step((("a", 3),), dict(cache)):
            alone = attend(*(x[path] for x in tree), slopes=slopes, **options)
        torch.testing.assert_close(together[path], alone)


def test_lengths_have_to_add_up() -> None:
    with Step((("a", 2),)), pytest.raises(AssertionError, match="sequences have 2 rows, the inputs 3"):
        attend(*inputs(3))
