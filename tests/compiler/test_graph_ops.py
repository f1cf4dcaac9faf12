"""Every converter gives the numbers of torch, run by ONNX's reference implementation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from exported import program_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from llmc.compiler.graph import emit
from llmc.compiler.reference_run import run_graph

Case = Callable[["Model", Tensor, Tensor], Tensor]
"""(model, x [T, 6], ids [T, 3] in 0..5) -> y [T, ...]"""


class Model(nn.Module):
    """The results of all cases side by side."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cases = nn.Embedding(32, 6), cases
        self.w, self.v = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.rand(6) + 0.5)
        self.batched, self.table = nn.Parameter(torch.randn(1, 6, 4)), nn.Parameter(torch.randn(9, 5))
        self.experts = nn.Parameter(torch.randn(3, 6, 4))
        self.register_buffer("edges", torch.tensor([-1.0, -0.2, 0.3, 1.1]), persistent=False)
        self.widths: list[int] = []

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = self.embed(input_ids)[0]
        ids = (input_ids[0][:, None] * torch.tensor([1, 5, 7])) % 6
        parts = [case(self, x, ids) for case in self.cases]
        parts = [part.float().reshape(x.shape[0], -1) for part in parts]
        self.widths = [int(part.shape[1]) for part in parts]
        return torch.cat(parts, -1)[logit_rows][None]


def on_x(name: str) -> Case:
    function = getattr(torch, name, None) or getattr(F, name)
    return lambda m, x, ids: function(x)


def on_positive(name: str) -> Case:
    function = getattr(torch, name)
    return lambda m, x, ids: function(x.abs() + 0.1)


UNARY = {
    name: on_x(name)
    for name in (
        *(
            "neg",
            "abs",
            "exp",
            "sin",
            "cos",
            "tan",
            "tanh",
            "sigmoid",
            "erf",
            "erfc",
            "sign",
            "relu",
            "expm1",
            "square",
        ),
        *(
            "floor",
            "ceil",
            "round",
            "trunc",
            "frac",
            "sinh",
            "cosh",
            "exp2",
            "isnan",
            "isinf",
            "isfinite",
            "logical_not",
        ),
        *("positive", "sgn", "asinh", "sinc"),
    )
} | {name: on_positive(name) for name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal")}
ACTIVATIONS = {
    name: on_x(name)
    for name in (
        *("silu", "gelu", "softplus", "elu", "selu", "celu", "leaky_relu", "relu6", "hardtanh", "hardswish", "mish"),
        *("hardsigmoid", "logsigmoid", "softsign", "tanhshrink", "softshrink", "hardshrink", "glu"),
    )
} | {
    "gelu_tanh": lambda m, x, ids: F.gelu(x, approximate="tanh"),
    "softplus_beta": lambda m, x, ids: F.softplus(x, beta=2.0),
    "prelu": lambda m, x, ids: F.prelu(x, m.v[:1]),
    "threshold": lambda m, x, ids: F.threshold(x, 0.1, -2.0),
    "logit": lambda m, x, ids: torch.logit(torch.sigmoid(x), 0.1),
    "normalize": lambda m, x, ids: F.normalize(x, dim=-1),
    "layer_norm": lambda m, x, ids: F.layer_norm(x, (6,), m.v, m.v),
}
ARITHMETIC: dict[str, Case] = {
    "add": lambda m, x, ids: x + m.v,
    "add_scalar": lambda m, x, ids: 2 + x,
    "add_alpha": lambda m, x, ids: torch.add(x, m.v, alpha=0.5),
    "add_int": lambda m, x, ids: ids + 1,
    "add_mixed": lambda m, x, ids: ids + x[:, :3],
    "add_int_float": lambda m, x, ids: ids * 0.5,
    "add_bool": lambda m, x, ids: (x > 0) + (x < -1),
    "sub": lambda m, x, ids: x - m.v,
    "rsub": lambda m, x, ids: 1.5 - x,
    "rsub_alpha": lambda m, x, ids: torch.rsub(x, m.v, alpha=2),
    "mul": lambda m, x, ids: x * m.v * 3,
    "mul_bool": lambda m, x, ids: (x > 0) * (x < 1),
    "div": lambda m, x, ids: x / m.v,
    "div_int": lambda m, x, ids: ids / 4,
    "div_floor": lambda m, x, ids: torch.div(x, 0.3, rounding_mode="floor"),
    "div_trunc": lambda m, x, ids: torch.div(x, 0.3, rounding_mode="trunc"),
    "div_int_floor": lambda m, x, ids: torch.div(ids - 3, 2, rounding_mode="floor"),
    "div_int_trunc": lambda m, x, ids: torch.div(ids - 3, 2, rounding_mode="trunc"),
    "floor_divide": lambda m, x, ids: (ids - 3) // 2,
    "floor_divide_float": lambda m, x, ids: x // 0.4,
    "remainder": lambda m, x, ids: x % 0.7,
    "remainder_int": lambda m, x, ids: (ids - 3) % 4,
    "fmod": lambda m, x, ids: torch.fmod(x, 0.7),
    "pow": lambda m, x, ids: x**2 + x**3 + x.abs() ** 0.5 + m.v**x + 2.0**x,
    "pow_int": lambda m, x, ids: ids**2 + 2**ids,
    "maximum": lambda m, x, ids: torch.maximum(x, m.v) + torch.max(x, m.v),
    "minimum": lambda m, x, ids: torch.minimum(x, m.v) + torch.min(x, m.v),
    "addcmul": lambda m, x, ids: torch.addcmul(x, x, m.v, value=0.3),
    "addcdiv": lambda m, x, ids: torch.addcdiv(x, x, m.v, value=0.3),
    "lerp": lambda m, x, ids: torch.lerp(x, m.v, 0.3),
    "hypot": lambda m, x, ids: torch.hypot(x, m.v),
    "xlogy": lambda m, x, ids: torch.xlogy(m.v, x.abs() + 0.1),
    "logaddexp": lambda m, x, ids: torch.logaddexp(x, m.v),
    "clamp": lambda m, x, ids: x.clamp(-0.5, 0.5) + x.clamp(min=0.1) + x.clamp(max=0.2),
    "clamp_tensor": lambda m, x, ids: torch.clamp(x, m.v * 0.1, m.v),
    "acosh": lambda m, x, ids: torch.acosh(1.1 + x.abs()) + torch.atanh(x.tanh() * 0.9),
    "clamp_int": lambda m, x, ids: ids.clamp(1, 3),
    "casts": lambda m, x, ids: x.int().float() + x.long() + x.bool() + x.double().float() + ids.to(x.dtype)[:, :1],
    "half": lambda m, x, ids: ids.half() + 1,
    "shifts": lambda m, x, ids: (ids << 2) + (ids >> 1),
    "bitwise_not": lambda m, x, ids: ~ids,
}
LOGIC: dict[str, Case] = {
    "eq": lambda m, x, ids: ids == 2,
    "ne": lambda m, x, ids: ids != 2,
    "lt": lambda m, x, ids: x < m.v,
    "le": lambda m, x, ids: ids <= 2.5,
    "gt": lambda m, x, ids: x > 0,
    "ge": lambda m, x, ids: x >= m.v,
    "eq_bool": lambda m, x, ids: (x > 0) == (x < 1),
    "and": lambda m, x, ids: (x > 0) & (x < 1),
    "or": lambda m, x, ids: (x > 0) | (x < -1),
    "xor": lambda m, x, ids: (x > 0) ^ (x < 1),
    "not": lambda m, x, ids: ~(x > 0),
    "logical": lambda m, x, ids: torch.logical_and(x, ids[:, :1]) + torch.logical_or(x > 0, ids[:, :1]),
    "logical_xor": lambda m, x, ids: torch.logical_xor(ids, ids > 2),
    "where": lambda m, x, ids: torch.where(x > 0, x, m.v),
    "where_scalar": lambda m, x, ids: torch.where(x > 0, 1.0, x) + torch.where(x > 0, 1.0, 2.0),
    "masked_fill": lambda m, x, ids: x.masked_fill(x > 0, -5.0),
    "isin": lambda m, x, ids: torch.isin(ids, torch.tensor([1, 4])),
}
LAYOUT: dict[str, Case] = {
    "reshape": lambda m, x, ids: x.reshape(-1, 2, 3).transpose(1, 2),
    "flatten": lambda m, x, ids: x[:, None].expand(-1, 2, -1).flatten(1),
    "unflatten": lambda m, x, ids: x.unflatten(-1, (3, 2))[:, 1:],
    "permute": lambda m, x, ids: x.view(-1, 2, 3).permute(2, 0, 1).permute(1, 0, 2),
    "movedim": lambda m, x, ids: x.view(-1, 1, 2, 3).movedim(1, 3).movedim((1, 2), (2, 1)),
    "swapaxes": lambda m, x, ids: x.view(-1, 2, 3).swapaxes(-1, 1),
    "mT": lambda m, x, ids: x.view(-1, 2, 3).mT,
    "t": lambda m, x, ids: x.t().t(),
    "squeeze": lambda m, x, ids: x[:, None, :, None].squeeze(1).squeeze(),
    "unsqueeze": lambda m, x, ids: x.unsqueeze(-1).unsqueeze(1),
    "expand": lambda m, x, ids: m.v.expand(x.shape[0], 6),
    "expand_as": lambda m, x, ids: m.v.expand_as(x),
    "broadcast_to": lambda m, x, ids: torch.broadcast_to(x[:, None], (x.shape[0], 3, 6)),
    "slice": lambda m, x, ids: x[:, 1:-1:2],
    "narrow": lambda m, x, ids: x.narrow(1, 2, 3),
    "select": lambda m, x, ids: x[:, 2] + x.select(1, -1),
    "diagonal": lambda m, x, ids: x.view(-1, 2, 3).diagonal(1, 1, 2),
    "repeat": lambda m, x, ids: x.repeat(1, 3) + x[:, None].repeat(1, 3, 1).flatten(1),
    "tile": lambda m, x, ids: torch.tile(x, (1, 2)),
    "repeat_interleave": lambda m, x, ids: x.repeat_interleave(3, 1),
    "flip": lambda m, x, ids: x.flip(-1),
    "roll": lambda m, x, ids: x.roll(2, 1) + x.roll(-1, -1),
    "split": lambda m, x, ids: x.split(4, 1)[1],
    "split_sizes": lambda m, x, ids: x.split([1, 2, 3], -1)[2],
    "chunk": lambda m, x, ids: torch.cat(x.chunk(2, -1)[::-1], -1),
    "tensor_split": lambda m, x, ids: x.tensor_split(4, 1)[3],
    "unbind": lambda m, x, ids: torch.stack(x.unbind(1)[::-1], 1),
    "stack": lambda m, x, ids: torch.stack((x, x * 2), -1),
    "hstack": lambda m, x, ids: torch.hstack((x, x * 2)),
    "concat_weights": lambda m, x, ids: x @ torch.cat((m.w, m.w * 2), 1),
    "pad": lambda m, x, ids: F.pad(x, (1, 2), value=3.0),
    "pad_negative": lambda m, x, ids: F.pad(x, (-1, 2)),
    "tril": lambda m, x, ids: x.view(-1, 2, 3).tril() + x.view(-1, 2, 3).triu(1),
    "slice_scatter": lambda m, x, ids: torch.slice_scatter(x, ids.float(), 1, 2, 5),
    "select_scatter": lambda m, x, ids: torch.select_scatter(x, ids[:, 0].float(), 1, -2),
    "meshgrid": lambda m, x, ids: x * torch.meshgrid(m.v, m.v, indexing="ij")[0][1],
    "clone": lambda m, x, ids: F.dropout(x.clone().contiguous().detach(), 0.5, False),
}
REDUCTIONS: dict[str, Case] = {
    "sum": lambda m, x, ids: x.sum(-1, keepdim=True) + x.view(-1, 2, 3).sum((1, 2))[:, None],
    "sum_int": lambda m, x, ids: ids.sum(-1),
    "sum_bool": lambda m, x, ids: (x > 0).sum(-1),
    "mean": lambda m, x, ids: x.mean(-1) + x.view(-1, 2, 3).mean(1).mean(1),
    "prod": lambda m, x, ids: x.prod(1),
    "amax": lambda m, x, ids: x.amax(1) + x.view(-1, 2, 3).amin((1, 2)),
    "max": lambda m, x, ids: torch.cat([part.float() for part in x.max(1, keepdim=True)], 1),
    "min": lambda m, x, ids: x.min(-1).values + x.min(-1).indices,
    "argmax": lambda m, x, ids: x.argmax(-1) + x.argmin(-1, keepdim=True)[:, 0],
    "any": lambda m, x, ids: (x > 1).any(-1) + 2 * (x > -1).all(1),
    "any_middle": lambda m, x, ids: (x.view(-1, 2, 3) > 0.5).any(1, keepdim=True),
    "var": lambda m, x, ids: x.var(-1) + x.var(-1, unbiased=False) + x.var(1, correction=2),
    "std": lambda m, x, ids: x.std(-1, keepdim=True) + x.std(-1, unbiased=False, keepdim=True),
    "var_mean": lambda m, x, ids: torch.var_mean(x, -1)[0] + torch.std_mean(x, -1)[1],
    "norm": lambda m, x, ids: x.norm(dim=-1) + x.norm(p=1, dim=-1) + torch.linalg.norm(x, ord=float("inf"), dim=1),
    "vector_norm": lambda m, x, ids: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "logsumexp": lambda m, x, ids: x.logsumexp(-1),
    "count_nonzero": lambda m, x, ids: torch.count_nonzero(ids, -1),
    "softmax": lambda m, x, ids: x.softmax(-1) + F.softmax(x.view(-1, 2, 3), 1).flatten(1),
    "log_softmax": lambda m, x, ids: F.log_softmax(x, dim=-1),
    "cumsum": lambda m, x, ids: x.cumsum(-1) + ids.cumsum(1).sum(1, keepdim=True),
    "topk": lambda m, x, ids: x.topk(3, -1).values + x.topk(3, -1, largest=False).indices,
    "sort": lambda m, x, ids: x.sort(-1, descending=True).values + x.sort(-1).indices + x.argsort(1),
    "all_of_a_weight": lambda m, x, ids: x * m.v.sum() + m.w.mean() + m.w.max(),
}
INDICES: dict[str, Case] = {
    "index": lambda m, x, ids: m.table[ids],
    "index_negative": lambda m, x, ids: m.table[ids - 3],
    "index_two": lambda m, x, ids: m.table[ids, ids - 5],
    "index_middle": lambda m, x, ids: m.experts[:, ids].permute(1, 2, 0, 3),
    "index_last_two": lambda m, x, ids: m.experts[:, ids, ids - 5 + 1].permute(1, 2, 0),
    "index_apart": lambda m, x, ids: m.experts[ids % 3, :, ids % 4],
    "index_constant": lambda m, x, ids: x[:, torch.tensor([3, 0, 3])],
    "rows": lambda m, x, ids: x[torch.arange(x.shape[0]), ids[:, 0]],
    "index_select": lambda m, x, ids: x.index_select(1, torch.tensor([5, 1])),
    "embedding": lambda m, x, ids: F.embedding(ids, m.table) + F.embedding(ids, m.table * 2),
    "gather": lambda m, x, ids: x.gather(1, ids),
    "gather_part": lambda m, x, ids: x.view(-1, 2, 3).gather(2, ids[:, None, :1] % 3),
    "scatter": lambda m, x, ids: torch.zeros_like(x).scatter(1, ids[:, :1], 1.0),
    "scatter_src": lambda m, x, ids: x.scatter(1, ids[:, :1], x[:, 3:]),
    "scatter_add": lambda m, x, ids: x.scatter_add(1, ids, ids.float()),
    "index_add": lambda m, x, ids: x.index_add(1, torch.tensor([1, 1, 4]), ids.float(), alpha=2),
    "index_copy": lambda m, x, ids: x.index_copy(1, torch.tensor([1, 0, 4]), ids.float()),
    "index_fill": lambda m, x, ids: x.index_fill(1, torch.tensor([1, 0]), 7.0),
    "index_put": lambda m, x, ids: x.index_put((torch.arange(x.shape[0]), ids[:, 0]), torch.tensor(9.0)),
    "index_put_add": lambda m, x, ids: x.index_put((torch.arange(x.shape[0]), ids[:, 0]), m.v[0], accumulate=True),
    "index_put_mask": lambda m, x, ids: x.index_put((x > 0,), torch.tensor(-1.0)),
    "one_hot": lambda m, x, ids: F.one_hot(ids, 6).sum(1),
    "bucketize": lambda m, x, ids: torch.bucketize(x, m.edges) + torch.bucketize(x, m.edges, right=True),
    "searchsorted": lambda m, x, ids: torch.bucketize(ids, torch.tensor([1, 3])),
}
PRODUCTS: dict[str, Case] = {
    "linear": lambda m, x, ids: F.linear(x, m.w.T) + F.linear(x, m.table[:8, :1].expand(8, 6)),
    "matmul": lambda m, x, ids: x @ m.w,
    "matmul_batched_weight": lambda m, x, ids: x[None] @ m.batched,
    "matmul_activations": lambda m, x, ids: x.view(-1, 2, 3) @ x.view(-1, 3, 2),
    "matmul_vector": lambda m, x, ids: x @ m.v + (x[:, None] @ m.v)[:, 0],
    "matmul_small": lambda m, x, ids: m.w.T @ x[:, :, None],
    "experts": lambda m, x, ids: torch.bmm(x.expand(3, -1, -1), m.experts).transpose(0, 1),
    "addmm": lambda m, x, ids: torch.addmm(m.w[0], x, m.w) + torch.addmm(m.w[0], x, m.w, beta=0.5, alpha=2.0),
    "baddbmm": lambda m, x, ids: torch.baddbmm(
        x.view(-1, 2, 3), x.view(-1, 2, 3), x[:, None].expand(-1, 3, 6)[..., :3]
    ),
    "einsum": lambda m, x, ids: torch.einsum("th,hk->tk", x, m.w),
    "einsum_experts": lambda m, x, ids: torch.einsum("th,ehk->tek", x, m.experts),
    "einsum_heads": lambda m, x, ids: torch.einsum("tij,tkj->tik", x.view(-1, 2, 3), x.view(-1, 2, 3)),
    "outer": lambda m, x, ids: x[:, :, None] * torch.outer(m.v, m.v),
    "conv_of_one": lambda m, x, ids: F.conv1d(x.T[None], m.w.T[:, :, None])[0].T,
    "tensordot": lambda m, x, ids: torch.tensordot(x, m.w, ([1], [0])),
}
CREATION: dict[str, Case] = {
    "full": lambda m, x, ids: x + torch.full((x.shape[0], 1), 2.5),
    "zeros": lambda m, x, ids: torch.zeros(x.shape[0], 6) + x.new_zeros(6) + torch.zeros_like(x) + x,
    "ones": lambda m, x, ids: torch.ones_like(ids) + ids.new_ones(3),
    "full_like": lambda m, x, ids: torch.full_like(x, -1) + x.new_full((6,), 2),
    "arange": lambda m, x, ids: x * torch.arange(x.shape[0])[:, None] + torch.arange(2, 14, 2),
    "arange_float": lambda m, x, ids: x + torch.arange(x.shape[0], dtype=torch.float32)[:, None] * 0.5,
    "arange_from": lambda m, x, ids: x + torch.arange(1, x.shape[0] + 1)[:, None],
    "eye": lambda m, x, ids: x @ torch.eye(6),
    "linspace": lambda m, x, ids: x * torch.linspace(0, 1, 6),
    "scalar_tensor": lambda m, x, ids: torch.where(x > 0, x, torch.tensor(0.0)),
}
GROUPS = {
    "unary": UNARY,
    "activations": ACTIVATIONS,
    "arithmetic": ARITHMETIC,
    "logic": LOGIC,
    "layout": LAYOUT,
    "reductions": REDUCTIONS,
    "indices": INDICES,
    "products": PRODUCTS,
    "creation": CREATION,
}


@pytest.mark.parametrize("group", GROUPS)
def test_equals_torch(group: str) -> None:
    names, cases = list(GROUPS[group]), list(GROUPS[group].values())
    model = Model(cases)
    program = program_of(model)
    ids, positions, rows = torch.arange(7) * 3 % 32, torch.arange(7), torch.tensor([6, 0, 3, 2, 5])
    with torch.no_grad():
        expected = model(ids[None], positions[None], rows)[0].numpy()
    inputs = {"input_ids": ids, "position_ids": positions, "logit_rows": rows}
    found = run_graph(emit(program), {name: x.numpy().astype(np.int32) for name, x in inputs.items()})["logits"]
    ends = np.cumsum(model.widths)
    parts = zip(names, np.split(found, ends[:-1], 1), np.split(expected, ends[:-1], 1), strict=True)
    wrong = [name for name, a, b in parts if not np.allclose(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)]
    assert not wrong
