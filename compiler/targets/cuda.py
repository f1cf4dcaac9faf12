"""NVIDIA GPUs: machine code is compiled with NVRTC when an engine is built, which takes no GPU."""

from llmc.compiler.targets.base import Target


def _target(arch: str, devices: str) -> Target:
    return Target(f"cuda:{arch}", device="cuda", kernels=("cuda",), alignment=256, summary=devices)


SM_80 = _target("sm_80", "NVIDIA A100, A30, RTX 30, A10, A40 (unverified on hardware)")
SM_89 = _target("sm_89", "NVIDIA RTX 40, L4, L40 (unverified on hardware)")
SM_90 = _target("sm_90", "NVIDIA H100, H200 (unverified on hardware)")
SM_90A = _target("sm_90a", "NVIDIA H100, H200 by wgmma and TMA, the newest kernels here (unverified on hardware)")
SM_100 = _target("sm_100", "NVIDIA B200, B300 (unverified on hardware)")
SM_120 = _target("sm_120", "NVIDIA RTX 50, RTX PRO (unverified on hardware)")
