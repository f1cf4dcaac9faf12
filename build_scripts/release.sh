#!/bin/sh
# Makes what a release consists of, in dist/: sdist, wheel, a bill of materials (CycloneDX), the list of licences, checksums.
# What is installed to make it has the hashes of build_scripts/serve.lock. That file is made by
#   uv pip compile pyproject.toml --extra serve --generate-hashes --universal --python-version 3.11 --no-header \
#     --no-annotate -o build_scripts/serve.lock
# Signing and provenance are the business of who publishes: they need its identity.
set -eu
cd "$(dirname "$0")/.."
rm -rf dist .venv-release .venv-release-tools
"${PYTHON:-python3}" -m venv .venv-release-tools
.venv-release-tools/bin/pip install -q "build>=1.2,<2" "cyclonedx-bom>=7,<8"
.venv-release-tools/bin/python -m build -o dist .
"${PYTHON:-python3}" -m venv .venv-release
.venv-release/bin/pip install -q --require-hashes -r build_scripts/serve.lock
.venv-release/bin/pip install -q --no-deps dist/*.whl
.venv-release-tools/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
  --output-reproducible --of JSON -o dist/llmc.cdx.json .venv-release
python3 build_scripts/licences.py dist/llmc.cdx.json > dist/LICENCES.md
cd dist
sha256sum -- * > SHA256SUMS
cat SHA256SUMS
