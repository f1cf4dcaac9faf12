"""JetMoe."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import JetMoeConfig

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import moe
from llmc.compiler.probe import ExpertFunction, activation_name


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for block in modules_of(model, "JetMoeMoE"):
        block.forward = _mlp_forward(block)
    for block in modules_of(model, "JetMoeMoA"):
        block.map = _map(block)
        block.reduce = _reduce(block)


def _route(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [T, K], weights [T, K])."""
    values, ids = torch.topk(router.layer(x), router.top_k, dim=1)
    return ids, torch.softmax(values, 1)


def _mlp_forward(block: Any) -> Any:
    function = activation_name(block.activation)

    def forward(layer_input: Tensor) -> Tensor:
        x = layer_input.reshape(-1, block.input_size)
        ids, weights = _route(block.router, x)
        y = moe(
            x, ids, weights, block.input_linear.weight, block.output_linear.weight, ExpertFunction.of(function, block)
        )
        result: Tensor = (y + block.bias).view(layer_input.shape)
        return result

    return forward


def _map(block: Any) -> Any:
    """Queries of the chosen attention experts: all experts' queries in one product, of which the chosen are picked."""

    def forward(layer_input: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        x = layer_input.reshape(-1, block.input_size)
        ids, weights = _route(block.router, x)
        queries = nn.functional.linear(x, block.input_linear.weight.reshape(-1, block.input_size))
        queries = queries.view(-1, block.num_experts, block.hidden_size)
        chosen = queries.gather(1, ids[:, :, None].expand(-1, -1, block.hidden_size))
        return chosen.view(*layer_input.shape[:2], block.top_k, block.hidden_size), None, (ids, weights)

    return forward


def _reduce(block: Any) -> Any:
    """Outputs of the chosen experts: each is put, weighted, at its expert's place in one row, and multiplied once."""

    def forward(layer_input: Tensor, routing: tuple[Tensor, Tensor]) -> Tensor:
        ids, weights = routing
        batch, tokens = layer_input.shape[:2]
        weighted = layer_input.reshape(-1, block.top_k, block.hidden_size) * weights[:, :, None]
        places = torch.arange(block.num_experts, device=ids.device)
        chosen_by = (ids[:, None, :] == places[None, :, None]).to(weighted.dtype)
        rows = torch.matmul(chosen_by, weighted).view(-1, block.num_experts * block.hidden_size)
        weight = block.output_linear.weight.transpose(0, 1).reshape(block.input_size, -1)
        result: Tensor = (nn.functional.linear(rows, weight) + block.bias).view(batch, tokens, block.input_size)
        return result

    return forward


FIX = Fix(
    architectures=("JetMoeForCausalLM",),
    why="its experts, those of attention included, sort the tokens of a step by expert and count them on the host",
    patch=_patch,
    tiny=lambda: JetMoeConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=16,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    ),
)
