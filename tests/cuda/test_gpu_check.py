"""build_scripts/gpu_check.py, proved on the stand-in driver: what it runs on a GPU, without one."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
from click.testing import CliRunner
from driver import fake_gpu

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "build_scripts"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    variables = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-P", SCRIPTS / "gpu_check.py"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == ""
    assert re.fullmatch(r"gpu_check: no GPU to check: .*has no NVIDIA driver.*\n", done.stderr)


def test_kernels_and_a_model_on_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that fails takes its process along, and no test but its own."""
    check, kernels = script("gpu_check"), tmp_path / "kernels"
    kernels.mkdir()
    tests = ["device_faults.py", "test_small_ops.py::test_agrees_with_the_reference[softmax]"]
    arguments = ["--quick", "--workers", "1", "--json", str(tmp_path / "all.json")]
    with fake_gpu([]):
        monkeypatch.setenv("SIMT_KERNELS", str(kernels))
        done = CliRunner().invoke(check.check, [*arguments, *(word for test in tests for word in ("--tests", test))])
        monkeypatch.undo()
    assert done.exit_code == 1, done.output
    report = json.loads((tmp_path / "all.json").read_text())
    found = {r["test"].split("::")[1]: r for part in report["tests"].values() for r in part}
    assert {name: r["outcome"] for name, r in found.items()} == {
        "test_a_fault": "failed",
        "test_behind_it": "passed",
        "test_agrees_with_the_reference[softmax]": "passed",
        "test_a_llama_gives_the_numbers_of_transformers": "passed",
    }
    assert "CUDA_ERROR" in found["test_a_fault"]["error"]
    verified = report["kernels"]
    assert not verified["faults.cuh:fault"] and verified["softmax/softmax_cuda.cuh:softmax"]
    assert verified["csrc/cuda/gemm.cuh:gemm"] and verified["paged_attention/store_cuda.cuh:attention_store"]
    assert set(report["tests"]) == {"contract", "parity"} and report["device"] and report["capability"] == 90


def test_everything_that_is_measured_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = script("gpu_bench")
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "CACHE_BYTES", 1 << 12)
    with fake_gpu([], mode="plain"):
        monkeypatch.setenv("SIMT_KERNELS", str(tmp_path))
        monkeypatch.setattr(gpu, "MODE", "plain")
        gpu.device.cache_clear()
        rows = list(bench.Bench(bench.SMALL, "cpu", lambda function, **_: function).rows())
        gpu.device.cache_clear()
        monkeypatch.delenv("SIMT_KERNELS")
    assert len(rows) == script("gpu_check").FIGURES
    assert all(row.seconds > 0 and row.value > 0 for row in rows)
    assert sum(row.peer != "" for row in rows) == len(rows) - 2


def test_the_page_has_every_kernel_and_takes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, page = script("gpu_check"), tmp_path / "cuda.md"
    text = check.PAGE.read_text()
    rows = set(re.findall(r"^\| `(\w+)` \| `(\S+)` \|", text.split(check.MARK)[1], re.M))
    assert rows == {
        (name, path.relative_to(ROOT / "plugins").as_posix())
        for path in (ROOT / "plugins").rglob("*.cuh")
        for name in re.findall(r"^DEV void (\w+)\(const \w+& p\) \{", path.read_text(), re.M)
    }
    page.write_text(text)
    monkeypatch.setattr(check, "PAGE", page)
    verified = {"softmax/softmax_cuda.cuh:softmax": True, "topk/topk_cuda.cuh:topk": False}
    report = {"device": "H200", "capability": 90, "date": "2027-01-02T03:04:05", "kernels": verified}
    check.record(report)
    assert "| `softmax` | `softmax/softmax_cuda.cuh` | 2027-01-02, H200 (compute capability 9.0) |" in page.read_text()
    assert "| `topk` | `topk/topk_cuda.cuh` | failed: 2027-01-02, H200 (compute capability 9.0) |" in page.read_text()
    assert len(page.read_text().splitlines()) == len(text.splitlines())
    with pytest.raises(Exception, match="has no row for fault"):
        check.record(report | {"kernels": {"faults.cuh:fault": True}})
