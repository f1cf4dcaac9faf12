"""The process in which constraints are compiled first: python -m llmc.runtime.constraints.worker, by grammars.py.

What needs more than 2 s or 64 MiB, or crashes the library, does so here.
"""

from __future__ import annotations

import ctypes
import os
import sys

from llmc.runtime.constraints.grammars import library_tokenizer, make_matcher
from llmc.runtime.limited_process import limit_memory, read, start_clock, write

MAX_MEMORY = 64 << 20
"""Bytes for one constraint."""
PER_BYTE, FIXED = 64, 64 << 10
"""Estimate of what a compiled one takes, where the C library does not tell."""


def main() -> None:
    """Serve: first the tokens, then pairs of kind and grammar, one answer each."""
    setup = read(sys.stdin.buffer)
    if setup is None:
        return
    tokenizer = library_tokenizer([token.encode("latin-1") for token in setup.pop("tokens")], setup["special"])
    make_matcher(tokenizer, 'start: "a"', "grammar").compute_bitmask()
    with open(os.devnull, "wb") as nowhere:  # the library tells there how it failed; grammars.py says so itself
        os.dup2(nowhere.fileno(), 2)
    limit_memory(MAX_MEMORY)
    write(sys.stdout.buffer, {})
    while (request := read(sys.stdin.buffer)) is not None:
        kind, grammar = request
        start_clock()
        before = allocated()
        matcher = make_matcher(tokenizer, grammar, kind)
        if not matcher.is_error():
            matcher.compute_bitmask()
        used = allocated() - before
        problem = matcher.get_error()
        del matcher
        write(
            sys.stdout.buffer,
            {"error": problem} if problem else {"bytes": max(used, FIXED + PER_BYTE * len(grammar))},
        )


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")] + [
        (name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def allocated() -> int:
    """Bytes that the C library's heap has handed out; 0 if it does not tell."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Mallinfo2
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


if __name__ == "__main__":
    main()
