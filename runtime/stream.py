"""The answer to one request as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmc.runtime.output import Delta, next_delta
from llmc.runtime.request import Request

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM


class Stream(Iterator[Delta]):
    """The deltas of one request. `close` (or dropping it) aborts the request if it has not ended."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm, self._request = llm, request

    def __next__(self) -> Delta:
        while True:
            for sequence in self._request.sequences:
                if sequence in self._llm._touched:
                    del self._llm._touched[sequence]
                    return next_delta(sequence)
            if self._request.finished:
                self.close()
                raise StopIteration
            self._llm._advance()

    def close(self) -> None:
        """Abort."""
        self._llm.abort(self._request.id)

    def __del__(self) -> None:
        self.close()
