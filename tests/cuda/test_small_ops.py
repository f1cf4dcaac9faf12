"""The small ops on the emulator: each agrees with its reference, in every order of threads."""

from collections.abc import Iterator

import numpy as np
import pytest
from contract import Contract, check_op, run
from emulator import Emulator

from llmc.plugins import Sample, all_ops
from llmc.plugins.elementwise import FUNCTIONS

CONTRACTS = {
    "norm": (Contract("norm", keep=("weight?", "bias?")), "bfloat16"),
    "add_norm": (Contract("add_norm", keep=("weight?", "bias?"), units=12), "float16"),
    "rope": (Contract("rope", keep=("table", "sign")), "bfloat16"),
    "glu": (Contract("glu"), "bfloat16"),
    "softmax": (Contract("softmax", units=8), "float32"),
    "reduce": (Contract("reduce", units=8), "float32"),
    "cumsum": (Contract("cumsum", units=8), "float32"),
    "topk": (Contract("topk"), "float32"),
    "gather": (Contract("gather"), "bfloat16"),
    "gather_elements": (Contract("gather_elements"), "float32"),
    "scatter_elements": (Contract("scatter_elements"), "float32"),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_agrees_with_the_reference(name: str) -> None:
    contract, dtype = CONTRACTS[name]
    assert check_op(contract, dtype)


@pytest.mark.parametrize("name", ["gather", "gather_elements", "scatter_elements"])
def test_an_id_that_is_out_of_range_is_left_out(name: str) -> None:
    """It may be garbage of a surplus row: what would be read is zero, and nothing is written."""
    data, ids, source = np.arange(1, 6, dtype=np.float32), np.array([5, 1, -6, -5]), np.arange(10, 14, dtype=np.float32)
    inputs = (data, ids, source) if name == "scatter_elements" else (data, ids)
    sample = Sample(inputs, {"reduction": "none"} if name == "scatter_elements" else {})
    expected = [13, 11, 3, 4, 5] if name == "scatter_elements" else [0, 2, 0, 1]
    with Emulator() as device:
        (found,) = run(Contract(name), sample, "float32", device, [((len(expected),), "float32")])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["neg", "max"])
def test_views_of_four_axes(name: str) -> None:
    """All that kernels walk, none of which follows on its neighbour."""
    x = np.random.default_rng(1).standard_normal((2, 3, 2, 5, 4), np.float32).transpose(3, 2, 1, 0, 4)
    if name == "neg":
        x, contract, attributes = x[..., 0], Contract("elementwise"), {"function": name}
        expected, inputs = -x, (x, None, None)
    else:
        contract, attributes = Contract("reduce"), {"function": name, "num_axes": 1}
        expected, inputs = x.max(-1), (x,)
    with Emulator() as device:
        (found,) = run(contract, Sample(inputs, attributes), "float32", device, [(expected.shape, "float32")])
    np.testing.assert_array_equal(found, expected)


def test_the_place_in_a_row_without_numbers_is_the_first() -> None:
    x = np.full((2, 40), np.nan, np.float32)
    x[1, :33] = -np.inf
    with Emulator() as device:
        sample = Sample((x,), {"function": "argmax", "num_axes": 1})
        (found,) = run(Contract("reduce"), sample, "float32", device, [((2,), "int64")])
    np.testing.assert_array_equal(found, [0, 0])


def matrices(rng: np.random.Generator) -> Iterator[Sample]:
    """The samples of elementwise that are matrices, or edges of what functions tell apart; int32 only once."""
    for sample in all_ops()["elementwise"].samples(rng):
        small = sample.inputs[0].dtype == np.int32 and sample.attributes["function"] != "mod"
        if (sample.inputs[0].ndim == 2 or sample.inputs[0].shape == (10,)) and not small:
            yield sample
    whole = rng.integers(-6, 7, (5, 9)).astype(np.float32)
    divisors = rng.choice(np.array([-3, -2, -1, 1, 2, 3], np.float32), (5, 9))
    for name in (
        "mod",
        "fmod",
        "less",
        "less_equal",
        "equal",
        "max",
    ):  # of numbers that are equal, or divide each other
        yield Sample((whole, divisors, None), {"function": name})


def test_every_function_of_elementwise() -> None:
    found = check_op(Contract("elementwise", samples=matrices, units=8), "float32")
    assert {name.split("_f32")[0].split("_i")[0].split("_b")[0] for name in found} >= {
        f"elementwise_{name}" for name in FUNCTIONS if name not in ("isnan", "not")
    }
