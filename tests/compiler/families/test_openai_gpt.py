"""openai_gpt: its fix is needed, and makes it right."""

from packed import check_fix

from llmc.compiler.families import openai_gpt


def test_fix() -> None:
    check_fix(openai_gpt.FIX)
