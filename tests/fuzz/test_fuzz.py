"""S18: the corpus of each target, and what a few changes make of it. build_scripts/fuzz.py goes on for longer."""

from __future__ import annotations

import fuzz_targets
import pytest
from fuzz_inputs import changed
from hypothesis import given, settings


@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_the_corpus_and_what_is_near_it(name: str) -> None:
    seeds = fuzz_targets.corpus(name)
    for seed in seeds:
        fuzz_targets.run(name, seed)

    @settings(max_examples=6 if name in ("template", "grammar") else 100)
    @given(changed(seeds))
    def near(data: bytes) -> None:
        fuzz_targets.run(name, data)

    near()


def test_each_folder_is_a_target() -> None:
    assert {path.name for path in fuzz_targets.CORPUS.iterdir()} == set(fuzz_targets.TARGETS)
