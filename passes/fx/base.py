"""What a pass on the FX graph is."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import fx

MAX_SEQ_LEN = "max_seq_len"
"""Key of ``GraphModule.meta``: the engine's longest sequence, so how many positions a table needs."""

WEIGHT_DTYPES = "weight_dtypes"
"""Key of ``GraphModule.meta``: parameter -> dtype in the checkpoint. Without it all are alike (tracing is float32)."""


class FxPass(ABC):
    """Changes an FX graph in place, and says truthfully whether it did; a second run changes nothing.

    The graph is over packed tokens: placeholders ``input_ids``, ``position_ids``, ``logit_rows``; every node has its
    fake value in ``meta["val"]`` and its module in ``meta["nn_module_stack"]``; a pass gives both to what it adds.
    ``runs_after`` names passes that must come first.
    """

    runs_after: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def call(self, module: fx.GraphModule) -> bool:
        """Change the graph; returns whether anything changed."""

    def __call__(self, module: fx.GraphModule) -> bool:
        """Run the pass, and check the graph that it leaves."""
        changed = self.call(module)
        if changed:
            module.graph.lint()
            module.recompile()
        return changed
