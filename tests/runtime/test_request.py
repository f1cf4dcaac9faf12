"""SamplingParams: every field has a type and both bounds."""

import math

import numpy as np
import pytest

from llmc.errors import RequestError
from llmc.runtime.request import INT32_MAX, INT64_MAX, SamplingParams

# field: (accepted, refused)
CASES = {
    "max_tokens": ([0, 1, INT32_MAX, None], [-1, INT32_MAX + 1]),
    "min_tokens": ([0, 5], [-1, INT32_MAX + 1]),
    "n": ([1, 128], [0, -1, 129]),
    "best_of": ([1, 128], [0, 129]),
    "temperature": ([0, 1, 2, 0.5, np.float32(0.5)], [-0.1, 2.1]),
    "top_p": ([1, 0.001], [0, -0.1, 1.1]),
    "top_k": ([-1, 0, 1, INT32_MAX], [-2, INT32_MAX + 1]),
    "min_p": ([0, 1, 0.5], [-0.1, 1.1]),
    "repetition_penalty": ([10, 0.1, 1], [0, -1, 10.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "seed": ([0, -INT64_MAX - 1, INT64_MAX, np.int64(7)], [INT64_MAX + 1, -INT64_MAX - 2]),
    "logprobs": ([0, 20], [-1, 21]),
    "prompt_logprobs": ([0, 20], [-1, 21]),
    "logit_bias": (
        [{}, {5: 100}, {"5": -100.0}],
        [{"x": 1}, {-1: 1}, {5: 101}, {5: math.nan}, {"5": True}, [5], {"\u0665": 1}],
    ),
    "stop": (
        [[], "a", ["a"] * 16, ["a" * 256], ("é" * 128,)],
        [[""], ["", "x"], ["a"] * 17, ["a" * 257], [5], 5, {"a": 1}],
    ),
    "stop_token_ids": ([[], [0] * 64], [[0] * 65, [-1], ["a"], "5", [True]]),
    "bad_words": ([["a"] * 64], [["a"] * 65, [""], ["\ud800"]]),
    "ignore_eos": ([True, False], [1, 0, "true"]),
    "include_stop_str_in_output": ([True], [1]),
    "skip_special_tokens": ([True, False], [0]),
}
ALWAYS_REFUSED = [float("1e999"), math.nan, 2**63, 10**400, 10**5000, "", [1.5], object(), True, 1 + 2j, b"x"]
FLAGS = {"ignore_eos", "include_stop_str_in_output", "skip_special_tokens"}


@pytest.mark.parametrize("field", CASES)
def test_both_bounds(field: str) -> None:
    accepted, refused = CASES[field]
    for value in [*accepted, None]:  # None is "not set"
        SamplingParams(**{field: value})
        SamplingParams.from_mapping({field: value})
    for value in [*refused, *ALWAYS_REFUSED]:
        if field in FLAGS and value is True:
            continue
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field}: ")


def test_none_is_the_default() -> None:
    assert SamplingParams(temperature=None, stop=None, logit_bias=None, ignore_eos=None) == SamplingParams()  # type: ignore


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="ab", logit_bias={"7": 1}, stop_token_ids=[3], temperature=1)  # type: ignore[dict-item]
    assert params.stop == ("ab",)
    assert params.logit_bias == {7: 1.0}
    assert params.stop_token_ids == (3,)
    assert isinstance(params.temperature, float)


def test_fields_are_checked_against_each_other() -> None:
    with pytest.raises(RequestError, match="min_tokens: 5 is more than max_tokens, 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match="best_of: 1 is less than n, 2"):
        SamplingParams(n=2, best_of=1)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(RequestError, match="temprature: unknown field; known are bad_words, "):
        SamplingParams.from_mapping({"temprature": 1})


def test_stp_16_empty_stop_strings() -> None:
    for stop in ([""], ["x", ""]):
        with pytest.raises(RequestError, match=rf"stop: entry {stop.index('')} \(''\) has 0 bytes"):
            SamplingParams(stop=stop)
