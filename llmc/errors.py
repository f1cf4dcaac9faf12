"""Every error that llmc raises on purpose, each with the exit code that the command ends with."""

from collections.abc import Mapping
from typing import Any, ClassVar


class LlmcError(Exception):
    """The base of them all: the CLI prints it without a traceback. Says what, where, and what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(LlmcError):
    """An option or argument makes no sense."""

    exit_code = 2


class CompileError(LlmcError):
    """The model can't be compiled as asked (an unsupported feature, named)."""


class GateError(LlmcError):
    """A check that guards quality failed. ``figures``: what was measured, as in report.json, if it was."""

    exit_code = 3

    def __init__(self, message: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.figures = figures


class CheckpointError(LlmcError):
    """A model directory or file is damaged, incomplete or contradicts itself."""

    exit_code = 4


class EngineError(LlmcError):
    """An engine directory is missing, damaged or of another version."""

    exit_code = 4


class KernelError(LlmcError):
    """A kernel is missing from this build, or was called with arguments that it does not take."""


class RequestError(LlmcError):
    """A request has a value that is out of bounds, or can never be served. ``field`` names the culprit, if any."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class ResourceError(LlmcError):
    """Memory or disk ran out, or is known not to suffice."""

    exit_code = 5
