#!/bin/sh
# Makes .venv (or $VENV) with llmc installed: setup.sh [EXTRAS], for instance setup.sh build,dev. Run again to update.
# $WHEEL: a wheel that has been built already, instead of compiling this clone.
set -eu
cd "$(dirname "$0")/.."
extras=${1:-build}
venv=${VENV:-.venv}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
say() { printf '\n== %s\n' "$*"; }
if [ "$extras" != none ]; then
  say "torch (CPU build) and transformers"
  "$venv/bin/pip" install -q -c build_scripts/constraints.txt torch transformers
fi
[ "$extras" = none ] && target=${WHEEL:-.} || target="${WHEEL:-.}[$extras]"
say "llmc, from ${WHEEL:-this clone (compiling the native kernels takes a few minutes)}"
"$venv/bin/pip" install -q -c build_scripts/constraints.txt "$target"
"$venv/bin/llmc" --version
