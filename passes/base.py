"""What a pass on the onnx_ir graph is."""

import enum
from typing import ClassVar

import onnx_ir as ir


class Stage(enum.IntEnum):
    """When a pass runs. Each stage may count on what the stages before it promise."""

    CANONICALIZE = 0
    FUSE = 1
    QUANTIZE = 2
    CLEAN_UP = 3


class GraphPass(ir.passes.InPlacePass):
    """Changes a graph in place, and says truthfully whether it did; a second run changes nothing.

    ``runs_after`` names passes of the same stage that must come first.
    """

    stage: ClassVar[Stage]
    runs_after: ClassVar[tuple[str, ...]] = ()
