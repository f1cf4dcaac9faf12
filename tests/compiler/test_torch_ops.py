"""Every plugin is a torch op with its own schema, its reference, and the shapes of its reference."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llmc.compiler.torch_ops import register_ops, schema
from llmc.plugins import all_ops

register_ops()


def tensor(value: Any) -> Tensor | None:
    if value is None:
        return None
    is_bfloat16 = value.dtype.name == "bfloat16"
    found = torch.from_numpy(np.ascontiguousarray(value.astype(np.float32) if is_bfloat16 else value))
    return found.to(torch.bfloat16) if is_bfloat16 else found


def test_inputs_are_positional_and_attributes_are_named() -> None:
    assert schema(all_ops()["norm"]) == (
        "norm(Tensor x, Tensor? weight, Tensor? bias, *, float epsilon, str kind, float offset) -> Tensor"
    )
    assert schema(all_ops()["topk"]).endswith("-> (Tensor, Tensor)")


@pytest.mark.parametrize("name", all_ops())
def test_shapes_without_numbers_are_those_of_the_reference(name: str) -> None:
    op, call = all_ops()[name], getattr(torch.ops.llmc, name)
    for sample in list(op.samples(np.random.default_rng(0)))[:12]:
        inputs = [tensor(x) for x in sample.inputs]
        context = sample.context
        step = contextlib.nullcontext() if context is None else dataclasses.replace(context, cache=dict(context.cache))
        with step:
            real = call(*inputs, **sample.attributes)
        with FakeTensorMode() as mode:
            shapes = call(*(None if x is None else mode.from_tensor(x) for x in inputs), **sample.attributes)
        pairs = zip(real, shapes, strict=True) if isinstance(real, tuple | list) else [(real, shapes)]
        for found, expected in pairs:
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
