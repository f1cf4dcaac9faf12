"""The same bits for any number of threads: BLAS and LAPACK work on one while numbers are made that codes depend on.

LAPACK's Cholesky rounds differently on two threads than on one, and BLAS may cut sums in other places. Work is spread
over threads by the caller instead, in pieces whose number does not depend on that of the threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_lock = threading.Lock()
_users = 0
_limit: Any = None


@contextmanager
def single_threaded() -> Iterator[None]:
    """Holds BLAS to one thread, until the last of those who ask for it at the same time leaves."""
    global _users, _limit
    with _lock:
        if not _users:
            _limit = _controller().limit(limits=1, user_api="blas")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _limit.restore_original_limits()


@cache
def _controller() -> Any:
    """What is loaded by now: numpy's BLAS is. Installations that only run engines lack threadpoolctl."""
    import numpy  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
