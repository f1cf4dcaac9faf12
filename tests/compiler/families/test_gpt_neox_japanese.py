"""gpt_neox_japanese: its fix is needed, and makes it right."""

from packed import check_fix

from llmc.compiler.families import gpt_neox_japanese


def test_fix() -> None:
    check_fix(gpt_neox_japanese.FIX)
