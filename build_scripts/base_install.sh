#!/bin/sh
# Checks a base install (VENV ENGINE): no torch in it, it runs the engine, and how large it is.
set -eu
venv=$1 engine=$2
"$venv/bin/python" - <<'PY'
import importlib.util
import sysconfig
from pathlib import Path

heavy = [name for name in ("torch", "transformers", "onnx", "onnx_ir") if importlib.util.find_spec(name)]
assert not heavy, f"a base install must not bring {heavy}"
root = Path(sysconfig.get_paths()["purelib"])
seeded = ("pip", "setuptools", "pkg_resources", "_distutils_hack")  # every virtual environment has these
files = [f for f in root.rglob("*") if f.is_file() and not f.relative_to(root).parts[0].startswith(seeded)]
cached = sum(f.stat().st_size for f in files if f.suffix == ".pyc") / 1e6
size = sum(f.stat().st_size for f in files) / 1e6 - cached
print(f"base install: {size:.0f} MB of site-packages (target: below 120), and {cached:.0f} MB of cached bytecode")
assert size < 120, "the base install has grown past its target"
PY
"$venv/bin/llmc" run "$engine" -p "The capital of France is" --temperature 0 --max-tokens 8
"$venv/bin/llmc" eval "$engine" --windows 1 --tokens 8 --quiet
