"""The same model gives the same engine for CUDA, byte by byte, from other folders and with nothing kept from before."""

import shutil
from pathlib import Path

import engines
import pytest

from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig


def test_an_engine_has_the_same_bytes_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"target": "cuda:sm_90", "dtype": "bfloat16", "max_batch_tokens": 8, "max_sequences": 2}
    config = engines.small_llama(num_hidden_layers=1, vocab_size=67)
    _, first = engines.build(config, tmp_path / "one", **options)
    other = tmp_path / "other/deeper"
    shutil.copytree(tmp_path / "one/model", other / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.chdir(other)
    build_engine(Path("model"), Path("engine"), BuildConfig(**options))
    files = {path.relative_to(first): path.read_bytes() for path in first.rglob("*") if path.is_file()}
    assert any(path.suffix == ".cubin" for path in files)
    assert {
        p.relative_to(other / "engine"): p.read_bytes() for p in (other / "engine").rglob("*") if p.is_file()
    } == files
    assert list((tmp_path / "empty").rglob("*.sm_90"))
