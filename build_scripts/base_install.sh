#!/bin/sh
# Checks a base install (VENV ENGINE): no torch in it, it runs the engine, and how large it is.
set -eu
venv=$1 engine=$2
"$venv/bin/python" - <<'PY'
import importlib.util
import subprocess
import sysconfig

heavy = [name for name in ("torch", "transformers", "onnx", "onnx_ir") if importlib.util.find_spec(name)]
assert not heavy, f"a base install must not bring {heavy}"
size = int(subprocess.check_output(["du", "-sm", sysconfig.get_paths()["purelib"]]).split()[0])
pip = int(subprocess.check_output(["du", "-sm", sysconfig.get_paths()["purelib"] + "/pip"]).split()[0])
print(f"base install: {size - pip} MB of site-packages without pip (target: below 120)")
assert size - pip < 120, "the base install has grown past its target"
PY
"$venv/bin/llmc" run "$engine" -p "The capital of France is" --temperature 0 --max-tokens 8
