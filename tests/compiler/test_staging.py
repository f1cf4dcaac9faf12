"""An engine appears whole or not at all: locks, leftovers, kills, full disks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.compiler import staging
from llmc.compiler.staging import stage
from llmc.errors import ResourceError, UsageError

OLD, NEW = b'{"old": 1}', b'{"new": 1}'


def publish(target: Path, content: bytes = NEW, force: bool = False) -> None:
    with stage(target, force) as work:
        work.write("tokenizer/a.json", b"a")
        work.write("engine.json", content)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_new_engine(tmp_path: Path) -> None:
    publish(tmp_path / "e")
    assert names(tmp_path) == ["e"] and names(tmp_path / "e") == ["engine.json", "tokenizer"]


def test_sizes_and_digests_are_of_what_was_written(tmp_path: Path) -> None:
    import hashlib

    with stage(tmp_path / "e") as work:
        seen: list[int] = []
        work.write_stream("x", iter([b"ab", memoryview(b"cde"), b""]), seen.append)
        entry = work.files["x"]
    assert (entry.size, entry.sha256, seen) == (5, hashlib.sha256(b"abcde").hexdigest(), [2, 3, 0])
    assert (tmp_path / "e" / "x").read_bytes() == b"abcde"


def test_an_engine_is_replaced_only_if_asked(tmp_path: Path) -> None:
    publish(tmp_path / "e", OLD)
    with pytest.raises(UsageError, match="--force"):
        publish(tmp_path / "e")
    assert (tmp_path / "e/engine.json").read_bytes() == OLD
    publish(tmp_path / "e", NEW, force=True)
    assert (tmp_path / "e/engine.json").read_bytes() == NEW and names(tmp_path) == ["e"]


def test_what_is_no_engine_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(UsageError, match="no engine"):
            publish(tmp_path / name, force=True)
    with pytest.raises(UsageError, match="does not exist"):
        publish(tmp_path / "a" / "b")
    (tmp_path / "empty").mkdir()
    publish(tmp_path / "empty")
    (tmp_path / "link").symlink_to("empty")
    publish(tmp_path / "link", OLD, force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty/engine.json").read_bytes() == OLD


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), stage(tmp_path / "e") as work:
        work.write("engine.json", NEW)
        raise error
    assert names(tmp_path) == []
    publish(tmp_path / "e", OLD)
    with pytest.raises(error), stage(tmp_path / "e", force=True) as work:
        work.write("engine.json", NEW)
        raise error
    assert names(tmp_path) == ["e"] and (tmp_path / "e/engine.json").read_bytes() == OLD


def test_a_second_builder_stops_and_names_the_first(tmp_path: Path) -> None:
    with stage(tmp_path / "e") as work:
        with pytest.raises(UsageError, match=f"process {os.getpid()} is building"):
            publish(tmp_path / "e")
        publish(tmp_path / "other")
        work.write("engine.json", NEW)
    assert names(tmp_path) == ["e", "other"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_or_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(file: object, view: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(staging, "_write_all", fail)
    with pytest.raises(ResourceError, match=os.strerror(code)):
        publish(tmp_path / "e")
    assert names(tmp_path) == []


def test_a_file_system_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(staging, "_rename", missing)
    publish(tmp_path / "e", OLD)
    publish(tmp_path / "e", NEW, force=True)
    assert names(tmp_path) == ["e"] and (tmp_path / "e/engine.json").read_bytes() == NEW


SCRIPT = """
    import sys
    from pathlib import Path
    from llmc.compiler.staging import stage
    print("ready", flush=True)
    while True:
        with stage(Path(sys.argv[1]), force=True) as work:
            for i in range(20):
                work.write(f"part{i}", bytes(20_000))
            work.write("engine.json", b'{"new": 1}')
"""


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", textwrap.dedent(SCRIPT), str(tmp_path / "e")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("moment", range(20))
def test_killed_at_any_moment(tmp_path: Path, builder: subprocess.Popen[str], moment: int) -> None:
    """The place holds nothing or a complete engine, and the next build removes what is left."""
    time.sleep(0.001 + 0.0037 * moment)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    if (tmp_path / "e").exists():
        assert len(names(tmp_path / "e")) == 21
    publish(tmp_path / "e", OLD, force=True)
    assert names(tmp_path) == ["e"] and names(tmp_path / "e") == ["engine.json", "tokenizer"]
