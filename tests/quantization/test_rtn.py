import numpy as np
import pytest

from llmc.errors import CompileError
from llmc.quantization.base import LayerInputs, Quantized, Scheme, Statistics, parse_method


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)


def error(quantized: Quantized, weight: np.ndarray) -> float:
    return float(np.linalg.norm(quantized.dequantize() - weight) / np.linalg.norm(weight))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("int8", 0.009),
        ("rtn:bits=8,group=128", 0.007),
        ("int4", 0.12),
        ("rtn:group=64", 0.11),
        ("rtn:group=32", 0.1),
        ("rtn:group=32,sym=false", 0.085),
        ("rtn:group=128,clip=true", 0.105),
    ],
)
def test_error_bounds_on_normal_weights(text: str, bound: float) -> None:
    weight = matrix(64, 576)
    quantized, _ = parse_method(text).quantize(weight)
    assert error(quantized, weight) < bound


def test_a_searched_span_is_better() -> None:
    weight = matrix(64, 512)
    plain, _ = parse_method("rtn:group=128").quantize(weight)
    searched, notes = parse_method("rtn:group=128,clip=true").quantize(weight)
    assert error(searched, weight) < 0.95 * error(plain, weight)
    assert 0.5 < notes["mean_clip"] < 1


def test_needs_no_inputs_and_ignores_them() -> None:
    method = parse_method("rtn")
    weight = matrix(4, 64)
    inputs = LayerInputs(0, *(np.zeros(64, np.float32),) * 2, np.zeros((0, 64), np.float32))
    assert method.needs is Statistics.NONE
    assert method.quantize(weight, inputs)[1] == method.quantize(weight)[1] == {}
    assert method.input_scale(weight, inputs) is None
    assert method.activation_scale(inputs) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_name_the_layer_and_the_place(bad: float) -> None:
    weight = matrix(4, 64)
    weight[2, 5:7] = bad
    with pytest.raises(CompileError, match=r"layers.3.mlp: 2 of 256 numbers of the weight are not finite.*\[2, 5\]"):
        parse_method("rtn").quantize(weight, name="layers.3.mlp")


def test_mth_31_group_minus_one_is_one_group_per_channel() -> None:
    weight = matrix(4, 128)
    quantized, _ = parse_method("rtn:group=-1,clip=true").quantize(weight)
    assert quantized.scale.shape == (4, 1)
    assert quantized.group == 0
    assert error(quantized, weight) < 0.15


def test_x_group_divides_the_group() -> None:
    for group in range(16, 257, 16):
        x_group = Scheme("int4", group).x_group
        assert x_group <= 128
        assert group % x_group == 0
    assert Scheme("int8", 0).x_group == 128


def test_bits_per_weight() -> None:
    assert Scheme("int4", 128).bits_per_weight(1536) == 4 + 16 / 128
    assert Scheme("int4", 64, symmetric=False).bits_per_weight(640) == 4 + 24 / 64
    assert Scheme("int4", 128).bits_per_weight(576) == 4 + 5 * 16 / 576
    assert Scheme("int8", 0).bits_per_weight(100) == 8 + 0.16
