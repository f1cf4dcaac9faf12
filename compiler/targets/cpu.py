"""x86-64, and anything else that runs C++: the kernels are in the native module, chosen when an engine loads."""

from llmc.compiler.targets.base import Target

TARGET = Target(
    "cpu",
    device="cpu",
    kernels=("cpu",),
    alignment=64,
    summary="x86-64 (AMX, AVX-512, AVX2) or aarch64 (i8mm, dotprod, NEON), chosen at load, or plain C++",
)
