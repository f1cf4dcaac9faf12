#!/bin/sh
# Makes .venv (or $VENV) with llmc installed: setup.sh [EXTRAS], for instance setup.sh build,dev. Run again to update.
set -eu
cd "$(dirname "$0")/.."
extras=${1:-build}
venv=${VENV:-.venv}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
say() { printf '\n== %s\n' "$*"; }
if [ "$extras" != none ]; then
  say "torch (CPU build) and transformers"
  "$venv/bin/pip" install -q -c build_scripts/constraints.txt torch transformers
  target=".[$extras]"
else
  target="."
fi
say "llmc: compiling the native kernels (a minute or two)"
"$venv/bin/pip" install -q -c build_scripts/constraints.txt "$target"
"$venv/bin/llmc" --version
