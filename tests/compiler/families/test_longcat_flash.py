"""longcat_flash: its fix is needed, and makes it right."""

from packed import check_fix

from llmc.compiler.families import longcat_flash


def test_fix() -> None:
    check_fix(longcat_flash.FIX)
