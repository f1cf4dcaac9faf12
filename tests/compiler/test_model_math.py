"""The mathematics of configs, at the level of the traced graph: ropes, windows, head sizes, old spellings.

Names such as MTH-07 are those of tests/test_bug_cases.py.
"""

from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from checkpoints import llama_arrays, np_dtype, write_model
from configs import CONFIGS, SIZES, rope
from packed import differences, expected_logits, one_sequence, random_ids, random_model, traced
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.progress import Progress
from llmc.compiler.trace import trace
from llmc.errors import CompileError

TOLERANCE = 1e-4
LENGTH = 100


def llama(**values: Any) -> Any:
    return LlamaConfig(**SIZES | values)


def difference(config: Any, length: int = LENGTH, max_len: int = 256, reference: Any = None) -> float:
    """From transformers, which runs ``reference`` if that is another config, on one sequence of this length."""
    model = random_model(reference or config)
    ids = random_ids(config, only=length)["only"]
    _, module = traced(config, model, max_len)
    return float((one_sequence(module, ids) - expected_logits(model, ids)).abs().max())


def yarn(**values: Any) -> Any:
    return llama(**rope("yarn", original_max_position_embeddings=64, **values))


def attention_scale(config: Any) -> float:
    """The factor that the rope of a model multiplies cos and sin with."""
    from llmc.compiler.trace import build_model

    return float(build_model(config).model.rotary_emb.attention_scaling)


class TestYarn:
    def test_factor_one_is_no_scaling(self) -> None:
        """MTH-07."""
        assert difference(yarn(factor=1.0)) < TOLERANCE
        assert difference(yarn(factor=1.0), reference=llama()) < TOLERANCE

    def test_scaling_can_be_switched_off(self) -> None:
        """MTH-07: the frequencies of yarn, the attention scale of no yarn."""
        off = yarn(factor=4.0, apply_yarn_scaling=False)
        assert difference(off, reference=yarn(factor=4.0, attention_factor=1.0)) < TOLERANCE
        assert difference(off, reference=yarn(factor=4.0)) > 100 * TOLERANCE

    @pytest.mark.parametrize("mscale", [1.0, 0.707])
    def test_mscale(self, mscale: float) -> None:
        """MTH-24."""
        config = yarn(factor=4.0, mscale=mscale, mscale_all_dim=1.0)
        assert difference(config) < TOLERANCE
        values = CONFIGS["deepseek_v3"].make().to_dict()
        values |= rope("yarn", factor=4.0, mscale=mscale, mscale_all_dim=1.0, original_max_position_embeddings=64)
        assert difference(CONFIG_MAPPING["deepseek_v3"].from_dict(values)) < TOLERANCE

    def test_attention_factor(self) -> None:
        """MTH-34: given or by default, 0.1 ln(4) + 1."""
        given, default = yarn(factor=4.0, attention_factor=1.0), yarn(factor=4.0)
        assert attention_scale(given) == 1.0
        assert attention_scale(default) == pytest.approx(1.1386, abs=1e-4)
        assert difference(given) < TOLERANCE
        assert difference(default) < TOLERANCE
        assert difference(given, reference=default) > 100 * TOLERANCE


class TestRopeRegime:
    def test_linear(self) -> None:
        """MTH-15."""
        config = llama(**rope("linear", factor=4.0))
        assert difference(config) < TOLERANCE
        assert difference(config, reference=llama()) > 100 * TOLERANCE

    def test_dynamic_within_the_trained_length_is_unscaled(self) -> None:
        """MTH-15."""
        config = llama(**rope("dynamic", factor=2.0))
        assert difference(config, max_len=256, reference=llama()) < TOLERANCE
        assert (
            trace(config, max_seq_len=256).notes["rope"].startswith("dynamic NTK, factor 2, frozen for max_seq_len 256")
        )

    def test_dynamic_beyond_is_frozen_for_the_longest_sequence(self) -> None:
        """MTH-15: equal to transformers run at that length; shorter ones keep the same frequencies."""
        config = llama(max_position_embeddings=64, **rope("dynamic", factor=2.0))
        model = random_model(config)
        ids = random_ids(config, only=128)["only"]
        _, module = traced(config, model, 128)
        expected = expected_logits(model, ids)
        torch.testing.assert_close(one_sequence(module, ids), expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(one_sequence(module, ids[:, :30]), expected[:, :30], rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize(("max_len", "length", "factors"), [(256, 100, "long"), (64, 60, "short")])
    def test_longrope_has_one_set_of_factors(self, max_len: int, length: int, factors: str) -> None:
        """MTH-25: by the longest sequence, so nothing changes at 64 tokens."""
        config = CONFIGS["phi3_longrope"].make()
        assert difference(config, length=length, max_len=max_len) < TOLERANCE
        assert f"{factors} factors" in trace(config, max_seq_len=max_len).notes["rope"]

    def test_longrope_does_not_jump(self) -> None:
        """MTH-25: a sequence of 40 in an engine for 256 has the keys that it has when it is 100 long."""
        config = CONFIGS["phi3_longrope"].make()
        model = random_model(config)
        ids = random_ids(config, only=100)["only"]
        _, module = traced(config, model, 256)
        whole = one_sequence(module, ids)
        torch.testing.assert_close(one_sequence(module, ids[:, :40]), whole[:, :40], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(whole, expected_logits(model, ids), rtol=0, atol=TOLERANCE)

    def test_an_unknown_type_is_refused(self) -> None:
        """MTH-15."""
        config = llama()
        config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
        with pytest.raises(CompileError, match="rope type 'spiral' is unknown; supported: default, linear, dynamic"):
            trace(config, max_seq_len=64)

    def test_layers_of_two_kinds_have_two_ropes(self) -> None:
        """MTH-23: only the global one is scaled."""
        values = CONFIGS["gemma3_text"].values | {
            "num_hidden_layers": 8,
            "layer_types": None,
            "sliding_window_pattern": 6,
            "sliding_window": 4,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
        config = CONFIG_MAPPING["gemma3_text"](**values)
        kinds = config.rope_parameters
        assert kinds["full_attention"]["factor"] == 8.0
        assert (kinds["full_attention"]["rope_theta"], kinds["sliding_attention"]["rope_theta"]) == (1e6, 1e4)
        assert difference(config) < TOLERANCE


class TestShapes:
    def test_head_dim_of_its_own(self) -> None:
        """MTH-11: hidden 64, 4 heads of 32."""
        config = llama(head_dim=32)
        assert trace(config, max_seq_len=64).module.get_buffer("model.layers.0.self_attn.q_proj.weight").shape == (
            128,
            64,
        )
        assert max(differences(config)) < TOLERANCE

    @pytest.mark.parametrize("bias", [True, False])
    def test_attention_bias(self, bias: bool) -> None:
        """MTH-29."""
        config = llama(attention_bias=bias)
        names = trace(config, max_seq_len=64).parameter_names
        assert ("model.layers.0.self_attn.o_proj.bias" in names) is bias
        assert difference(config) < TOLERANCE


class TestWindow:
    @pytest.mark.parametrize(
        ("model_type", "values"),
        [
            ("qwen2", {"use_sliding_window": False, "sliding_window": 4}),
            ("mistral", {"sliding_window": None}),
            ("mistral", {"sliding_window": 0}),
            ("gemma2", {"sliding_window": None, "head_dim": 16, "query_pre_attn_scalar": 16}),
            ("gemma3_text", {"sliding_window": 0, "head_dim": 16, "query_pre_attn_scalar": 16}),
        ],
        ids=["switched off", "null", "zero", "null with sliding layers", "zero with sliding layers"],
    )
    def test_a_disabled_window_is_full_attention(self, model_type: str, values: dict[str, Any]) -> None:
        """MTH-37."""
        config = CONFIG_MAPPING[model_type](**SIZES | values)
        wide = CONFIG_MAPPING[model_type](**SIZES | values | {"sliding_window": 1000, "use_sliding_window": False})
        module = trace(config, max_seq_len=64).module
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default):
            assert node.kwargs["window"] == 0
        assert difference(config, length=30, reference=wide) < TOLERANCE

    def test_a_window_of_four_sees_four_tokens(self) -> None:
        """MTH-09: with one layer, position 4 does not see token 0, position 3 does."""
        config = CONFIG_MAPPING["mistral"](**SIZES | {"num_hidden_layers": 1, "sliding_window": 4})
        model = random_model(config)
        _, module = traced(config, model, 64)
        ids = random_ids(config, only=8)["only"]
        other = ids.clone()
        other[0, 0] = (ids[0, 0] + 1) % 100 + 3
        changed = (one_sequence(module, ids) - one_sequence(module, other)).abs().amax(-1)[0]
        assert changed[3] > 0
        assert changed[4] == 0
        torch.testing.assert_close(one_sequence(module, ids), expected_logits(model, ids), rtol=0, atol=TOLERANCE)


class Notes(Progress):
    """What a build tells its user."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def note(self, text: str) -> None:
        self.text += text + "\n"


class TestEngines:
    """The same, as far as the text of a built engine."""

    def longest(self, config: Any, folder: Path, prompt: int, tokens: int, **limits: int) -> tuple[Any, Any]:
        """The engine, and a continuation that is what transformers would say."""
        model, path = engines.build(config, folder, **limits)
        llm = LLM(path, threads=1)
        ids = random_ids(config, only=prompt)["only"][0].tolist()
        (result,) = llm.generate([ids], SamplingParams(max_tokens=tokens, ignore_eos=True))
        assert engines.is_greedy(model, ids, result.token_ids)
        return llm.engine, result

    @pytest.mark.parametrize(("limit", "factors", "tokens"), [(256, "long", 10), (64, "short", 4)])
    def test_longrope(self, tmp_path: Path, limit: int, factors: str, tokens: int) -> None:
        """MTH-25: from token 60 over 64, with the factors of the longest sequence; or to the end at 64."""
        config = CONFIGS["phi3_longrope"].make()
        engine, result = self.longest(config, tmp_path, 60, 10, max_seq_len=limit)
        assert (len(result.token_ids), result.finish_reason) == (tokens, "length")
        assert f"{factors} factors" in engine.model.rope

    def test_dynamic(self, tmp_path: Path) -> None:
        """MTH-15: for twice the trained length, told and recorded."""
        config = llama(max_position_embeddings=64, **rope("dynamic", factor=2.0))
        engine, result = self.longest(config, tmp_path, 118, 10, max_seq_len=128)
        assert result.usage.total_tokens == 128
        notes = Notes()
        build_engine(tmp_path / "model", tmp_path / "again", BuildConfig(max_seq_len=128), progress=notes)
        for text in (engine.model.rope, notes.text):
            assert "dynamic NTK, factor 2, frozen for max_seq_len 128" in text

    def test_activations_beyond_float16(self, tmp_path: Path) -> None:
        """MTH-13: a bfloat16 model whose MLP leaves the range of float16 says the same in float16."""
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 128}
        arrays = llama_arrays(**sizes)
        rows = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
        arrays["model.embed_tokens.weight"] = rows * 1000
        arrays["lm_head.weight"] = np.roll(rows, 1, axis=0)  # the next token is the next id
        factors = {"gate_proj": 30, "up_proj": 30, "down_proj": 3e-4, "o_proj": 0}
        for name, array in arrays.items():
            array *= next((factor for part, factor in factors.items() if part in name), 1)
            if array.ndim == 1:
                array[:] = 1
        arrays = {name: array.astype(np_dtype("bfloat16")) for name, array in arrays.items()}
        folder = write_model(tmp_path / "model", arrays, **sizes, torch_dtype="bfloat16")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        largest: list[float] = []
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(lambda _, x: largest.append(float(x[0].abs().max())))
        texts = {}
        for dtype in ("bfloat16", "float16"):
            notes = Notes()
            build_engine(folder, tmp_path / dtype, BuildConfig(dtype=dtype), progress=notes)
            assert ("range of float16" in notes.text) == (dtype == "float16")
            (result,) = LLM(tmp_path / dtype, threads=1).generate(
                [[7, 40]], SamplingParams(max_tokens=20, ignore_eos=True)
            )
            assert result.finish_reason == "length"
            texts[dtype] = result.token_ids
        assert texts["float16"] == texts["bfloat16"] == tuple(range(41, 61))
        assert engines.is_greedy(model, [7, 40], texts["float16"])
        assert min(largest) > 65504


class TestOldSpelling:
    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ({"rope_theta": 5e5}, rope("default", rope_theta=5e5)),
            (
                {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
                rope("linear", rope_theta=5e5, factor=2.0),
            ),
            (
                {
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 8.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 64,
                    }
                },
                rope(
                    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
                ),
            ),
        ],
        ids=["theta", "linear", "llama3"],
    )
    def test_rope(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        written = {"model_type": "llama", "torch_dtype": "bfloat16", **SIZES, **old}
        config = CONFIG_MAPPING["llama"].from_dict(written)
        assert difference(config, reference=llama(**new)) < TOLERANCE
