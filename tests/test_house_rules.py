"""Rules of this repository that no linter checks."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("compiler", "passes", "plugins", "quantization", "runtime", "llmc", "build_scripts", "examples")
SOURCES = sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*.py"))  # rglob follows no symlinks
ONE_FILE_ONE_TEST = ("passes", "passes/fx", "quantization", "compiler/families", "compiler/targets")
SHARED = {"__init__", "base"}
REASON = "# long: "  # the comment that says why a file or a function is long
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_long_files_and_functions_say_why(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400 or any(line.startswith(REASON) for line in lines), "split this file, or say why not"
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = lines[node.lineno - 1 : node.end_lineno]
            assert len(body) <= 60 or any(REASON in line for line in body), f"{node.name} has {len(body)} lines"


@pytest.mark.parametrize("folder", ONE_FILE_ONE_TEST)
def test_each_file_has_its_test(folder: str) -> None:
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.stem not in SHARED:
            assert (ROOT / "tests" / folder / f"test_{path.stem}.py").exists(), f"no test for {name(path)}"


def test_each_plugin_has_a_reference_and_a_cpu_kernel() -> None:
    for path in sorted((ROOT / "plugins").glob("*/__init__.py")):
        folder = path.parent
        assert (folder / "reference.py").exists(), f"{name(folder)} has no reference"
        assert (folder / f"{folder.name}_cpu.cpp").exists(), f"{name(folder)} has no CPU kernel"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_nothing_can_execute_what_a_file_holds(path: Path) -> None:
    """No pickle, eval, exec, torch.load or shell=True (a method such as model.eval() is fine)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not FORBIDDEN_MODULES & {a.name.split(".")[0] for a in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS
            if isinstance(node.func, ast.Attribute):
                assert ast.unparse(node.func) != "torch.load"
            assert not any(k.arg == "shell" and ast.unparse(k.value) == "True" for k in node.keywords)


def test_the_architecture_page_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 80


def test_the_source_stays_within_its_line_budget() -> None:
    """Growth is a decision: raise the budget in the change that needs it."""
    budget = int((ROOT / "tests/line_budget.txt").read_text())
    native = [p for suffix in ("*.cpp", "*.h", "*.cuh") for p in (ROOT / "plugins").rglob(suffix)]
    lines = sum(len(p.read_text().splitlines()) for p in [*SOURCES, *native])
    print(f"{lines} lines of source, budget {budget}")
    assert lines <= budget


@pytest.mark.parametrize("code", ["import llmc", "from llmc import LLM, SamplingParams", "import llmc.runtime.cli"])
def test_the_runtime_loads_nothing_of_the_compiler(code: str) -> None:
    script = f"{code}\nimport sys\nprint([m for m in ('torch', 'transformers', 'onnx', 'onnx_ir') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-P", "-c", script], text=True).strip() == "[]"
