"""A directory that appears at its place whole or not at all.

It is written beside the target under a hidden name, flushed to disk, and renamed; where an engine is replaced, the two
change places in one step. A lock file keeps a second builder out; the system drops the lock when its holder dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from llmc.errors import ResourceError, UsageError
from llmc.runtime import manifest
from llmc.runtime.manifest import FileEntry

AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
"""Flags of renameat2(2)."""

OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

WRITE_BYTES = 1 << 20


class Staging:
    """The directory in the making; ``files`` has size and SHA-256 of each file written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, FileEntry] = {}

    def write(self, name: str, content: bytes) -> None:
        """Write a file; an earlier one of that name is replaced.

        Raises:
            ResourceError: the disk is full or fails.
        """
        self.write_stream(name, [content])

    def write_stream(self, name: str, pieces: Iterable[Any], progress: Callable[[int], None] = lambda _: None) -> None:
        """Write a file from pieces (bytes-like); ``progress`` is told the bytes of each.

        Raises:
            ResourceError: as ``write``.
        """
        path = self.path / name
        digest = hashlib.sha256()
        size = 0
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
            with open(path, "wb", buffering=0) as file:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    _write_all(file, view)
                    digest.update(view)
                    size += len(view)
                    progress(len(view))
                os.fsync(file.fileno())
        self.files[name] = FileEntry(digest.hexdigest(), size)


def _write_all(file: IO[bytes], view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


@contextmanager
def disk_errors(path: Path, kept: str = "nothing was left there") -> Iterator[None]:
    """Say what went wrong with a file, and what is ``kept``.

    Raises:
        ResourceError: the disk is full or fails.
        UsageError: the file can't be written.
    """
    try:
        yield
    except OSError as problem:
        if problem.errno in OUT_OF_SPACE:
            free = shutil.disk_usage(path.parent if path.parent.exists() else path.parent.parent).free
            raise ResourceError(
                f"{path.parent}: the disk is full ({problem.strerror}; {free} bytes are free); {kept}"
            ) from None
        if problem.errno == errno.EIO:
            raise ResourceError(f"{path}: the disk failed ({problem.strerror}); {kept}") from None
        raise UsageError(f"{path}: can't be written ({problem.strerror})") from None


def check_target(target: Path, force: bool) -> Path:
    """Where the directory will really be, if it may be made there.

    Raises:
        UsageError: something is there already, and may not be replaced.
    """
    target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        raise UsageError(f"{target}: the folder {target.parent} does not exist")
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return target
    if not target.is_dir() or not (target / manifest.NAME).exists():
        raise UsageError(f"{target}: exists and is no engine; choose another name")
    if not force:
        raise UsageError(f"{target}: there is an engine already; pass --force to replace it, or choose another name")
    return target


@contextmanager
def stage(target: Path, force: bool = False) -> Iterator[Staging]:
    """Lock the target, and give a directory to write to, which takes its place at the end; on an error it is removed.

    Raises:
        UsageError: the target exists and may not be replaced, or another build for it is running.
        ResourceError: the disk is full or fails.
    """
    target = check_target(target, force)
    work = target.with_name(f".{target.name}.llmc-build")
    with _locked(target):
        try:
            with disk_errors(work):
                _remove(work)  # left over by a build that was killed
                work.mkdir()
            yield (staging := Staging(work))
            check_target(target, force)
            with disk_errors(work):
                _sync_directories(staging.path)
                _publish(work, target)
        finally:
            _remove(work)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    lock = target.with_name(f".{target.name}.llmc-lock")
    with disk_errors(lock):
        file = _take(lock, target)
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()}".encode())
        yield
    finally:
        lock.unlink(missing_ok=True)  # before the lock is released: whoever waits sees that the name is gone
        file.close()


def _take(lock: Path, target: Path) -> IO[bytes]:
    while True:
        file = open(lock, "ab+", buffering=0)  # noqa: SIM115 - it holds the lock until it is closed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(100).decode(errors="replace") or "another process"
            file.close()
            raise UsageError(f"{target}: {owner} is building this engine now; wait for it, or end it") from None
        except BaseException:
            file.close()
            raise
        try:
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                return file
        except FileNotFoundError:
            pass
        file.close()  # its builder has just finished and removed it: take the next one


def _remove(path: Path) -> None:
    if os.path.lexists(path):
        shutil.rmtree(path)


def _sync_directories(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync(Path(folder))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(work: Path, target: Path) -> None:
    """One rename; if an engine is there, it is what ``work`` names afterwards."""
    replace = os.path.lexists(target)
    try:
        _rename(work, target, RENAME_EXCHANGE if replace else RENAME_NOREPLACE)
    except NotImplementedError:
        old = target.with_name(f".{target.name}.llmc-old")
        _remove(old)
        if replace:
            os.rename(target, old)
        os.rename(work, target)
        _remove(old)
    _sync(target.parent)


def _rename(source: Path, target: Path, flags: int) -> None:
    if not sys.platform.startswith("linux"):
        raise NotImplementedError
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):  # an old kernel, or a file system without it
        raise NotImplementedError
    raise OSError(code, os.strerror(code), str(target))
