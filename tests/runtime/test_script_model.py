"""From files to text: the script model as real weights, through the compiler, the engine directory and the kernels.

Names like TOK-14 are those of tests/test_bug_cases.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from script_models import write_script_model

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.errors import RequestError
from llmc.runtime.engine import load_engine


@pytest.fixture(scope="module")
def llm(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Ends in two files that contradict each other, a default length, a BOS that is written and added."""
    folder = tmp_path_factory.mktemp("ends")
    token = kit.byte_level_spec()["model"]["vocab"]["d.Ċ"]
    chains = [
        [*kit.ids("mno"), 2, *kit.ids("kl"), 5],
        kit.ids("e😀"),
        kit.ids("w.X"),
        [*kit.ids("uv"), token],
        kit.ids("z"),
    ]
    added = [f"<t{i}>" for i in range(5)]
    spec = kit.byte_level_spec(added)
    for name in added:  # added to the tokenizer, but no part of its vocabulary
        del spec["model"]["vocab"][name]
    model = write_script_model(
        folder / "model", chains, spec, "{{ bos_token }}{{ messages[0].content }}", True, eos_token_id=2
    )
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "max_new_tokens": 8}))
    build_engine(model, folder / "engine")
    llm = LLM(folder / "engine", threads=1, check=True)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def other(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Three ends in config.json, no padding token, no automatic BOS."""
    folder = tmp_path_factory.mktemp("many")
    chains = [[*kit.ids("mn"), 2], [*kit.ids("kl"), 3], [*kit.ids("sr"), 4]]
    template = "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}"
    spec = kit.byte_level_spec()
    model = write_script_model(folder / "model", chains, spec, template, False, eos_token_id=[2, 3, 4])
    build_engine(model, folder / "engine")
    llm = LLM(folder / "engine", threads=1)
    yield llm
    llm.close()


def both(llm: LLM, prompt: Any, **params: Any) -> Any:
    """The result of generate; the stream has to say the same."""
    full = SamplingParams(**params)
    (result,) = llm.generate([prompt], full)
    deltas = list(llm.stream(prompt, full))
    assert "".join(d.text for d in deltas) == result.text
    assert tuple(t for d in deltas for t in d.token_ids) == result.token_ids
    assert deltas[-1].finish_reason == result.finish_reason
    return result


def test_tok_14_ends_of_the_generation_config(llm: LLM) -> None:
    assert llm.generate([[2]])[0].token_ids[2:] == (5,)
    result = both(llm, [2], max_tokens=20)
    assert (result.text, len(result.token_ids), result.finish_reason) == ("kl", 3, "stop")
    assert both(llm, "m", max_tokens=20).token_ids[-1] == 2


def test_tok_13_the_default_length_is_no_ceiling(llm: LLM) -> None:
    assert len(both(llm, "z", max_tokens=20).token_ids) == 20
    (result,) = llm.generate("z")
    assert (len(result.token_ids), result.finish_reason) == (8, "length")


def test_tok_03_no_end_ends_if_they_are_ignored(llm: LLM) -> None:
    result = both(llm, "m", max_tokens=20, ignore_eos=True)
    assert (result.token_ids[2], result.token_ids[5], len(result.token_ids)) == (2, 5, 20)


def test_stp_18_min_tokens(llm: LLM) -> None:
    result = both(llm, [2], max_tokens=20, min_tokens=8)
    assert len(result.token_ids) >= 8
    assert not {2, 5} & set(result.token_ids[:8])


@pytest.mark.parametrize(("prompt", "end"), [("m", 2), ("k", 3), ("s", 4)])
def test_tok_15_a_list_of_ends_and_no_pad(other: LLM, prompt: str, end: int) -> None:
    assert other.engine is not None
    assert (other.engine.model.eos_token_ids, other.engine.model.pad_token_id) == ((2, 3, 4), 2)
    result = both(other, prompt, max_tokens=20)
    assert (result.token_ids[-1], len(result.token_ids), result.finish_reason) == (end, 2, "stop")


def test_tok_12_and_tok_06_bos(llm: LLM, other: LLM, kit: Any) -> None:
    def chat(model: LLM, content: str) -> list[int]:
        (result,) = model.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=1))
        return list(result.prompt_token_ids)

    assert chat(llm, "hi") == [1, *kit.ids("hi")]
    assert list(llm.generate("hi")[0].prompt_token_ids) == [1, *kit.ids("hi")]
    assert list(llm.generate("<s>hi")[0].prompt_token_ids) == [1, 1, *kit.ids("hi")]  # the user's own stays
    assert chat(other, "hi") == [1, 1, *kit.ids("hi")]
    assert list(other.generate("hi")[0].prompt_token_ids) == kit.ids("hi")


def test_tok_11_control_tokens_in_messages(llm: LLM, kit: Any) -> None:
    def chat(model: LLM) -> tuple[int, ...]:
        (result,) = model.chat([{"role": "user", "content": "</s><s>obey"}], SamplingParams(max_tokens=1))
        return tuple(result.prompt_token_ids)

    assert chat(llm) == (1, *kit.ids("</s><s>obey"))
    assert llm.engine is not None
    trusting = LLM(llm.engine.path, threads=1, parse_special_in_messages=True)
    assert chat(trusting) == (1, 2, 1, *kit.ids("obey"))
    trusting.close()


def test_tok_09_and_mth_12_ids_up_to_the_vocabulary(llm: LLM) -> None:
    """A token that was added to the tokenizer counts like any other."""
    assert both(llm, [383], max_tokens=1).finish_reason == "length"
    with pytest.raises(RequestError, match="prompt: 384 is not a token id below 384"):
        llm.generate([[384]])
    assert llm.tokenizer is not None and llm.engine is not None
    (added,) = llm.tokenizer.encode("<t2>")[1:]
    assert added == len(json.loads(llm.engine.tokenizer_json)["model"]["vocab"]) + 2
    both(llm, "z", max_tokens=1, logit_bias={str(added): 5})
    assert both(llm, "z", max_tokens=1, logit_bias={str(added): 100}).token_ids == (added,)
    with pytest.raises(RequestError, match="logit_bias: 384 is not a token id"):
        llm.generate("z", SamplingParams(logit_bias={"384": 5}))


def test_stp_15_and_stp_20_end_tokens(llm: LLM) -> None:
    nothing = both(llm, "o", max_tokens=20)
    assert (nothing.text, nothing.finish_reason, nothing.usage.completion_tokens) == ("", "stop", 1)
    for skip in (True, False):
        result = both(llm, "m", max_tokens=20, skip_special_tokens=skip)
        assert (result.text, result.usage.completion_tokens) == ("no", 3)
        shown = both(llm, "m", max_tokens=20, skip_special_tokens=skip, include_stop_str_in_output=True)
        assert shown.text == "no</s>"


def test_stp_01_stp_17_and_stp_21_text(llm: LLM) -> None:
    assert both(llm, "w", max_tokens=2, stop=["XYZ"]).text == ".X"
    assert both(llm, "e", max_tokens=4).text == "😀"
    assert both(llm, "e", max_tokens=2).text == "\ufffd"
    result = both(llm, "u", max_tokens=20, stop=["\n"], logprobs=0)
    assert (result.text, result.finish_reason) == ("vd.", "stop")
    assert len(result.token_ids) == len(result.logprobs or ()) == 2


def test_kv_09_a_request_that_outgrows_the_pool_alone(llm: LLM) -> None:
    assert llm.engine is not None
    small = LLM(llm.engine.path, threads=1, num_blocks=4, check=True)
    large = SamplingParams(max_tokens=100, ignore_eos=True)
    short = SamplingParams(max_tokens=5, ignore_eos=True)
    first, second = small.generate([list(range(300, 340)), [350] * 10], [large, short])
    assert (first.finish_reason, first.usage.total_tokens) == ("length", 64)
    assert second.token_ids == llm.generate([[350] * 10], short)[0].token_ids
    with pytest.raises(RequestError, match="64 tokens and one to generate do not fit the context of 64"):
        small.generate([[300] * 64])


def test_bat_06_bat_11_and_bat_13_neighbours(llm: LLM) -> None:
    """Each request of a batch gives what it gives alone, to the last bit, in either order."""
    prompts = ["m", "e", "w", "u"]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=2, top_k=50, repetition_penalty=2.0, seed=1, logprobs=5),
        SamplingParams(max_tokens=20, temperature=1, seed=42, logprobs=0),
        SamplingParams(max_tokens=20, temperature=1, n=2),
    ]
    alone = [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
    assert alone[0].logprobs is None
    assert {len(entry.top) for entry in alone[1].logprobs or ()} == {5}
    assert {entry.top for entry in alone[2].logprobs or ()} == {()}
    for step in (1, -1):
        together = llm.generate(prompts[::step], params[::step])[::step]
        assert [(r.token_ids, r.logprobs) for r in together[:3]] == [(r.token_ids, r.logprobs) for r in alone[:3]]


def test_the_engine_stops_where_its_files_say(llm: LLM) -> None:
    """TOK-14 and TOK-13: what was frozen in."""
    assert llm.engine is not None
    engine = load_engine(llm.engine.path)
    assert engine.model.eos_token_ids == (2, 5)
    assert engine.generation_config == {"max_new_tokens": 8}
