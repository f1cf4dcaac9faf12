import numpy as np
import pytest
from quantized_layers import Layer, layer

from llmc.errors import CompileError, UsageError
from llmc.quantization.base import Activations, LayerInputs, Method, Scheme, parse_method
from llmc.quantization.rounding import join_groups, split_groups


def error(case: Layer, method: Method, scale: np.ndarray | None) -> float:
    """The relative squared error of the outputs with int8 inputs, as the kernel rounds them."""
    factors = np.ones(case.rows.shape[1], np.float32) if scale is None else scale
    rows = case.rows / factors
    pieces = split_groups(rows, method.x_group)
    step = method.activation_scale(case.inputs().divided(factors)) or np.abs(pieces).max(-1, keepdims=True) / 127
    rounded = join_groups(np.clip(np.rint(pieces / step), -127, 127) * step, rows.shape[1])
    weight = method.quantize(case.weight * factors)[0].dequantize()
    wanted = case.rows @ case.weight.T
    return float(np.square(rounded @ weight.T - wanted).sum() / np.square(wanted).sum())


@pytest.mark.parametrize("inputs", ["token", "group", "static"])
def test_columns_with_large_inputs_cost_less(inputs: str) -> None:
    case = layer(spread=1.5)
    errors = []
    for options in ("alpha=0.5,search=false", "search=true"):
        method = parse_method(f"smoothquant:{options},inputs={inputs}")
        errors.append(error(case, method, method.input_scale(case.weight, case.inputs())))
    assert errors[0] < 0.7 * error(case, method, None)
    assert errors[1] <= errors[0] * 1.05  # chosen on a sample of the rows
    assert errors[1] < 2e-3


def test_the_formula() -> None:
    case = layer()
    scale = parse_method("smoothquant:search=false,alpha=0.75").input_scale(case.weight, case.inputs())
    expected = np.abs(case.rows).max(0) ** 0.75 / np.abs(case.weight).max(0) ** 0.25
    assert np.allclose(scale / scale[0], expected / expected[0], rtol=1e-4)
    assert scale.max() * scale.min() == pytest.approx(1, rel=1e-4)


def test_weights_and_activations() -> None:
    assert parse_method("smoothquant").weights == Scheme("int8", 0)
    assert parse_method("w8a8").weights == Scheme("int8", 128)
    assert parse_method("w8a8").x_group == 128
    assert parse_method("w8a8:inputs=token").activations is Activations.PER_TOKEN
    assert parse_method("w8a8:inputs=token").x_group == 0
    case = layer()
    assert parse_method("w8a8").activation_scale(case.inputs()) is None
    static = parse_method("w8a8:inputs=static")
    assert static.activations is Activations.STATIC
    assert static.activation_scale(case.inputs()) == pytest.approx(np.abs(case.rows).max() / 127, rel=1e-3)


def test_tied_columns_have_one_factor() -> None:
    case = layer(columns=128)
    tie = np.arange(128) // 2 % 16
    for options in ("search=false", "search=true"):
        scale = parse_method(f"smoothquant:{options}").input_scale(case.weight, case.inputs(), tie=tie)
        assert all(len(np.unique(scale[tie == i])) == 1 for i in range(16))


def test_dead_columns_get_no_factors_near_zero() -> None:
    case = layer()
    case.rows[:, :5] = 0
    case.weight[:, 8:12] = 0
    scale = parse_method("smoothquant:search=false,alpha=1").input_scale(case.weight, case.inputs())
    assert np.isfinite(scale).all()
    assert scale.min() > 1e-4


def test_without_tokens_there_are_no_factors() -> None:
    case = layer()
    nothing = LayerInputs(0, *(np.zeros(192, np.float32),) * 2, case.rows[:0])
    method = parse_method("smoothquant")
    assert method.input_scale(case.weight, nothing) is None
    assert method.quantize(case.weight, nothing)[1] == {"inputs": "none seen"}


def test_zeros() -> None:
    case = Layer(np.zeros((3, 64), np.float32), np.zeros((5, 64), np.float32))
    for options in ("search=false", "search=true"):
        method = parse_method(f"smoothquant:{options},inputs=static")
        scale = method.input_scale(case.weight, case.inputs())
        assert scale is None or np.isfinite(scale).all()
        assert method.activation_scale(case.inputs()) == 1
        assert not method.quantize(case.weight)[0].dequantize().any()


def test_mistakes() -> None:
    with pytest.raises(UsageError, match=r"alpha=2: expected a number from 0 to 1"):
        parse_method("smoothquant:alpha=2")
    with pytest.raises(UsageError, match="unknown option bits"):
        parse_method("smoothquant:bits=4")
    case = layer()
    inputs = case.inputs()
    inputs.max_abs[7] = np.inf
    with pytest.raises(CompileError, match=r"layers\.1: 1 of 192 numbers of the input"):
        parse_method("smoothquant").input_scale(case.weight, inputs, name="layers.1")
