"""Kernels compile for every target without a GPU, to the same bytes each time, and errors say what is wrong."""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulator import PLUGINS, SIMT

from llmc.compiler.cuda import nvrtc
from llmc.compiler.cuda.nvrtc import compile_kernels
from llmc.errors import CompileError
from llmc.plugins.cuda import Kernel

FOLDERS = (PLUGINS, SIMT)


class LayoutParams(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("c", ctypes.c_void_p))


KERNEL = Kernel("layout_bf16", "layouts.cuh", "layout<BF16>", LayoutParams, 32)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_a_cubin_is_of_its_target(arch: str, tmp_path: Path) -> None:
    image = compile_kernels([KERNEL], arch, folders=FOLDERS, cache_folder=tmp_path)["layout_bf16"]
    assert image[:4] == b"\x7fELF"
    assert b".text.layout_bf16\0" in image
    assert [path.suffix for path in tmp_path.iterdir()] == [f".{arch}"]


def test_what_was_compiled_is_kept_until_a_source_or_the_version_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    compiled = nvrtc.compile_text
    monkeypatch.setattr(nvrtc, "compile_text", lambda *a: calls.append(a[3]) or compiled(*a))
    source = tmp_path / "layouts.cuh"
    source.write_text((SIMT / "layouts.cuh").read_text())
    folders = (PLUGINS, tmp_path)
    first = compile_kernels([KERNEL, KERNEL], "sm_80", folders=folders, cache_folder=tmp_path / "kept")
    assert compile_kernels([KERNEL], "sm_80", folders=folders, cache_folder=tmp_path / "kept") == first
    source.write_text(source.read_text() + "\n// another text\n")
    assert compile_kernels([KERNEL], "sm_80", folders=folders, cache_folder=tmp_path / "kept") == first
    assert calls == ["layout_bf16", "layout_bf16"]
    monkeypatch.setattr("llmc.__version__", "0.0")  # it may keep something else
    assert compile_kernels([KERNEL], "sm_80", folders=folders, cache_folder=tmp_path / "kept") == first
    assert calls == ["layout_bf16"] * 3


@pytest.mark.parametrize(
    "damage", [lambda kept: kept[:-1], lambda kept: kept[:100] + b"\0\1\2" + kept[103:], lambda _: b""]
)
def test_what_was_damaged_where_it_is_kept_is_compiled_again(damage: Any, tmp_path: Path) -> None:
    first = compile_kernels([KERNEL], "sm_80", folders=FOLDERS, cache_folder=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert compile_kernels([KERNEL], "sm_80", folders=FOLDERS, cache_folder=tmp_path) == first
    assert path.read_bytes() == whole


def test_it_does_without_a_place_to_keep_kernels(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    images = compile_kernels([KERNEL], "sm_80", folders=FOLDERS, cache_folder=tmp_path / "file/kept")
    assert images["layout_bf16"][:4] == b"\x7fELF"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_another_process_compiles_to_the_same_bytes(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import hashlib, pathlib, test_nvrtc as t\n"
        f"kept = pathlib.Path({str(tmp_path)!r})\n"
        "image = t.compile_kernels([t.KERNEL], 'sm_90', folders=t.FOLDERS, cache_folder=kept)\n"
        "print(hashlib.sha256(image['layout_bf16']).hexdigest())"
    )
    runs = [subprocess.check_output([sys.executable, "-P", "-c", script], text=True)]
    for path in tmp_path.iterdir():
        path.unlink()
    runs.append(subprocess.check_output([sys.executable, "-P", "-c", script], text=True))
    assert runs[0] == runs[1]


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "broken.cuh").write_text(
        "template <int N> DEV void broken(const LayoutParams& p) { no_such_thing(p); }\n"
    )
    broken = Kernel("broken", "broken.cuh", "broken<1>", LayoutParams, 32)
    with pytest.raises(CompileError, match=r"(?s)broken does not compile for sm_90:.*broken.cuh.*no_such_thing"):
        compile_kernels([broken], "sm_90", folders=(PLUGINS, tmp_path), cache_folder=tmp_path)
    with pytest.raises(CompileError, match=r"there is no file missing.cuh in "):
        compile_kernels([Kernel("m", "missing.cuh", "m", LayoutParams, 32)], "sm_90", cache_folder=tmp_path)
    for arch in ("sm_75", "sm_91", "gfx90a"):
        with pytest.raises(CompileError, match=rf"has no target {arch} for these kernels; it knows sm_80, .*sm_90"):
            compile_kernels([KERNEL], arch, folders=FOLDERS, cache_folder=tmp_path)
    with pytest.raises(CompileError, match="two different kernels are called layout_bf16"):
        compile_kernels(
            [KERNEL, Kernel("layout_bf16", "layouts.cuh", "layout<F16>", LayoutParams, 32)], "sm_90", folders=FOLDERS
        )


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match=r"needs cuda-bindings and NVRTC: pip install 'llmc-engine\[cuda-build\]'"):
        nvrtc.nvrtc_version()
    monkeypatch.undo()
    nvrtc._nvrtc.cache_clear()
