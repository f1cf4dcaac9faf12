"""Every documented feature through the official client, sync and async, on an engine whose answers are known."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

USER_M: list[Any] = [{"role": "user", "content": "m"}]


@pytest.fixture(scope="module")
def client(live: Any) -> openai.OpenAI:
    return live.openai()


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("script", "model", "llmc")
    assert client.models.retrieve("script").id == "script"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="script", messages=USER_M, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("no", "assistant", "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 3, 5)
    assert answer.object == "chat.completion" and answer.system_fingerprint.startswith("llmc-")


def test_chat_with_parts_and_roles(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "z"},
        {"role": "user", "content": [{"type": "text", "text": "m"}], "name": "someone"},
    ]
    answer = client.chat.completions.create(model="script", messages=messages, temperature=0, user="u", store=False)
    assert answer.choices[0].message.content == "no"


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="script", messages=USER_M, temperature=0, stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "no"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(c.usage is None for c in chunks)


def test_api_19_usage_is_the_last_chunk(client: openai.OpenAI, live: Any) -> None:
    options: dict[str, Any] = {"model": "script", "temperature": 0, "n": 2, "max_tokens": 7}
    whole = client.chat.completions.create(messages=USER_M, **options)
    usage = {"include_usage": True}
    stream = client.chat.completions.create(messages=USER_M, stream=True, stream_options=usage, **options)
    chunks = list(stream)
    assert [bool(c.usage) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    text = live.post(
        "/v1/completions", {"prompt": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    ).text
    events = [line for line in text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and '"choices":[]' in events[-2]
    assert text.count('"usage":{') == 1


def test_n_choices_and_seeds(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "script", "messages": USER_M, "temperature": 1.5, "n": 3, "max_tokens": 8}
    first, second = (client.chat.completions.create(seed=5, **options) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in second.choices] and len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(seed=5, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": "script", "messages": USER_M, "temperature": 0, "logprobs": True}
    if stream:
        chunks = list(client.chat.completions.create(top_logprobs=3, stream=True, **options))
        entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    else:
        answer = client.chat.completions.create(top_logprobs=3, **options)
        entries = answer.choices[0].logprobs.content
    assert [e.token for e in entries] == ["n", "o", "</s>"]
    assert [e.bytes for e in entries] == [[110], [111], list(b"</s>")]
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob <= 0


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="script", prompt="m", temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["n", "o", "</s>"] and logprobs.text_offset == [0, 1, 2]
    assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_api_12_echo_scores_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": "script", "prompt": "a b", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        chunks = list(client.completions.create(stream=True, **options))
        text, logprobs = "".join(c.choices[0].text for c in chunks), chunks[0].choices[0].logprobs
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(**options)
        choice = answer.choices[0]
        text, logprobs, reason = choice.text, choice.logprobs, choice.finish_reason
        assert answer.usage.completion_tokens == 0
    assert (text, reason) == ("a b", "length")
    assert logprobs.tokens == ["<s>", "a", " ", "b"] and logprobs.text_offset == [0, 0, 1, 2]
    assert logprobs.token_logprobs[0] is None and all(p < 0 for p in logprobs.token_logprobs[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_a_continuation(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": "script", "prompt": "zm", "temperature": 0, "echo": True, "logprobs": 0}
    if stream:
        chunks = list(client.completions.create(stream=True, **options))
        text = "".join(c.choices[0].text for c in chunks)
        tokens = [t for c in chunks for t in c.choices[0].logprobs.tokens]
        offsets = [t for c in chunks for t in c.choices[0].logprobs.text_offset]
    else:
        choice = client.completions.create(**options).choices[0]
        text, tokens, offsets = choice.text, choice.logprobs.tokens, choice.logprobs.text_offset
    assert (text, tokens) == ("zmno", ["<s>", "z", "m", "n", "o", "</s>"])
    assert offsets == [0, 0, 1, 2, 3, 4]


def test_completions_of_several_prompts(client: openai.OpenAI, kit: Any) -> None:
    prompts: list[Any] = ["m", "w", "u"]
    answer = client.completions.create(model="script", prompt=prompts, temperature=0, max_tokens=2, n=2)
    assert [c.text for c in answer.choices] == ["no", "no", ".X", ".X", "vd.\n", "vd.\n"]
    assert [c.index for c in answer.choices] == list(range(6))
    ids = [[1, *kit.ids(p)] for p in prompts]
    texts = [""] * 3
    for chunk in client.completions.create(model="script", prompt=ids, temperature=0, max_tokens=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["no", ".X", "vd.\n"]


def test_sampling_fields(client: openai.OpenAI, kit: Any) -> None:
    def ask(prompt: str, **options: Any) -> Any:
        extra = {k: options.pop(k) for k in tuple(options) if k in ("min_tokens", "ignore_eos", "bad_words", "top_k")}
        return client.completions.create(
            model="script", prompt=prompt, temperature=0, extra_body=extra, **({"max_tokens": 8} | options)
        )

    def text(prompt: str, **options: Any) -> str:
        return ask(prompt, **options).choices[0].text

    (b,) = kit.ids("b")
    assert text("m", logit_bias={str(b): 100}, max_tokens=3) == "bbb"
    assert text("m", stop=["o"]) == "n" and text("m", stop="n") == ""
    assert text("m", min_tokens=5) != "no"
    assert ask("m", ignore_eos=True).usage.completion_tokens == 8
    assert text("m", bad_words=["no"])[:2] != "no"
    assert len(text("m", frequency_penalty=2, presence_penalty=2)) == 2
    assert text("m", top_p=0.5, seed=1) == text("m", top_k=1, max_tokens=None) == "no"


def test_best_of(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "script", "prompt": "m", "temperature": 1.5, "seed": 3, "max_tokens": 4}
    answer = client.completions.create(best_of=8, n=2, logprobs=0, **options)
    every = client.completions.create(n=8, logprobs=0, **options)
    means = sorted((sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in every.choices), reverse=True)
    found = [sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in answer.choices]
    assert found == pytest.approx(means[:2])


def test_sec_19_prefixes_are_shared_within_a_salt(client: openai.OpenAI) -> None:
    """S15; the answers are the same either way."""
    prompt = [1, *range(100, 180)]

    def ask(salt: str) -> tuple[str, int]:
        answer = client.completions.create(
            model="script", prompt=prompt, temperature=0, max_tokens=4, extra_body={"cache_salt": salt}
        )
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens

    first, again, other = ask("one"), ask("one"), ask("other")
    assert first[0] == again[0] == other[0]
    assert (first[1], other[1]) == (0, 0) and again[1] >= 64


def test_responses(client: openai.OpenAI) -> None:
    inputs: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "m"}]}]
    for value in ("m", inputs):
        answer = client.responses.create(model="script", input=value, instructions="z", temperature=0)
        assert (answer.output_text, answer.status) == ("no", "completed")
        assert answer.usage is not None and answer.usage.output_tokens == 3
    cut = client.responses.create(model="script", input="m", temperature=0, max_output_tokens=1)
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("n", "incomplete", "max_output_tokens")
    with client.responses.stream(model="script", input="m", temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "no"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes"]}}}
    assert client.responses.create(model="script", input="m", text=form).output_text == '"yes"'
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="script", input="m", previous_response_id="x")


def test_tokenize_and_detokenize(live: Any, kit: Any) -> None:
    answer = live.post("/tokenize", {"model": "script", "prompt": "hi", "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"]) == ([1, *kit.ids("hi")], 3)
    assert answer["token_strs"] == ["<s>", "h", "i"] and answer["max_model_len"] == 512
    plain = live.post("/tokenize", {"prompt": "hi", "add_special_tokens": False}).json()
    assert plain["tokens"] == kit.ids("hi")
    chat = live.post("/tokenize", {"messages": USER_M}).json()
    assert chat["tokens"] == [1, *kit.ids("m")]
    assert live.post("/detokenize", {"tokens": kit.ids("hé!")}).json() == {"prompt": "hé!"}
    assert live.post("/detokenize", {"tokens": [384]}).status_code == 400


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"temperature": 3}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "robot", "content": "m"}]}),
    ],
)
def test_errors_are_those_of_the_client(client: openai.OpenAI, kind: type[Exception], body: dict[str, Any]) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**({"model": "script", "messages": USER_M} | body))
    assert caught.value.body["message"]


def test_the_async_client_streams_side_by_side(live: Any) -> None:
    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="script", prompt=prompt, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in ("m", "zm", "om") * 6))

    texts = asyncio.run(run())
    assert texts[:2] == ["no", "no"] and texts == texts[:3] * 6
