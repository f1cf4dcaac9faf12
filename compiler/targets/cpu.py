"""x86-64, and anything else that runs C++: the kernels are in the native module, chosen when an engine loads."""

from llmc.compiler.targets.base import Target

TARGET = Target(
    "cpu",
    device="cpu",
    kernels=("cpu",),
    alignment=64,
    summary="any x86-64 CPU (AVX2, AVX-512, AVX-512 BF16 chosen at load), or plain C++",
)
