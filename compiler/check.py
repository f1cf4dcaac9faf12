"""``LLMC_CHECK=1``: the graph is run with references after every pass, and has to give the same numbers."""

from __future__ import annotations

import copy
import hashlib
import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import fx

from llmc.compiler.graph import Traced
from llmc.compiler.reference_run import run_graph
from llmc.errors import GateError

TOKENS = 13
TOLERANCE = 2e-4
"""Largest difference, relative to the largest logit: what another order of float32 sums may give."""

Array = NDArray[Any]


class Checker:
    """Keeps the logits of the stage before. Weights are random, by name, so that each stage has the same ones."""

    def __init__(self, program: Traced) -> None:
        self._parameters = dict(program.parameter_names)
        self._before: Array | None = None
        self._stage = ""
        ids = _generator("input_ids").integers(1, 32, TOKENS, np.int32)
        rows = np.array([TOKENS - 1, 0, 5], np.int32)
        self._inputs = {"input_ids": ids, "position_ids": np.arange(TOKENS, dtype=np.int32), "logit_rows": rows}

    def run_fx(self, module: fx.GraphModule) -> Array:
        """Logits of an FX graph."""
        filled = copy.deepcopy(module)
        for target, name in self._parameters.items():
            path, _, last = target.rpartition(".")
            owner = filled.get_submodule(path)
            old = getattr(owner, last, None)
            if old is not None:
                random = torch.from_numpy(_random(name, tuple(old.shape)))
                for store in (owner._parameters, owner._buffers):
                    store.pop(last, None)
                owner.register_buffer(last, random)
        ids, positions, rows = (torch.from_numpy(x).long() for x in self._inputs.values())
        with torch.no_grad():
            logits = filled(ids[None], positions[None], rows)
        logits = logits[0] if isinstance(logits, tuple | list) else logits
        result: Array = logits.reshape(len(rows), -1).numpy()
        return result

    def run_graph(self, model: ir.Model) -> Array:
        """Logits of an onnx_ir graph; weights of other dtypes are taken as float32."""
        names = set(self._parameters.values())
        initializers = {name: value.shape for name, value in model.graph.initializers.items() if name in names}
        given = {
            name: _random(name, tuple(map(int, shape.numpy())))
            for name, shape in initializers.items()
            if shape is not None
        }
        return run_graph(model, self._inputs, given)["logits"]

    def see(self, stage: str, logits: Array) -> None:
        """Compare with the stage before.

        Raises:
            GateError: the numbers differ.
        """
        before, self._before = self._before, logits
        earlier, self._stage = self._stage, stage
        if before is None:
            return
        difference = float(np.abs(logits - before).max())
        largest = float(np.abs(before).max())
        if not difference <= TOLERANCE * max(1.0, largest):
            raise GateError(
                f"LLMC_CHECK: {stage} changed the logits by {difference:.2g} (of {largest:.3g}) from what {earlier} "
                "left; set LLMC_DUMP to see both graphs"
            )


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def _random(name: str, shape: tuple[int, ...]) -> Array:
    """Numbers of a size that keeps activations in bounds; vectors, which scale, are near 1."""
    numbers = np.asarray(_generator(name).standard_normal(shape, np.float32))
    if len(shape) < 2:
        return np.asarray(1 + 0.15 * numbers, np.float32)
    scaled: Array = numbers * np.float32(1.2 / math.sqrt(shape[-1]))
    return scaled
