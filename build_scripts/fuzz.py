"""Feeds readers of bytes that nobody vouches for with changed inputs until a time is over or one breaks.

Usage: python build_scripts/fuzz.py --target gguf --seconds 600    (no target: each in turn)

What breaks a reader is made small and written to tests/fuzz/corpus, where the tests keep it from breaking again.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import click
import hypothesis

FOLDER = Path(__file__).parents[1] / "tests/fuzz"
sys.path.insert(0, str(FOLDER))

import fuzz_targets  # noqa: E402
from fuzz_inputs import changed  # noqa: E402


@click.command(help=__doc__)
@click.option("--target", type=click.Choice(list(fuzz_targets.TARGETS)), help="Default: all of them.")
@click.option("--seconds", default=20.0, show_default=True, help="For each target.")
def main(target: str | None, seconds: float) -> None:
    """Exit code 1 if something broke."""
    broken = [name for name in ([target] if target else fuzz_targets.TARGETS) if not _fuzz(name, seconds)]
    sys.exit(1 if broken else 0)


def _fuzz(name: str, seconds: float) -> bool:
    end, count, last = time.monotonic() + seconds, 0, b""

    @hypothesis.settings(
        max_examples=500, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(changed(fuzz_targets.corpus(name)))
    def run(data: bytes) -> None:
        nonlocal count, last
        if time.monotonic() > end and not broke:
            return
        count += 1
        try:
            fuzz_targets.run(name, data)
        except BaseException:
            last = data
            broke.append(data)
            raise

    broke: list[bytes] = []
    try:
        while time.monotonic() < end:
            run()
    except Exception as problem:
        file = FOLDER / "corpus" / name / f"broke-{hashlib.sha256(last).hexdigest()[:12]}"
        file.write_bytes(last)
        click.echo(f"{name}: {type(problem).__name__}: {problem}\n  input in {file}")
        return False
    click.echo(f"{name}: {count} inputs, nothing broke")
    return True


if __name__ == "__main__":
    main()
