"""Traced graphs compute what transformers computes, for one sequence and for two that share each step."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from configs import CONFIGS, EXPERTS, SIZES
from more_configs import MORE
from packed import differences, traced
from torch import fx
from transformers import (
    BartConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    T5Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from llmc.compiler import hooks
from llmc.compiler import trace as tracer
from llmc.compiler.trace import bind, build_model, trace
from llmc.errors import CompileError
from llmc.passes.fx.nodes import op_name

TOLERANCE = 1e-4

BIG = """
import time
from transformers import LlamaConfig
from llmc.compiler.trace import trace
start = time.process_time()
config = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
)
program = trace(config, max_seq_len=4096)
(peak,) = (int(line.split()[1]) / 1e6 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time() - start, peak, len(program.parameter_names))
"""


def calls(module: fx.GraphModule, name: str) -> list[fx.Node]:
    return [node for node in module.graph.nodes if op_name(node) == name]


def llama(**values: Any) -> Any:
    return LlamaConfig(**SIZES | values)


FEW = {name: CONFIGS[name] for name in ("llama", "gemma3n_text", "deepseek_v3", "gpt_oss")}
"""The engines of all of them are compared in the same way, in tests/test_coverage.py."""


@pytest.mark.parametrize("name", [*FEW, *(f"more-{name}" for name in MORE)])
def test_equals_transformers(name: str) -> None:
    entry = MORE[name.removeprefix("more-")] if name.startswith("more-") else FEW[name]
    alone, together = differences(entry.make(), entry.reference, entry.max_len)
    assert alone < TOLERANCE
    assert together < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3n_text", "phimoe", "gpt_neo"])
def test_the_graph_is_functional_and_free_of_checks(name: str) -> None:
    module = trace(CONFIGS[name].make(), max_seq_len=CONFIGS[name].max_len).module
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable
            assert "assert" not in str(node.target)
        assert node.op in ("placeholder", "get_attr", "call_function", "output")
    assert [n.name for n in module.graph.find_nodes(op="placeholder")] == ["input_ids", "position_ids", "logit_rows"]


def test_nodes_know_their_module() -> None:
    module = trace(llama(), max_seq_len=64).module
    linear = next(node for node in calls(module, "aten.linear") if "q_proj" in str(node.args[1]))
    assert list(linear.meta["nn_module_stack"].values())[-1][0] == "model.layers.0.self_attn.q_proj"


def test_only_the_wanted_rows_have_logits() -> None:
    config = llama()
    _, module = traced(config, build_model(config), 64)
    ids = torch.arange(3, 12)[None]
    positions = torch.arange(9)[None]
    whole = module(ids, positions, torch.arange(9))
    torch.testing.assert_close(module(ids, positions, torch.tensor([8, 2])), whole[:, [8, 2]])


def test_one_token_is_enough() -> None:
    config = llama()
    _, module = traced(config, build_model(config), 64)
    assert module(torch.tensor([[5]]), torch.tensor([[0]]), torch.tensor([0])).shape == (1, 1, 128)


def test_every_parameter_has_its_name() -> None:
    config = llama(attention_bias=True)
    program = trace(config, max_seq_len=64)
    assert set(program.parameter_names.values()) == set(build_model(config).state_dict())


def test_a_tied_weight_is_read_under_one_name() -> None:
    program = trace(llama(tie_word_embeddings=True), max_seq_len=64)
    assert "lm_head.weight" not in program.parameter_names
    (embedding,) = calls(program.module, "aten.embedding")
    assert embedding.args[0] is calls(program.module, "aten.linear")[-1].args[1]


@pytest.mark.parametrize("name", ["llama_llama3_rope", "gemma3_text", "gemma3n_text", "gemma4_text", "xglm", "opt"])
def test_buffers_are_those_of_a_real_model(name: str) -> None:
    config = CONFIGS[name].make()
    real = dict(build_model(config).named_buffers())
    found = {k: v for k, v in trace(config, max_seq_len=64).buffers.items() if k in real}
    assert found or name == "opt"
    for target, value in found.items():
        torch.testing.assert_close(value, real[target], rtol=0, atol=0)


def test_attention_calls_have_slots_of_their_own() -> None:
    """Diffllama attends twice in each layer, with the same layer index."""
    module = trace(CONFIGS["diffllama"].make(), max_seq_len=64).module
    found = calls(module, "llmc.paged_attention")
    assert [node.kwargs["slot"] for node in found] == list(range(6))
    assert all(node.kwargs["write"] for node in found)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values_share_a_slot(name: str) -> None:
    entry = CONFIGS[name]
    config = dataclasses.replace(entry, values={**entry.values, "num_kv_shared_layers": 2}).make()
    module = trace(config, max_seq_len=64).module
    found = calls(module, "llmc.paged_attention")
    assert [node.kwargs["slot"] for node in found] == [0, 1, 0, 1]
    assert [node.kwargs["write"] for node in found] == [True, True, False, False]
    assert max(differences(config)) < TOLERANCE


def test_a_weight_of_another_shape_is_refused() -> None:
    program = trace(llama(), max_seq_len=64)
    weights = build_model(llama()).state_dict()
    with pytest.raises(CompileError, match=r"model\.norm\.weight: shape \(3,\)"):
        bind(program, weights | {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(CompileError, match=r"model\.norm\.weight: there is no such weight"):
        bind(program, {k: v for k, v in weights.items() if k != "model.norm.weight"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: T5Config(d_model=64), "model_type 't5' has no causal language model; supported are"),
        (lambda: BartConfig(d_model=64), "encoder-decoder"),
        (lambda: MambaConfig(hidden_size=64, num_hidden_layers=1), "recurrent state"),
        (
            lambda: Lfm2Config(**SIZES | {"layer_types": ["conv", "full_attention", "conv"]}),
            r"recurrent state \(conv\)",
        ),
        (lambda: llama(architectures=["FooForCausalLM"]), "'FooForCausalLM'.*'LlamaForCausalLM'"),
    ],
    ids=["no causal model", "encoder-decoder", "mamba", "convolution", "another architecture"],
)
def test_what_is_not_supported_is_named(config: Any, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        trace(config(), max_seq_len=64)


def test_a_family_with_its_own_attention_needs_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "all_fixes", dict)
    with pytest.raises(CompileError, match="BloomForCausalLM: it computes attention by itself"):
        trace(CONFIGS["bloom"].make(), max_seq_len=64)


def test_attention_with_an_unknown_argument_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(CompileError, match="attention with block_indices is not supported"):
        hooks._attention(torch.nn.Module(), q, q, q, None, block_indices=q)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(CompileError, match="3 queries on 5 keys"):
        hooks.attend(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), scale=1.0)


def test_experts_with_an_unknown_gate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda self, x: x.chunk(2, -1)[0] * 3)
    config = CONFIGS["mixtral"].make()
    with pytest.raises(CompileError, match="MixtralExperts: what its experts compute"):
        trace(config, max_seq_len=64)


def test_hooks_leave_transformers_as_it_was() -> None:
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    trace(llama(), max_seq_len=64)
    assert masking_utils.find_packed_sequence_indices is before


def test_the_same_config_gives_the_same_graph() -> None:
    config = CONFIGS["qwen3_moe"].make()
    first, second = (trace(config, max_seq_len=64) for _ in range(2))
    assert first.module.code == second.module.code
    assert EXPERTS["num_experts_per_tok"] == 2
    assert len(calls(first.module, "llmc.moe")) == 3


def test_a_big_model_is_traced_in_little_memory_and_time() -> None:
    seconds, gigabytes, parameters = subprocess.check_output([sys.executable, "-P", "-c", BIG], text=True).split()
    assert int(parameters) == 80 * 9 + 3
    assert float(gigabytes) < 2
    assert float(seconds) < 60


def test_every_native_causal_model_has_a_class() -> None:
    """The errors list what is supported; the list has to be there."""
    assert len(MODEL_FOR_CAUSAL_LM_MAPPING) > 100
