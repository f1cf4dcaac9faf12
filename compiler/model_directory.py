"""Opens the files of a model directory: regular files in it, and no links that lead elsewhere."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.errors import CheckpointError

MAX_SMALL_BYTES = 1 << 28
"""JSON, templates and tokenizers are read into memory up to this size (256 MiB)."""

HASH_BYTES = 1 << 22


class ModelDirectory:
    """A directory that nobody vouches for.

    A file name is one component. A symlink may end inside the directory, or in the ``blobs`` of the same entry of a
    Hugging Face cache (``snapshots/<revision>/x -> ../../blobs/<digest>``). A file that has a second name (a hard
    link) is refused unless ``allow_hard_links``.
    """

    def __init__(self, path: Path, allow_hard_links: bool = False) -> None:
        """Look at the directory.

        Raises:
            CheckpointError: there is no such directory.
        """
        self.path = path
        self._allow_hard_links = allow_hard_links
        try:
            self.names = sorted(os.listdir(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: there is no such model directory or GGUF file") from None
        except OSError as problem:
            raise CheckpointError(f"{path}: can't be read ({problem.strerror})") from None
        real = Path(os.path.realpath(path))
        self._roots = [real]
        if real.parent.name == "snapshots":
            self._roots.append(real.parent.parent / "blobs")
        self._used: dict[str, None] = {}

    @property
    def used(self) -> list[str]:
        """Names of the files that were opened: what the build depends on."""
        return sorted(self._used)

    def has(self, name: str) -> bool:
        """Whether the directory lists the name."""
        return name in self.names

    def open(self, name: str) -> int:
        """A descriptor for reading; the caller closes it.

        Raises:
            CheckpointError: the name or what it leads to is not allowed, or can't be opened.
        """
        where = self.path / name
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise CheckpointError(f"{self.path}: {name!r} is not the plain name of a file in this directory")
        try:
            fd = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CheckpointError(f"{where}: there is no such file") from None
        except OSError as problem:
            raise CheckpointError(f"{where}: can't be opened ({problem.strerror})") from None
        try:
            self._check(fd, where)
        except BaseException:
            os.close(fd)
            raise
        self._used[name] = None
        return fd

    def read(self, name: str) -> bytes:
        """The content of a small file.

        Raises:
            CheckpointError: as ``open``; or it is larger than MAX_SMALL_BYTES.
        """
        with self._opened(name) as fd, os.fdopen(os.dup(fd), "rb") as file:
            if (size := os.fstat(fd).st_size) > MAX_SMALL_BYTES:
                raise CheckpointError(f"{self.path / name}: {size} bytes; at most {MAX_SMALL_BYTES} are read")
            return file.read()

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with self._opened(name) as fd:
            return os.fstat(fd).st_size

    def sha256(self, name: str, progress: Callable[[int], None] = lambda _: None) -> str:
        """Digest of a file; ``progress`` is told the bytes of each piece that was read."""
        digest = hashlib.sha256()
        with self._opened(name) as fd:
            position = 0
            while piece := os.pread(fd, HASH_BYTES, position):
                digest.update(piece)
                position += len(piece)
                progress(len(piece))
        return digest.hexdigest()

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        fd = self.open(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def _check(self, fd: int, where: Path) -> None:
        """Looks at what was opened, not at the name: the name may lead elsewhere a moment later."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{where}: not a regular file")
        target = _path_of(fd, where)
        if not any(target.is_relative_to(root) for root in self._roots):
            raise CheckpointError(f"{where}: leads out of the model directory, to {target}; copy the file into it")
        if status.st_nlink > 1 and not self._allow_hard_links:
            raise CheckpointError(
                f"{where}: has {status.st_nlink} names (hard links), so it may be a file from elsewhere; "
                "copy it, or pass --allow-hard-links"
            )


def _path_of(fd: int, where: Path) -> Path:
    link = f"/proc/self/fd/{fd}"
    if os.path.lexists(link):
        return Path(os.readlink(link))
    path = Path(os.path.realpath(where))
    if not os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
        raise CheckpointError(f"{where}: changed while it was being opened")
    return path
