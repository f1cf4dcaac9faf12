"""The API, with a model that follows a script: stops, ends, limits, choices, streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.errors import RequestError
from llmc.runtime.request import FinishReason, SamplingParams

LONG = SamplingParams(max_tokens=20)
HASHED = SamplingParams(max_tokens=20, ignore_eos=True)


def texts(llm: Any, prompt: Any, **params: Any) -> list[str]:
    (result,) = llm.generate([prompt], SamplingParams(**params))
    return [c.text for c in result.choices]


def streamed(llm: Any, prompt: Any, **params: Any) -> tuple[list[str], list[Any]]:
    """Text of each choice, and all deltas."""
    full = SamplingParams(**params)
    deltas = list(llm.stream(prompt, full))
    return ["".join(d.text for d in deltas if d.choice == i) for i in range(full.n)], deltas


def test_generate_is_in_order_and_alone_or_together_the_same(kit: Any) -> None:
    prompts = ["hello", [5, 6, 7], "the bar", kit.ids("x" * 40)]
    params = [SamplingParams(max_tokens=5 + i, temperature=i % 2, seed=i) for i in range(4)]
    together = kit.llm().generate(prompts, params)
    for prompt, p, result in zip(prompts, params, together, strict=True):
        (single,) = kit.llm().generate(prompt, p)
        assert (single.text, single.token_ids) == (result.text, result.token_ids)
        assert result.usage.completion_tokens == len(result.token_ids) <= p.max_tokens
    assert together[1].prompt_token_ids == (5, 6, 7)
    assert kit.llm().generate([]) == []


def test_stp_15_no_visible_tokens(kit: Any) -> None:
    (result,) = kit.script({"hello": [2]}).generate("hello", LONG)
    assert (result.text, result.finish_reason, result.token_ids) == ("", FinishReason.STOP, (2,))
    assert result.usage.completion_tokens == 1


@pytest.mark.parametrize("skip", [True, False])
def test_stp_20_the_end_token_is_not_in_the_text(kit: Any, skip: bool) -> None:
    llm = kit.script({"hello": [*kit.ids("ab"), 2]})
    (result,) = llm.generate("hello", SamplingParams(max_tokens=20, skip_special_tokens=skip))
    assert (result.text, result.usage.completion_tokens) == ("ab", 3)
    shown = SamplingParams(max_tokens=20, skip_special_tokens=skip, include_stop_str_in_output=True)
    assert llm.generate("hello", shown)[0].text == "ab</s>"


def test_stp_01_and_stp_21_at_the_end(kit: Any) -> None:
    emoji = kit.ids("🙂")
    llm = kit.script({"a": kit.ids("..X"), "b": emoji, "c": [*kit.ids("x"), *emoji]})
    assert streamed(llm, "a", max_tokens=3, stop=["XYZ"])[0] == texts(llm, "a", max_tokens=3, stop=["XYZ"]) == ["..X"]
    assert streamed(llm, "b", max_tokens=4)[0] == texts(llm, "b", max_tokens=4) == ["🙂"]
    assert streamed(llm, "c", max_tokens=3)[0] == texts(llm, "c", max_tokens=3) == ["x\ufffd"]


def test_stp_07_and_stp_17_with_logprobs(kit: Any) -> None:
    token = kit.byte_level_spec()["model"]["vocab"]["d.Ċ"]
    llm = kit.script({"a": kit.ids("a a a ab"), "b": [*kit.ids("x"), token, *kit.ids("y")]})
    joined, deltas = streamed(llm, "a", max_tokens=20, stop=["ab"], logprobs=1)
    assert joined == ["a a a "]
    assert sum(len(d.token_ids) for d in deltas) == sum(len(d.logprobs) for d in deltas) == 8
    (result,) = llm.generate("b", SamplingParams(max_tokens=20, stop=["\n"], logprobs=0))
    assert (result.text, result.finish_reason) == ("xd.", "stop")
    assert result.choices[0].stop_reason == "\n"
    assert len(result.token_ids) == len(result.logprobs or ()) == 2


def test_stp_18_min_tokens_with_several_end_tokens(kit: Any) -> None:
    script = [*kit.ids("ab"), 5, *kit.ids("cd"), 2, *kit.ids("efghij"), 5]
    llm = kit.script({"x": script}, eos=[2, 5])
    (result,) = llm.generate("x", SamplingParams(max_tokens=20, min_tokens=8))
    assert len(result.token_ids) >= 8
    assert not {2, 5} & set(result.token_ids[:8])
    assert result.finish_reason == "stop"
    assert len(llm.generate("x", LONG)[0].token_ids) == 3


def test_stop_strings_and_min_tokens(kit: Any) -> None:
    llm = kit.script({"x": kit.ids("ababcab")})
    assert texts(llm, "x", max_tokens=20, min_tokens=5, stop=["ab"]) == ["ababc"]


def test_tok_03_ignore_eos(kit: Any) -> None:
    llm = kit.script({"x": [*kit.ids("ab"), 2, *kit.ids("cd"), 5]}, eos=[2, 5])
    (result,) = llm.generate("x", SamplingParams(max_tokens=20, ignore_eos=True))
    assert (len(result.token_ids), result.finish_reason) == (20, "length")


def test_tok_13_the_models_max_new_tokens_is_a_default(kit: Any) -> None:
    llm = kit.script({"x": kit.ids("a" * 30)}, default_max_tokens=8)
    assert len(llm.generate("x", LONG)[0].token_ids) == 20
    assert len(llm.generate("x")[0].token_ids) == 8
    assert len(kit.script({"x": kit.ids("a" * 30)}).generate("x")[0].token_ids) == 16


@pytest.mark.parametrize("end", [2, 3, 4])
def test_tok_14_and_tok_15_every_id_of_the_list_ends(kit: Any, end: int) -> None:
    llm = kit.script({"x": [*kit.ids("abc"), end, *kit.ids("d")]}, eos=[2, 3, 4])
    (result,) = llm.generate("x", LONG)
    assert (result.token_ids[-1], len(result.token_ids), result.finish_reason) == (end, 4, "stop")
    assert result.choices[0].stop_reason is None


def test_stop_token_ids(kit: Any) -> None:
    (a, b, c) = kit.ids("abc")
    (result,) = kit.script({"x": [a, b, c]}).generate("x", SamplingParams(max_tokens=9, stop_token_ids=[b]))
    assert (result.text, result.token_ids, result.choices[0].stop_reason) == ("a", (a, b), b)


def test_tok_09_token_ids_are_checked(kit: Any) -> None:
    llm = kit.llm()
    assert llm.generate([[kit.VOCAB - 1]], LONG)[0].finish_reason == "length"
    for bad in (kit.VOCAB, -1, True, 1.5, "a"):
        with pytest.raises(RequestError, match=rf"prompt: {bad!r} is not a token id below 384"):
            llm.generate([[bad, 5] if isinstance(bad, int) else [5, bad]], LONG)
    for name, value in (("logit_bias", {kit.VOCAB: 1}), ("stop_token_ids", [kit.VOCAB])):
        with pytest.raises(RequestError, match=f"{name}: 384 is not a token id"):
            llm.generate("a", SamplingParams(**{name: value}))
    assert not llm.has_unfinished


def test_priority_is_a_whole_number(kit: Any) -> None:
    with pytest.raises(RequestError, match="priority: expected a whole number"):
        kit.llm().add_request("hello", priority=1.5)


def test_end_tokens_beyond_the_vocabulary_can_not_come(kit: Any) -> None:
    (result,) = kit.llm(eos=[2, 100_000]).generate("hello", SamplingParams(max_tokens=4, min_tokens=3))
    assert len(result.token_ids) >= 3


def test_a_bad_prompt_in_a_list_runs_nothing(kit: Any) -> None:
    llm = kit.llm()
    with pytest.raises(RequestError, match="prompt 1: prompt: 600 tokens and one to generate do not fit"):
        llm.generate(["a", [5] * 600, "b"], LONG)
    assert not llm.has_unfinished
    assert llm.scheduler.statistics.steps == 0
    with pytest.raises(RequestError, match="params: 1 sets of parameters for 2 prompts"):
        llm.generate(["a", "b"], [LONG])


def test_bat_01_choices_streamed_and_whole(kit: Any) -> None:
    def model(history: tuple[int, ...]) -> Any:  # multi-byte text, whatever is drawn
        logits = np.full(kit.VOCAB, -20, np.float32)
        partial = kit.tokenizer().vocabulary
        data = b"".join(partial.piece(t) for t in history[1:])
        pending = len(data.decode(errors="ignore").encode())
        missing = data[pending:]
        choices = [b"\xf0\x9f\x99\x82", b"\xf0\x9f\x98\x80", b"\xf0\x9f\x8d\x8e", b"ab\xc3\xa9"]
        for choice in choices:
            if choice.startswith(missing):
                logits[choice[len(missing)] + 3] = 5
        return logits

    params = {"n": 3, "seed": 1, "temperature": 1, "max_tokens": 21, "logprobs": 2}
    llm = kit.llm(model)
    joined, deltas = streamed(llm, "x", **params)
    assert joined == texts(llm, "x", **params)
    assert len(set(joined)) == 3
    assert all("🙂" in t or "😀" in t or "🍎" in t for t in joined)
    assert all(sum(len(d.logprobs) for d in deltas if d.choice == i) == 21 for i in range(3))


def test_bat_06_penalties_do_not_leak(kit: Any) -> None:
    greedy = SamplingParams(max_tokens=20)
    wild = SamplingParams(temperature=2, top_k=50, repetition_penalty=2.0, seed=1, max_tokens=20)
    alone = [kit.llm().generate("hello", p)[0].token_ids for p in (greedy, wild)]
    for order in ([0, 1], [1, 0]):
        results = kit.llm().generate(["hello"] * 2, [(greedy, wild)[i] for i in order])
        assert [r.token_ids for r in results] == [alone[i] for i in order]


def test_bat_10_bad_words_hold_for_every_choice(kit: Any) -> None:
    def model(history: tuple[int, ...]) -> Any:
        logits = kit.hashed(history) / 3
        logits[kit.ids("o")] = 6
        logits[kit.byte_level_spec()["model"]["vocab"]["foo"]] = 6
        logits[kit.byte_level_spec()["model"]["vocab"]["f"]] = 5
        return logits

    free = texts(kit.llm(model), "x", n=4, temperature=1, seed=1, max_tokens=64)
    assert all("o" in t for t in free)
    for words in (["o"], ["foo"], ["oo", "of"]):
        held = texts(kit.llm(model), "x", n=4, temperature=1, seed=1, max_tokens=64, bad_words=words)
        assert len(held) == 4
        assert not any(w in t for w in words for t in held)
    assert "foo" not in texts(kit.llm(model), "x", max_tokens=64, bad_words=["foo"])[0]


def test_bad_words_of_several_tokens(kit: Any) -> None:
    llm = kit.script({"x": kit.tokenizer().encode("foo bar foo bar")})
    assert texts(llm, "x", max_tokens=5) == ["foo bar foo bar"]
    assert "foo bar" not in texts(llm, "x", max_tokens=5, bad_words=["foo bar"])[0]


def test_bat_11_logprobs_next_to_none(kit: Any) -> None:
    params = [SamplingParams(max_tokens=6, ignore_eos=True, logprobs=k) for k in (None, 5, 0)]
    none, five, chosen = kit.llm().generate(["a", "b", "c"], params)
    assert none.logprobs is None
    assert [len(e.top) for e in five.logprobs or ()] == [5] * 6
    assert [e.top for e in chosen.logprobs or ()] == [()] * 6
    assert [e.token for e in chosen.logprobs or ()] == list(chosen.token_ids)


def test_bat_13_seeds_next_to_any_neighbour(kit: Any) -> None:
    seeded = SamplingParams(seed=42, temperature=1, max_tokens=20)
    free = SamplingParams(temperature=1, max_tokens=20)
    (expected,) = kit.llm().generate("hello", seeded)
    for row in (0, 1, 0, 1, 0):
        prompts, params = ["hello", "the bar"], [seeded, free]
        results = kit.llm().generate(prompts[:: 1 - 2 * row], params[:: 1 - 2 * row])
        assert results[row].token_ids == expected.token_ids
    seeds = {kit.llm().generate("hello", free)[0].seed for _ in range(5)}
    assert len(seeds) == 5
    again = SamplingParams(temperature=1, max_tokens=20, seed=results[1].seed)
    assert kit.llm().generate("the bar", again)[0].token_ids == results[1 - row].token_ids


def test_best_of_keeps_the_most_likely(kit: Any) -> None:
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 10}
    (all_four,) = kit.llm().generate("hello", SamplingParams(n=4, logprobs=0, **params))
    means = [np.mean([e.logprob for e in c.logprobs or ()]) for c in all_four.choices]
    (best,) = kit.llm().generate("hello", SamplingParams(n=2, best_of=4, **params))
    order = np.argsort(means)[::-1]
    assert [c.token_ids for c in best.choices] == [all_four.choices[i].token_ids for i in order[:2]]
    assert [c.index for c in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 40


def test_streams_side_by_side(kit: Any) -> None:
    llm = kit.llm()
    first, second = llm.stream("hello", LONG), llm.stream("the bar", SamplingParams(max_tokens=30))
    got = [next(first).text, next(second).text]
    got[0] += "".join(d.text for d in first)
    got[1] += "".join(d.text for d in second)
    assert got == [r.text for r in kit.llm().generate(["hello", "the bar"], [LONG, SamplingParams(max_tokens=30)])]
    assert not llm.has_unfinished


@pytest.mark.parametrize("deltas", [0, 1, 3])
def test_closing_or_dropping_a_stream_frees_everything(kit: Any, deltas: int) -> None:
    llm = kit.llm()
    for drop in (False, True):
        stream = llm.stream("hello", HASHED)
        for _ in range(deltas):
            next(stream)
        if drop:
            del stream
        else:
            stream.close()
        assert not llm.has_unfinished
        assert llm.scheduler.kv_cache.num_used == 0


def test_what_ends_at_once_is_reported_once(kit: Any) -> None:
    llm = kit.llm()
    (result,) = llm.generate("hello", SamplingParams(max_tokens=0))
    assert (result.text, result.finish_reason) == ("", "length")
    assert not llm.has_unfinished
    assert [d.finish_reason for d in llm.stream("hello", SamplingParams(max_tokens=0))] == ["length"]
    llm.add_request("hello", SamplingParams(max_tokens=0, n=2))
    assert [d.choice for d in llm.step()] == [0, 1]
    assert not llm.has_unfinished


def test_stp_04_tokens_with_equal_text_are_both_reported(kit: Any) -> None:
    """At the start of a text, the SentencePiece tokens ▁a and a have the same one."""
    spec = kit.sentencepiece_spec()
    first, second = (spec["model"]["vocab"][p] for p in ("▁a", "a"))
    logits = np.zeros(kit.VOCAB, np.float32)
    logits[[first, second]] = 5, 4
    llm = kit.llm(lambda history: logits, spec=spec)
    (result,) = llm.generate([[1]], SamplingParams(max_tokens=1, logprobs=2))
    assert [token for token, _ in (result.logprobs or ())[0].top] == [first, second]
    assert llm.tokenizer.decode([first]) == llm.tokenizer.decode([second]) == result.text == "a"


def test_requests_join_and_leave_while_others_run(kit: Any) -> None:
    llm = kit.llm()
    expected = {p: kit.llm().generate(p, HASHED)[0].token_ids for p in ("hello", "the bar", "foo")}
    ids = {llm.add_request("hello", HASHED): "hello"}
    got: dict[int, list[int]] = {}
    reasons = {}

    def step() -> None:
        for delta in llm.step():
            got.setdefault(delta.request_id, []).extend(delta.token_ids)
            reasons[delta.request_id] = delta.finish_reason

    step()
    ids[llm.add_request("the bar", HASHED)] = "the bar"
    aborted = llm.add_request("x", HASHED)
    step()
    llm.abort(aborted)
    llm.abort(12345)
    ids[llm.add_request("foo", HASHED)] = "foo"
    (whole,) = llm.generate("hello", HASHED)  # takes nothing away from the others
    assert whole.token_ids == expected["hello"]
    while llm.has_unfinished:
        step()
    assert {p: tuple(got[i]) for i, p in ids.items()} == expected
    assert all(reasons[i] == "length" for i in ids)
    assert not llm._requests
    assert llm.step() == []


def test_interrupts_leave_nothing_behind(kit: Any) -> None:
    llm = kit.llm()

    def model(history: tuple[int, ...]) -> Any:
        if len(history) > 8:
            raise KeyboardInterrupt
        return kit.hashed(history)

    llm.executor.model = model
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "x"], LONG)
    llm.executor.model = kit.hashed
    assert not llm.has_unfinished
    assert llm.scheduler.kv_cache.num_used == 0
    assert llm.generate("hello", LONG)[0].token_ids == kit.llm().generate("hello", LONG)[0].token_ids


def test_errors_are_reported_per_request(kit: Any) -> None:
    def model(history: tuple[int, ...]) -> Any:
        return np.full(kit.VOCAB, np.nan, np.float32) if history[0] == 5 else kit.hashed(history)

    bad, good = kit.llm(model).generate([[5, 6], [7, 8]], LONG)
    assert (bad.finish_reason, bad.error) == ("error", "the model computed logits that are not finite")
    assert good.finish_reason == "length"


def test_chat(kit: Any) -> None:
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    tokenizer = kit.tokenizer(chat_template=template)
    prompt = [1, *kit.ids("hi"), 2, 1]
    llm = kit.llm(kit.scripted({tuple(prompt): [*kit.ids("yes"), 2]}), tokenizer=tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(messages)
    assert (result.text, list(result.prompt_token_ids)) == ("yes", prompt)
    assert [r.text for r in llm.chat([messages, messages])] == ["yes", "yes"]
    assert "".join(d.text for d in llm.stream(messages)) == "yes"
    assert "".join(d.text for d in llm.stream(prompt, chat=True)) == "yes"
    assert list(llm.chat(messages, add_generation_prompt=False)[0].prompt_token_ids) == prompt[:-1]
    (long,) = kit.llm(tokenizer=tokenizer, eos=()).chat(messages)
    assert long.usage.total_tokens == 512  # no max_tokens: the room left
    llm.close()


def test_without_a_tokenizer(kit: Any) -> None:
    from llmc.runtime.llm import LLM

    sizes = kit.config()
    llm = LLM.from_parts(kit.PagedExecutor(kit.hashed, sizes), sizes, vocab_size=kit.VOCAB)
    (result,) = llm.generate([[5, 6]], LONG)
    assert (result.text, len(result.token_ids)) == ("", 20)
    for params, field in ((SamplingParams(stop=["a"]), "stop"), (SamplingParams(bad_words=["a"]), "bad_words")):
        with pytest.raises(RequestError, match=f"{field}: the engine has no tokenizer"):
            llm.generate([[5]], params)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])
