#!/bin/sh
# Developer install: editable, native module rebuilt incrementally. Needs an environment that has the build requirements.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
mkdir -p build
exec flock build/.install.lock "$python" -m pip install -q --no-build-isolation --no-deps -e .
