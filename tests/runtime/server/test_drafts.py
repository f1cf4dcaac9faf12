"""`llmc serve --spec`: what is drafted is counted, answers follow the rule of `--spec-sampling`."""

from __future__ import annotations

from typing import Any

import pytest


def answer(server: Any, **fields: Any) -> list[str]:
    body = {"prompt": "zmzmzmzmzm", "max_tokens": 40, "n": 2, "ignore_eos": True} | fields
    found = server.post("/v1/completions", body)
    assert found.status_code == 200, found.text
    return [choice["text"] for choice in found.json()["choices"]]


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_rules_of_acceptance_reach_the_server(live: Any, start: Any, rule: str) -> None:
    with start("--spec", "ngram", "--spec-tokens", "4", "--spec-sampling", rule) as server:
        assert answer(server, temperature=0) == answer(live, temperature=0)
        sampled = [answer(server, temperature=1.5, seed=seed) for seed in (3, 4, 3)]
        assert sampled[0] == sampled[2] != sampled[1]
        assert len(set(sampled[0])) == 2, "two choices of a request"
        with server.http() as client:
            rates = [
                line for line in client.get("/metrics").text.splitlines() if line.startswith("llmc_draft_acceptance{")
            ]
        assert rates and all('proposer="ngram"' in line and rule in line for line in rates)
