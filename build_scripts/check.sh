#!/bin/sh
# The static half of the gate: lint, formats, types, import contracts. Run it from the repository root.
set -eu
ruff check .
ruff format --check .
find plugins tests \( -name '*.cpp' -o -name '*.h' -o -name '*.cuh' \) -print0 | xargs -0 clang-format --dry-run -Werror
mypy
lint-imports
