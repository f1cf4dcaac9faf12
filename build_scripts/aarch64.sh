#!/bin/sh
# aarch64 on another machine: `aarch64.sh build` cross-compiles the wheel into dist/aarch64/, `aarch64.sh test` runs the
# kernel tests of $VENV (.venv) under qemu with the kernels of that build. Arguments that follow go to pytest.
# Needs g++-aarch64-linux-gnu and qemu-user-static (Debian).
set -eu
cd "$(dirname "$0")/.."
command=$1
shift
venv=${VENV:-.venv}
case $command in
  build)
    # Extensions are named, and wheels tagged, after the machine that they are for.
    python=${PYTHON:-python3}
    suffix=$("$python" -c 'import sys; print("cpython-%d%d-aarch64-linux-gnu.so" % sys.version_info[:2])')
    _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=.$suffix "$python" -m pip wheel -q --no-deps "$@" \
      -w dist/aarch64 -Cbuild-dir=build/aarch64 -Ccmake.define.CMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake .
    ;;
  test)
    PATH="$PWD/$venv/bin:$PATH" OMP_NUM_THREADS=1 pytest -q --kernel-server build/aarch64/kernel_server "$@" \
      tests/plugins/test_ops.py tests/plugins/test_linear.py tests/plugins/test_quantized_linear.py \
      tests/plugins/test_moe.py tests/plugins/test_simd.py tests/plugins/test_kernels.py \
      tests/test_batch_invariance.py tests/aarch64/engines_travel.py -k "not stays_within and not preemption"
    ;;
esac
