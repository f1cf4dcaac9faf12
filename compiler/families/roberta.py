"""RoBERTa-like decoders: RoBERTa, CamemBERT, XLM-RoBERTa, X-MOD, Data2Vec."""

from typing import Any

from torch import Tensor, nn
from transformers import RobertaConfig

from llmc.compiler.families.base import Fix


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("Embeddings") and hasattr(module, "create_position_ids_from_input_ids"):
            module.forward = _forward(module)


def _forward(embeddings: Any) -> Any:
    original = embeddings.forward

    def forward(input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None, **others: Any) -> Tensor:
        """Positions begin behind that of padding; the single token type is the first."""
        first = embeddings.padding_idx + 1
        types = input_ids * 0 if token_type_ids is None else token_type_ids
        embedded: Tensor = original(
            input_ids=input_ids, position_ids=position_ids + first, token_type_ids=types, **others
        )
        return embedded

    return forward


FIX = Fix(
    architectures=(
        "RobertaForCausalLM",
        "RobertaPreLayerNormForCausalLM",
        "CamembertForCausalLM",
        "XLMRobertaForCausalLM",
        "XLMRobertaXLForCausalLM",
        "XmodForCausalLM",
        "Data2VecTextForCausalLM",
    ),
    why="it counts positions from the ids of a whole sequence, and the first is not 0",
    patch=_patch,
    tiny=lambda: RobertaConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=300,
        is_decoder=True,
        pad_token_id=1,
        type_vocab_size=1,
    ),
)
