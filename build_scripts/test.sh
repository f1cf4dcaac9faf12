#!/bin/sh
# Passes the whole gate on a fresh clone: installs llmc with all it needs into .venv, then lint, types, contracts, tests.
# Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
build_scripts/setup.sh build,serve,dev
PATH="$PWD/.venv/bin:$PATH"
export PATH
build_scripts/check.sh
# Two processes, each with neighbours of one file, which share fixtures; threads of torch would only get in the way.
export OMP_NUM_THREADS=1
exec pytest -q -n 2 --dist worksteal "$@"
