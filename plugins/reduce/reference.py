"""What llmc::reduce means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample
from llmc.plugins.reduce import FUNCTIONS


def reference(x: Tensor, *, function: str, num_axes: int) -> Tensor:
    """Reduce the last axes."""
    flat = x.flatten(x.ndim - num_axes)
    if function in ("argmax", "argmin"):
        best = flat.amax(-1, keepdim=True) if function == "argmax" else flat.amin(-1, keepdim=True)
        index = torch.arange(flat.shape[-1]).expand(flat.shape)
        return torch.where(flat == best, index, flat.shape[-1]).amin(-1)
    if function in ("max", "min"):
        return flat.amax(-1) if function == "max" else flat.amin(-1)
    if function in ("any", "all"):
        return flat.any(-1) if function == "any" else flat.all(-1)
    if function == "mean":
        return flat.mean(-1)
    return flat.sum(-1, dtype=x.dtype) if function == "sum" else flat.prod(-1, dtype=x.dtype)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One and several axes, sizes of one, ties, ints, a transposed and a broadcast input."""
    for shape, num_axes in (((5,), 1), ((3, 1), 1), ((4, 33), 1), ((2, 3, 17), 2), ((7, 2, 5, 3), 1), ((3, 1000), 1)):
        x = rng.standard_normal(shape, dtype=np.float32)
        for function in FUNCTIONS:
            if function in ("any", "all"):
                yield Sample((x > (1 if function == "any" else -1),), {"function": function, "num_axes": num_axes})
            elif num_axes == 1 or not function.startswith("arg"):
                data = np.round(x) if function.startswith("arg") else x
                yield Sample((data,), {"function": function, "num_axes": num_axes})
    whole = rng.integers(-9, 9, (6, 11))
    for function in ("sum", "max", "min", "prod", "argmax"):
        yield Sample((whole,), {"function": function, "num_axes": 1})
        yield Sample((whole.astype(np.int32),), {"function": function, "num_axes": 1})
    x = rng.standard_normal((9, 4), dtype=np.float32)
    yield Sample((x.T,), {"function": "sum", "num_axes": 1})
    yield Sample((np.broadcast_to(x[:, None], (9, 5, 4)),), {"function": "mean", "num_axes": 2})
