"""llmc: compile a Hugging Face model into an engine, then run the engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM as LLM
    from llmc.runtime.request import SamplingParams as SamplingParams

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:  # lazy, so that `import llmc` loads nothing heavy
    if name == "LLM":
        from llmc.runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from llmc.runtime.request import SamplingParams

        return SamplingParams
    if name == "__version__":
        from importlib.metadata import version

        return version("llmc-engine")
    raise AttributeError(f"module 'llmc' has no attribute {name!r}")
