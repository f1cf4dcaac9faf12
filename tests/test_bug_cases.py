"""The collected bugs of systems like this one: each has tests here that carry its id in their name or docstring."""

import ast
import re
from pathlib import Path

import pytest

CASES = {
    "API-03": "a step that fails ends only its own requests, in a stream by an event",
    "API-05": "repetition in a schema is not expanded, and what is too large is refused",
    "API-10": "stop and length at the limit",
    "API-12": "max_tokens 0 with echo scores the prompt",
    "API-13": "a pattern with nothing to repeat is refused",
    "API-14": "an empty constraint is none",
    "API-16": "minus infinity is a number of JSON",
    "API-17": "numbers that are none, and out of bounds, are refused",
    "API-19": "a stream has one chunk of usage, the last one",
    "API-22": "a prompt longer than the context is refused with both numbers",
    "API-25": "a NUL in a pattern is refused, not its end",
    "API-26": "an expression that is not valid is refused",
    "API-28": "JSON has no raw control characters in its strings",
    "API-29": "a pool smaller than the model refuses what never fits, and goes on",
    "API-30": "ids that clients choose are only echoed",
    "API-31": "biases with keys that are no token ids are refused",
    "ART-03": "an engine of another format or target is refused before its weights are looked at",
    "ART-04": "a build that is killed, interrupted or out of disk leaves the old engine, the new one or none",
    "ART-06": "bfloat16 and 8-bit floats are read exactly, with NaN and subnormals",
    "ART-09": "one broken engine hides none of its neighbours",
    "ART-10": "files are verified by path, though two have the same digest",
    "ART-11": "a tensor that is there under an alias of the metadata is found",
    "ART-12": "shards that the index names and nobody has are listed before any work",
    "ART-14": "a dtype that is too new is refused by name",
    "ART-15": "sizes whose product overflows are refused without memory for them",
    "ART-18": "a config without a known architecture is refused with those that are supported",
    "ART-21": "a shard that was cut short stops the build with both sizes",
    "BAT-01": "choices that are streamed share no state",
    "BAT-06": "penalties and filters stay within their request",
    "BAT-08": "contexts that outgrow the pool wait or are preempted, and all end well",
    "BAT-10": "bad words hold for each choice",
    "BAT-11": "requests with and without logprobs share a batch",
    "BAT-12": "two lists of prompts at once do not meet",
    "BAT-13": "a seed gives the same tokens next to any neighbour",
    "KV-01": "prefix cache and drafts together change nothing",
    "KV-02": "what nobody has written in a block, NaN at worst, changes nothing",
    "KV-03": "preempted and computed again is bit-equal",
    "KV-06": "drafts take no block that somebody needs",
    "KV-07": "a step writes to blocks of its own requests only",
    "KV-09": "a request that outgrows the pool alone ends by length, and the next one runs",
    "KV-10": "equal prompts of one step share nothing that is not computed yet",
    "KV-11": "no draft is written past the blocks of a sequence",
    "KV-15": "the same prompt through the cache gives the same text every time",
    "KV-18": "tokens found in the cache are counted once",
    "KV-20": "no block is handed out twice",
    "LIF-04": "more clients than slots: all end",
    "LIF-06": "scores of a long prompt are computed in pieces",
    "LIF-07": "a deadline that has passed ends at once",
    "LIF-08": "the memory of the host does not grow with the number of requests",
    "LIF-09": "one that waits and is cancelled never runs, the others do",
    "LIF-12": "clients that close at any point",
    "LIF-13": "a client that does not read holds up nobody, and is dropped",
    "MTH-01": "norms round like Llama's or like Gemma's within a bfloat16 ulp",
    "MTH-04": "a stale head beside tied embeddings is warned of and not used",
    "MTH-05": "zero points of GPTQ, in both formats",
    "MTH-07": "yarn that is switched off, by factor 1 or by flag",
    "MTH-08": "scales and zeros of a quantized product are what they are called",
    "MTH-09": "a window of w sees w tokens",
    "MTH-11": "a head size that is not hidden size / heads",
    "MTH-12": "token ids of added tokens are in range",
    "MTH-13": "activations beyond float16 are kept; a row that is not finite is an error of its request",
    "MTH-15": "linear and dynamic rope; an unknown kind is refused",
    "MTH-23": "local and global layers have ropes of their own",
    "MTH-24": "both mscales of yarn",
    "MTH-25": "longrope has one set of factors for an engine",
    "MTH-26": "the order of GPTQ columns by their activations",
    "MTH-29": "biases of attention are used where they are, and none is left over",
    "MTH-31": "a group size of -1 is one group per channel",
    "MTH-32": "a head that is missing is an error, never random",
    "MTH-34": "an attention factor that is given goes before the default",
    "MTH-37": "a window that is off is full attention",
    "SEC-03": "files that declare more than they have are refused",
    "SEC-04": "variables of the template do not replace its arguments",
    "SEC-06": "keys are compared as digests",
    "SEC-08": "compiled constraints are kept within a limit of bytes",
    "SEC-10": "every route and method needs the key",
    "SEC-12": "names and links do not lead out of a model or an engine",
    "SEC-15": "pickles are never opened",
    "SEC-18": "more sequences than a request may have are refused",
    "SEC-19": "equal hashes do not make two prompts share what was computed",
    "SEC-20": "web pages do not reach the server",
    "SPC-01": "tokens that are drawn have the model's distribution, whatever was drafted",
    "SPC-06": "the first draft is verified",
    "SPC-07": "limits and log-probabilities are exact where drafts are accepted",
    "SPC-08": "a draft engine that is the target is always right",
    "SPC-09": "drafts change nothing, on quantized weights either",
    "STP-01": "text held back for a stop string comes at the end",
    "STP-02": "bad words of several tokens do not slip through as drafts",
    "STP-04": "two tokens of the same text are both reported",
    "STP-07": "nothing is doubled in a stream with stop strings",
    "STP-09": "bytes that are no text end their own request, with a proper message",
    "STP-15": "an end at once gives an empty text",
    "STP-16": "an empty stop string is refused",
    "STP-17": "a token with wanted text and a stop string is cut and counted",
    "STP-18": "min_tokens holds for each of several end tokens",
    "STP-20": "end tokens have no text unless it is asked for",
    "STP-21": "no half of a character is shown",
    "TOK-03": "ignoring the end ignores each of the end tokens",
    "TOK-06": "a BOS that the template or the user wrote stays",
    "TOK-09": "the vocabulary size is no token id",
    "TOK-11": "control tokens that a user writes are text",
    "TOK-12": "one BOS if the template writes it and the tokenizer would add it",
    "TOK-13": "max_new_tokens of the model is a default and no ceiling",
    "TOK-14": "end tokens of the generation config count",
    "TOK-15": "a list of end tokens, and no padding token",
}

ID = re.compile(r"(?<![a-z])(api|art|bat|kv|lif|mth|sec|spc|stp|tok)[-_](\d\d)(?!\d)", re.IGNORECASE)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Id to the tests that carry it."""
    tests: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        if path != Path(__file__):
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(node, "name", "")
                if isinstance(node, ast.FunctionDef) and name.startswith("test_"):
                    for area, number in ID.findall(f"{name} {ast.get_docstring(node)}"):
                        tests.setdefault(f"{area.upper()}-{number}", []).append(f"{path.stem}::{name}")
    return tests


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_a_test(case: str, found: dict[str, list[str]]) -> None:
    assert found.get(case), f"no test carries {case}: {CASES[case]}"


def test_each_id_is_a_case(found: dict[str, list[str]]) -> None:
    assert set(found) <= set(CASES), {case: found[case] for case in set(found) - set(CASES)}
