"""bloom: its fix is needed, and makes it right."""

from packed import check_fix

from llmc.compiler.families import bloom


def test_fix() -> None:
    check_fix(bloom.FIX)
