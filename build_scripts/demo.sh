#!/bin/sh
# From a fresh clone to a talking model: environment, model, engine, chat.
#   build_scripts/demo.sh                 ask one question
#   build_scripts/demo.sh --chat          talk to it
set -eu
cd "$(dirname "$0")/.."
build_scripts/setup.sh build
models=${LLMC_MODELS:-models}
engine=models/smollm2.engine
mkdir -p models
.venv/bin/python build_scripts/fetch_smollm2.py "$models"
if [ ! -e "$engine" ]; then
  .venv/bin/llmc build "$models/SmolLM2-135M-Instruct.Q4_1.gguf" -o "$engine"
fi
.venv/bin/llmc verify "$engine"
if [ "${1:-}" = --chat ]; then
  exec .venv/bin/llmc run "$engine" --chat
fi
.venv/bin/llmc run "$engine" --chat -p "What is a compiler? Answer in two sentences." --temperature 0 --max-tokens 80
