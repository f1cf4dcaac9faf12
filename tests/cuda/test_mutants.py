"""A mistake planted in a kernel is found by its tests; build_scripts/cuda_mutate.py plants more."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_mistake_is_found() -> None:
    """Of another process: mistakes run in copies of it."""
    command = [sys.executable, "-P", ROOT / "build_scripts/cuda_mutate.py", "--count", "1", "softmax"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n1 of 1 mistakes found (100.0%), of " in done.stdout, done.stdout


def test_what_changes_nothing_is_a_change_that_can_be_planted() -> None:
    sys.path.insert(0, str(ROOT / "build_scripts"))
    try:
        import cuda_mutate
    finally:
        sys.path.remove(str(ROOT / "build_scripts"))
    names = {mutant.name for source in cuda_mutate.sources(()) for mutant in cuda_mutate.mutants(source)}
    assert cuda_mutate.equal_mutants() <= names
