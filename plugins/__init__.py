"""The ops of the ``llmc`` domain, one folder each: what each means, and its kernels."""

from functools import cache

from llmc import discover
from llmc.plugins.op import Op, Sample

__all__ = ["Op", "Sample", "all_ops"]


@cache
def all_ops() -> dict[str, Op]:
    """Every op in this folder, by name."""
    return {op.name: op for op in discover.instances(__name__, Op)}
