"""dbrx: its fix is needed, and makes it right."""

from packed import check_fix

from llmc.compiler.families import dbrx


def test_fix() -> None:
    check_fix(dbrx.FIX)
