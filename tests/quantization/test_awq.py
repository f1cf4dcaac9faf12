import numpy as np
import pytest
from quantized_layers import layer

from llmc.errors import CompileError
from llmc.quantization import awq
from llmc.quantization.base import LayerInputs, Statistics, parse_method


@pytest.mark.parametrize("options", ["", "group=64", "group=32,sym=false", "group=0", "duo=false", "clip=false"])
def test_is_better_than_rounding_to_nearest(options: str) -> None:
    case = layer()
    plain = options if "group" in options else ""
    nearest = case.error(parse_method(f"rtn:{plain}"))
    assert case.error(parse_method(f"awq:{options}")) < 0.8 * nearest


def test_scales_and_spans_help_each() -> None:
    case = layer(spread=1.5)
    errors = [
        case.error(parse_method(f"awq:{o}refine=0,group=64"))
        for o in ("grid=0,clip=false,", "grid=0,", "clip=false,", "")
    ]
    assert errors[0] == pytest.approx(case.error(parse_method("rtn:group=64")))
    assert errors[1] < errors[0]
    assert errors[2] < errors[0]
    assert errors[3] < min(errors[:3])


@pytest.mark.parametrize("options", ["group=64", "group=64,clip=false", "group=32,sym=false", "bits=8,group=0"])
def test_each_round_of_descent_helps(options: str) -> None:
    case = layer(spread=1.5)
    errors = [case.error(parse_method(f"awq:{options},refine={rounds}")) for rounds in (0, 1, 2)]
    assert errors[2] < errors[1] < 0.9 * errors[0]


def test_rows_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = layer(rows=70)
    whole, _ = parse_method("awq:group=32").quantize(case.weight, case.inputs())
    monkeypatch.setattr(awq, "ROWS_BYTES", 16 * 4 * case.weight.shape[1])
    parts, _ = parse_method("awq:group=32").quantize(case.weight, case.inputs())
    assert np.mean(whole.codes == parts.codes) > 0.99  # products of other shapes may differ in a last bit
    assert np.allclose(whole.dequantize(), parts.dequantize(), atol=2 * float(np.abs(whole.scale).max()))


@pytest.mark.parametrize("columns", [100, 172, 300])
def test_groups_that_do_not_fit_and_one_row(columns: int) -> None:
    case = layer(rows=1, columns=columns)
    assert case.error(parse_method("awq:group=32")) < case.error(parse_method("rtn:group=32"))


def test_tied_columns_have_one_factor() -> None:
    case = layer(columns=128)
    tie = np.arange(128) % 32
    scale = parse_method("awq").input_scale(case.weight, case.inputs(Statistics.INPUTS), tie=tie)
    assert scale is not None
    assert np.array_equal(scale, scale[:32][tie])
    assert len(np.unique(scale)) > 16


def test_factors_of_many_outputs_are_as_good_as_those_by_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case = layer(rows=2500, columns=128, tokens=512)
    method = parse_method("awq:group=64,clip=false")
    few = case.error(method)
    monkeypatch.setattr("llmc.quantization.awq.spread_rows", lambda weight: weight)
    assert few < 1.01 * case.error(method)


def test_factors_are_positive_and_finite_though_columns_are_dead() -> None:
    case = layer()
    case.rows[:, :10] = 0
    case.weight[:, 20:30] = 0
    for method in ("awq", "awq:duo=false"):
        scale = parse_method(method).input_scale(case.weight, case.inputs())
        assert scale is not None
        assert np.isfinite(scale).all()
        assert (scale > 0).all()


def test_no_scales_where_none_help() -> None:
    case = layer()
    assert parse_method("awq:grid=0").input_scale(case.weight, case.inputs()) is None
    assert parse_method("awq").input_scale(np.zeros_like(case.weight), case.inputs()) is None


def test_without_tokens_there_are_no_scales_and_no_spans() -> None:
    case = layer()
    nothing = LayerInputs(0, *(np.zeros(192, np.float32),) * 2, case.rows[:0])
    assert parse_method("awq").input_scale(case.weight, nothing) is None
    quantized, notes = parse_method("awq").quantize(case.weight, nothing)
    assert notes["inputs"] == "none seen"
    assert np.array_equal(quantized.codes, parse_method("rtn").quantize(case.weight)[0].codes)


def test_numbers_that_are_not_finite_name_the_layer() -> None:
    case = layer()
    inputs = case.inputs()
    case.weight[1, 2] = np.inf
    with pytest.raises(CompileError, match=r"layers\.1: 1 of .* of the weight"):
        parse_method("awq").input_scale(case.weight, inputs, name="layers.1")
    inputs.rows[3, 3] = np.nan
    with pytest.raises(CompileError, match=r"layers\.1: 1 of .* of the input"):
        parse_method("awq").input_scale(layer().weight, inputs, name="layers.1")


def test_zeros_stay_zeros() -> None:
    case = layer()
    case.weight[:] = 0
    quantized, _ = parse_method("awq").quantize(case.weight, case.inputs())
    assert not quantized.dequantize().any()
