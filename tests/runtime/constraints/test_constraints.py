"""Output that keeps to a grammar, with models that want anything but that."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from llmc import SamplingParams
from llmc.errors import RequestError
from llmc.runtime.constraints import ConstraintSpec, compile_constraint
from llmc.runtime.sampling import apply_constraint

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 'quo"te', "é"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"t": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}]}},
    "$ref": "#/$defs/t",
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "tree": TREE,
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$", "maxLength": 9},
    "number": {"type": "number", "minimum": -1, "exclusiveMaximum": 10},
    "date": {"type": "string", "format": "date"},
    "union": {"oneOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": {"const": [1, "y"]}},
                                              "required": ["x"], "additionalProperties": False}]},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": None}], "items": False, "minItems": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(kit: Any) -> Any:
    """Random logits that depend on every token."""
    result = kit.llm()
    yield result
    result.close()


def run(llm: Any, constraint: Any, prompt: Any = "hello", **params: Any) -> Any:
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 400} | params
    return llm.generate(prompt, SamplingParams(constraint=constraint, **params))[0]


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(llm: Any, name: str) -> None:
    """What ends by itself is valid, at any temperature; what max_tokens cuts says so."""
    texts, validator = set(), jsonschema_rs.validator_for(SCHEMAS[name])
    for seed in range(12):
        result = run(llm, {"json_schema": SCHEMAS[name]}, seed=seed, temperature=seed % 3)
        assert result.error is None
        if result.finish_reason == "stop":
            assert validator.is_valid(strict_json(result.text)), result.text
            texts.add(result.text)
        else:
            assert result.finish_reason == "length" and len(result.token_ids) == 400
    assert len(texts) > 2


def test_api_28_json_objects_have_no_raw_control_characters(kit: Any) -> None:
    """The model wants newlines and quotes above all, also within strings."""
    wanted = kit.one_hot(kit.ids("\n")[0], 4) + kit.one_hot(kit.ids('"')[0], 3) + kit.one_hot(kit.ids("}")[0], 3)
    llm = kit.llm(lambda history: wanted + kit.hashed(history))
    ended = 0
    for seed in range(20):
        result = run(llm, {"json_object": True}, seed=seed)
        if result.finish_reason == "stop":
            assert isinstance(strict_json(result.text), dict)
            ended += 1
    assert ended > 10
    llm.close()


def test_sentencepiece_and_the_first_space(kit: Any) -> None:
    """The space that such tokenizers drop at the start of a text is a part of a constrained one."""
    llm = kit.llm(spec=kit.sentencepiece_spec(), eos=[2])
    for pattern in (" hi[abc]+", "hi the", r"[ a-z]{3,9}\."):
        for prompt in ("hi", [1]):
            result = run(llm, {"regex": pattern}, prompt)
            assert result.finish_reason == "stop" and re.fullmatch(pattern, result.text), (pattern, result.text)
    assert (
        strict_json(run(llm, {"json_schema": {"type": "array", "items": {"const": "é"}, "maxItems": 2}}).text)
        is not None
    )
    llm.close()


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"\d{3}-[é☃]+x?"}, r"[0-9]{3}-[é☃]+x?"),
        ({"regex": "^(foo|bar)+$"}, "(foo|bar)+"),
        ({"choice": ["foo", "foo bar", 'a"\\/.*', "☃"]}, r'foo|foo bar|a"\\/\.\*|☃'),
        ({"grammar": 'start: "a"+ tail\ntail: /[0-9]/ | "(" tail ")"'}, r"a+\(*[0-9]\)*"),
    ],
)
def test_other_kinds(llm: Any, constraint: Any, pattern: str) -> None:
    texts = {run(llm, constraint, seed=seed, temperature=2, max_tokens=100).text for seed in range(12)}
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(texts) > 2


def test_choices_have_their_own_state(llm: Any) -> None:
    result = run(llm, {"json_schema": PERSON}, n=4, logprobs=2)
    assert len({choice.text for choice in result.choices}) == 4
    for choice in result.choices:
        assert choice.finish_reason == "stop" and set(strict_json(choice.text)) == {"name", "age", "tags"}
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)


def test_alone_or_among_others_the_same(kit: Any, llm: Any) -> None:
    """Constrained next to free ones, with preemption: the same tokens and bits."""
    cases = [SamplingParams(constraint=c, temperature=t, seed=7, max_tokens=60, logprobs=0) for t in (0, 1)
             for c in (None, {"json_schema": PERSON}, {"regex": "[a-z ]+"}, {"json_object": True})]  # fmt: skip
    prompts = [kit.ids(f"prompt {i}") for i in range(len(cases))]
    alone = [llm.generate(p, c)[0].choices for p, c in zip(prompts, cases, strict=True)]
    small = kit.llm(num_blocks=12)
    together = [result.choices for result in small.generate(prompts, cases)]
    assert small.scheduler.statistics.preemptions > 0
    assert together == alone
    small.close()


def test_ends(llm: Any) -> None:
    """At a limit, at a stop string, and only where the text is complete."""
    cut = run(llm, {"regex": "[ab]{40,}"}, max_tokens=5)
    assert (cut.finish_reason, len(cut.text), len(cut.token_ids) <= 5) == ("length", len(cut.text), True)
    stopped = run(llm, {"regex": "a{1,9}STOP[b]+"}, stop=["OP"])
    assert stopped.finish_reason == "stop" and re.fullmatch("a{1,9}ST", stopped.text)
    exact = run(llm, {"regex": "[abc]{3}"}, max_tokens=3, min_tokens=3)  # what can't go on ends
    assert exact.finish_reason == "stop" and len(exact.text) == 3
    for seed in range(5):  # may end after three; min_tokens and ignore_eos hold for the end token
        early = run(llm, {"regex": "[abc]{3,60}"}, min_tokens=20, seed=seed)
        assert len(early.token_ids) >= 20 and re.fullmatch("[abc]{3,60}", early.text)
        whole = run(llm, {"regex": "[abc]{3,20}"}, ignore_eos=True, seed=seed)
        assert len(whole.text) == 20


def test_with_penalties_biases_and_bad_words(kit: Any, llm: Any) -> None:
    result = run(llm, {"regex": "[ab]{30}"}, bad_words=["aa", "bb"], repetition_penalty=1.3, frequency_penalty=0.5)
    assert result.text in ("ab" * 15, "ba" * 15)
    biased = run(llm, {"regex": "[abc]{5}"}, logit_bias={kit.ids("c")[0]: 100.0, 0: 100.0, 2: 100.0})
    assert biased.text == "ccccc"  # special tokens have no way in
    impossible = run(llm, {"regex": "abc"}, bad_words=["b"])
    assert impossible.finish_reason == "error" and "no token is allowed" in impossible.error
    over = run(llm, {"regex": "a*"}, bad_words=["a"])
    assert (over.finish_reason, over.text) == ("stop", "")


def test_the_mask(kit: Any, llm: Any) -> None:
    constraint = compile_constraint(ConstraintSpec("regex", "ab?"), llm.tokenizer)
    a, b, ab = kit.ids("a")[0], kit.ids("b")[0], llm.tokenizer.encode("ab")[0]
    for token, allowed, complete in ((None, {a, ab}, False), (a, {b}, True), (b, set(), True)):
        if token is not None:
            constraint.accept(token)
        scores = np.zeros(kit.VOCAB + 40, np.float32)
        apply_constraint(scores, constraint, [2])
        assert set(np.flatnonzero(np.isfinite(scores))) == allowed | ({2} if complete else set())
        assert constraint.is_complete == complete
    assert constraint.is_finished


def test_logits_that_are_not_finite_are_still_found(kit: Any) -> None:
    llm = kit.llm(lambda history: np.full(kit.VOCAB, np.nan, np.float32))
    assert "not finite" in run(llm, {"regex": "a"}).error
    llm.close()


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({"regex": "["}, "regex"),  # API-26
        ({"regex": "*a"}, "regex"),
        ({"regex": "(?<x"}, "regex"),
        ({"regex": "a|+"}, "regex"),
        ({"regex": r"(a)\1"}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": "a\0b"}, "regex"),  # API-25
        ({"grammar": "start: /a\0/"}, "grammar"),
        ({"json_schema": {"type": "string", "pattern": "a\0b"}}, "json_schema"),
        ({"json_schema": {"type": "string", "pattern": "^+[a-z]$"}}, "json_schema"),  # API-13
        ({"json_schema": {"patternProperties": {"*": {}}}}, "json_schema"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema"),
        ({"json_schema": {"$ref": "http://example.com/schema"}}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": 3}, "json_schema"),
        ({"json_schema": False}, "json_schema"),
        ({"json_schema": {"type": "string", "x": float("nan")}}, "json_schema"),
        ({"grammar": "start: x"}, "grammar"),
        ({"grammar": "  "}, "grammar"),
        ({"grammar": '%llguidance {}\nstart: "a"'}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"regex": "a" * (1 << 18) + "b"}, "regex"),
        ({"regex": "(" * 65 + "a" + ")" * 65}, "regex"),
        ({"grammar": "start: " + "(" * 65 + '"a"' + ")" * 65}, "grammar"),
        ({"json_object": 1}, "json_object"),
        ({"regex": "a", "grammar": 'start: "a"'}, "constraint"),
        ({"xml": "a"}, "constraint"),
        ("a+", "constraint"),
    ],
)  # fmt: skip
def test_what_is_refused(llm: Any, constraint: Any, field: str) -> None:
    """API-13, API-25 and API-26 among them: the error names the field, and the next request runs."""
    with pytest.raises(RequestError) as refused:
        run(llm, constraint)
    assert refused.value.field == field
    assert "start:" not in str(refused.value) and "llguidance" not in str(refused.value).replace("(%llguidance)", "")


@pytest.mark.parametrize("constraint", [None, {}, {"regex": ""}, {"grammar": ""}, {"json_schema": None}])
def test_api_14_empty_is_unset(constraint: Any) -> None:
    assert SamplingParams(constraint=constraint).constraint is None


def test_schemas_nested_deeply() -> None:
    assert ConstraintSpec("json_schema", '{"a":' * 62 + "1" + "}" * 62)
    with pytest.raises(RequestError, match="nested"):
        ConstraintSpec("json_schema", '{"a":' * 70 + "1" + "}" * 70)
    with pytest.raises(RequestError, match="nested"):
        ConstraintSpec("json_schema", '{"a":' * 50_000)


def test_patterns_that_only_look_odd(llm: Any) -> None:
    for pattern in (r"\^\+[*+?]{2}", "(?:a)+", "a{2}", r"[(|^]*x", r"\(+", "a??b"):
        assert run(llm, {"regex": pattern}).error is None
    data = {"type": "object", "properties": {"pattern": {"const": "^+"}}, "required": ["pattern"],
            "additionalProperties": False, "examples": [{"pattern": "*"}]}  # fmt: skip
    assert strict_json(run(llm, {"json_schema": data}).text) == {"pattern": "^+"}


def test_api_05_repetition_is_not_expanded(llm: Any) -> None:
    for schema in (
        {"type": "string", "maxLength": 65536},
        {"type": "array", "maxItems": 1000, "items": {"type": "string", "maxLength": 2000}},
    ):
        assert run(llm, {"json_schema": schema}, max_tokens=20).error is None
    assert llm.tokenizer.grammars.cached_bytes < 8 << 20


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(6000)}}},
        {"grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"'},
    ],
    ids=["wide", "doubling"],
)
def test_bombs_are_refused_and_the_next_one_works(llm: Any, constraint: Any) -> None:
    with pytest.raises(RequestError):
        run(llm, constraint)
    assert run(llm, {"regex": "ok"}).text == "ok"


def test_forced_texts_and_ambiguity_have_bounded_steps(llm: Any) -> None:
    """Texts that are forced without end, and grammars with endless readings: no step does unbounded work."""
    doubling = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(30)) + '\na30: "x"'
    for constraint in ({"regex": "(a{1000}){1000}"}, {"grammar": doubling}):
        result = run(llm, constraint, max_tokens=30)
        assert (result.finish_reason, len(set(result.text))) == ("length", 1)
    result = run(llm, {"grammar": 'start: e\ne: e e | "a" | "a" e | e "a"'}, logit_bias={2: -100.0}, max_tokens=300)
    assert result.finish_reason in ("error", "stop", "length")
    assert result.error is None or "limits" in result.error


def test_sec_08_the_cache_is_bounded(kit: Any) -> None:
    tokenizer = kit.tokenizer(grammar_cache_bytes=1 << 20)
    specs = [ConstraintSpec("json_schema", json.dumps({"const": f"{i}" + "x" * 2000})) for i in range(40)]
    for spec in specs:
        compile_constraint(spec, tokenizer)
        assert tokenizer.grammars.cached_bytes <= 1 << 20
    kept = set(tokenizer.grammars._cache)
    assert specs[-1] in kept and specs[0] not in kept and len(kept) > 2
    constraint = compile_constraint(specs[-1], tokenizer)
    assert constraint is not compile_constraint(specs[-1], tokenizer)  # states are not shared
    tokenizer.close()


def test_sec_08_5000_schemas_of_2_kb(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size; the first one is tried in the process that has limits, the others take its word for their size."""
    tokenizer = kit.tokenizer(grammar_cache_bytes=4 << 20)
    sizes: list[int] = []
    found = tokenizer.grammars._try

    def first(kind: str, grammar: str) -> int:
        sizes.append(sizes[0] if sizes else found(kind, grammar))
        return sizes[0]

    monkeypatch.setattr(tokenizer.grammars, "_try", first)
    memory = []
    for number in range(5000):
        text = json.dumps({"type": "integer", "minimum": number, "description": "x" * 2000})
        compile_constraint(ConstraintSpec("json_schema", text), tokenizer)
        if number in (500, 4999):
            gc.collect()
            lines = re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", Path("/proc/self/status").read_text())
            memory.append(sum(map(int, lines)) << 10)
    assert len(sizes) == 5000 and 1 < len(tokenizer.grammars._cache) <= (4 << 20) // sizes[0]
    assert memory[1] - memory[0] < tokenizer.grammars.cache_bytes
    tokenizer.close()


def test_without_a_tokenizer(kit: Any) -> None:
    from llmc.runtime.llm import LLM

    llm = LLM.from_parts(kit.PagedExecutor(kit.hashed, kit.config()), kit.config(), vocab_size=kit.VOCAB)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate([5], SamplingParams(constraint={"regex": "a"}))
