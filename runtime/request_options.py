"""How a request is treated, and whether what it asks for suits the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from llmc.errors import RequestError
from llmc.runtime.constraints.base import TokenConstraint, compile_constraint
from llmc.runtime.request import SamplingParams

if TYPE_CHECKING:
    from llmc.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class RequestOptions(TypedDict, total=False):
    """How a request is treated.

    priority: a lower one is served earlier, though not before more than request.OVERTAKEN older ones for each level.
    deadline: of time.monotonic(); what is not done by then ends with FinishReason.TIMEOUT.
    salt: the prefix cache shares what it holds between requests of the same salt only.
    adapter: the name of a LoRA adapter that the LLM was given.
    constraint: that of the SamplingParams, compiled (`compile_constraint`) where that holds up nobody.
    """

    priority: int
    deadline: float | None
    salt: str
    adapter: str | None
    constraint: TokenConstraint | None


def check_options(options: RequestOptions, adapters: Sequence[str]) -> int:
    """Look at each; the number of the adapter, -1 for none.

    Raises:
        RequestError: one is of the wrong type; names it.
    """
    if type(priority := options.get("priority", 0)) is not int:
        raise RequestError(f"expected a whole number, found {priority!r}", "priority")
    deadline = options.get("deadline")
    if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, int | float)):
        raise RequestError(f"expected seconds of the monotonic clock, found {deadline!r}", "deadline")
    if not isinstance(salt := options.get("salt", ""), str):
        raise RequestError(f"expected a text, found {salt!r}", "salt")
    if (adapter := options.get("adapter")) is None:
        return -1
    if adapter not in adapters:
        raise RequestError(f"there is no adapter {adapter!r}; known: {', '.join(adapters) or 'none'}", "adapter")
    return adapters.index(adapter)


def with_constraint(options: RequestOptions, params: SamplingParams, tokenizer: Tokenizer | None) -> RequestOptions:
    """The options with the compiled constraint of the parameters.

    Raises:
        RequestError: it can't be compiled.
    """
    if params.constraint is None or options.get("constraint") is not None:
        return options
    if tokenizer is None:
        raise RequestError("the engine has no tokenizer, so there is no text to constrain", params.constraint.kind)
    return {**options, "constraint": compile_constraint(params.constraint, tokenizer)}


def check_request(prompt: Sequence[int], params: SamplingParams, vocab_size: int, has_tokenizer: bool) -> None:
    """Look at what depends on the model.

    Raises:
        RequestError: a token is not one of the model's, or there is no text to look at; names the field.
    """
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(f"{token!r} is not a token id below {vocab_size}", "prompt")
    for name in ("logit_bias", "stop_token_ids"):
        for token in getattr(params, name):
            if token >= vocab_size:
                raise RequestError(f"{token} is not a token id below {vocab_size}", name)
    for name in ("stop", "bad_words"):
        if getattr(params, name) and not has_tokenizer:
            raise RequestError("the engine has no tokenizer, so there is no text to look at", name)


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    """One set of parameters for each of ``count`` prompts.

    Raises:
        RequestError: there are more or fewer.
    """
    each = [params] * count if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise RequestError(f"{len(each)} sets of parameters for {count} prompts", "params")
    return each


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, also of a single one."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else prompts  # type: ignore[list-item,return-value]
