import numpy as np
import pytest
from quantized_layers import Layer, layer

from llmc.errors import CompileError
from llmc.quantization.base import LayerInputs, parse_method
from llmc.quantization.descent import Curvature, shrinkage
from llmc.quantization.gptq import factorize

SCHEMES = ["", "group=64", "group=32,sym=false", "group=0", "group=256", "bits=8,group=0", "bits=8,group=32,sym=false"]


@pytest.mark.parametrize("options", SCHEMES)
def test_is_better_than_rounding_to_nearest_on_correlated_inputs(options: str) -> None:
    case = layer()
    nearest = case.error(parse_method(f"rtn:{options}"))
    assert case.error(parse_method(f"gptq:{options}")) < 0.5 * nearest


@pytest.mark.parametrize(
    "options", ["act_order=false", "clip=false", "damping=0.1", "act_order=false,clip=false", "alike=0", "refine=0"]
)
def test_options_are_heard(options: str) -> None:
    case = layer()
    error, default = case.error(parse_method(f"gptq:group=64,{options}")), case.error(parse_method("gptq:group=64"))
    assert error != default
    assert error < 0.5 * case.error(parse_method("rtn:group=64"))


@pytest.mark.parametrize("columns", [1, 16, 100, 172, 300])
@pytest.mark.parametrize("act_order", ["true", "false"])
def test_any_number_of_columns_and_one_row(columns: int, act_order: str) -> None:
    case = layer(rows=1, columns=columns) if columns > 4 else layer(rows=1, columns=4)
    method = parse_method(f"gptq:group=32,act_order={act_order}")
    quantized, _ = method.quantize(case.weight, case.inputs())
    assert quantized.codes.shape == case.weight.shape
    assert case.error_of(quantized.dequantize()) <= case.error(parse_method("rtn:group=32"))


def test_uncorrelated_inputs_of_one_size_are_rounded_to_nearest() -> None:
    case = layer(columns=128)
    inputs = LayerInputs(9, *(np.ones(128, np.float32),) * 2, case.rows[:9], np.eye(128, dtype=np.float32))
    quantized, _ = parse_method("gptq:clip=false,refine=0").quantize(case.weight, inputs)
    nearest, _ = parse_method("rtn").quantize(case.weight)
    assert np.array_equal(quantized.codes, nearest.codes)


def test_is_the_rule_of_the_paper() -> None:
    """Column by column with the inverse Hessian, the rest updated after each."""
    case = layer(rows=8, columns=160)
    hessian = case.inputs().hessian.astype(np.float64)
    hessian += 0.01 * np.diagonal(hessian).mean() * np.eye(160)
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    quantized, _ = parse_method("gptq:group=32,act_order=false,clip=false,refine=0,alike=0").quantize(
        case.weight, case.inputs()
    )
    scale = np.repeat(quantized.scale, 32, axis=1)
    weight = case.weight.astype(np.float64)
    codes = np.empty_like(weight)
    for i in range(160):
        codes[:, i] = np.clip(np.rint(weight[:, i] / scale[:, i]), -8, 7) + 8
        error = (weight[:, i] - (codes[:, i] - 8) * scale[:, i]) / upper[i, i]
        weight[:, i + 1 :] -= np.outer(error, upper[i, i + 1 :])
    assert (codes != quantized.codes).mean() < 0.002  # float32 against float64, where a half is near


def test_dead_columns_are_rounded_to_nearest() -> None:
    case = layer(columns=128)
    case.rows[:, 40:50] = 0
    quantized, notes = parse_method("gptq:clip=false,refine=0").quantize(case.weight, case.inputs())
    nearest, _ = parse_method("rtn").quantize(case.weight)
    assert notes["dead_columns"] == 10
    assert np.array_equal(quantized.codes[:, 40:50], nearest.codes[:, 40:50])


def test_inputs_that_are_all_zero() -> None:
    case = layer(columns=128)
    case.rows[:] = 0
    quantized, notes = parse_method("gptq:clip=false,refine=0").quantize(case.weight, case.inputs())
    assert notes["dead_columns"] == 128
    assert np.array_equal(quantized.codes, parse_method("rtn").quantize(case.weight)[0].codes)


def test_an_expert_that_no_token_reached_is_rounded_and_noted() -> None:
    case = layer()
    nothing = LayerInputs(0, *(np.zeros(192, np.float32),) * 2, case.rows[:0], np.zeros((192, 192), np.float32))
    for inputs in (None, nothing):
        quantized, notes = parse_method("gptq").quantize(case.weight, inputs)
        assert notes["inputs"] == "none seen"
        assert np.array_equal(quantized.codes, parse_method("rtn").quantize(case.weight)[0].codes)


def crowded(tokens: int, alike: int) -> Layer:
    """More columns than a few of the inputs tell of; each of them comes so many times, hardly changed."""
    rng = np.random.default_rng(1)
    case = layer(columns=256, tokens=tokens, spread=0.5)
    rows = np.repeat(rng.normal(size=(tokens // alike, 256)), alike, axis=0) + 0.1 * rng.normal(size=(tokens, 256))
    return Layer(case.weight, rows.astype(np.float32))


def test_a_few_tokens_are_not_learned_by_heart() -> None:
    """Where they tell nothing, what is learned from them is wrong for others."""
    few = crowded(512, 4)
    others, errors = Layer(few.weight, crowded(2048, 1).rows), []
    for options in ("", ",alike=0"):
        quantized, notes = parse_method(f"gptq:group=64{options}").quantize(few.weight, few.inputs())
        errors.append(others.error_of(quantized.dequantize()))
    assert errors[0] < 0.8 * errors[1]
    assert notes["shrunk"] == 0


def test_how_far_a_hessian_is_shrunk() -> None:
    """Much if tokens are few for it, little if they are many or their inputs go together."""

    def share(case: Layer, tokens: int, alike: float = 1.0) -> float:
        rows = case.rows[:tokens]
        return shrinkage(rows.T @ rows / np.float32(tokens), rows, tokens, alike)

    unrelated, related = crowded(2048, 1), layer(columns=256, tokens=2048)
    assert share(unrelated, 2048) > 0.4
    assert share(related, 20) > share(related, 200) > share(related, 2000) > 0
    assert share(related, 2000) < 0.05 < share(related, 2000, 8.0) < 0.4
    assert share(related, 1) == 1
    assert share(related, 200, 0.0) == 0
    assert shrinkage(np.eye(4), np.ones((3, 4), np.float32), 3, 8.0) == 0
    one = np.ones((1, 4), np.float32)
    assert shrinkage(one.T @ one, one, 1, 8.0) == 1
    assert shrinkage(one.T @ one, one, 1, 0.0) == 0


def test_a_shrunken_hessian_keeps_its_diagonal() -> None:
    hessian = layer(columns=40).inputs().hessian
    curvature = Curvature(hessian, 0.25, 0.01)
    wanted = 0.75 * hessian + 0.25 * np.diag(np.diagonal(hessian)) + 0.01 * np.diagonal(hessian).mean() * np.eye(40)
    assert np.allclose(curvature.square(8, 32), wanted[8:32, 8:32], rtol=1e-5)
    values = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    assert np.allclose(curvature.slopes(8, 32, values), (wanted @ values)[8:32], rtol=1e-3, atol=1e-3)
    assert np.allclose(curvature.bends(8, 32, values[8:32]), wanted[8:32, 8:32] @ values[8:32], rtol=1e-3, atol=1e-3)
    carried, damping = factorize(hessian, np.arange(40), 0.01, "layer", 0.25)
    inverse = np.linalg.inv(carried.astype(np.float64))
    squares = inverse @ wanted @ inverse.T
    assert damping == 0.01
    assert np.allclose(squares, np.diag(np.diagonal(squares)), atol=1e-4 * np.abs(squares).max())


def test_damping_is_raised_until_the_hessian_is_positive_definite() -> None:
    hessian = np.diag(np.r_[np.ones(7), -0.05])
    carried, damping = factorize(hessian, np.arange(8), 0.01, "layer")
    assert damping == pytest.approx(0.1)
    assert np.array_equal(carried, np.eye(8))


def test_the_factor_is_that_of_the_hessian_in_the_given_order() -> None:
    hessian = layer(columns=40).inputs().hessian.astype(np.float64)
    order = np.random.default_rng(0).permutation(40)
    carried, damping = factorize(hessian, order, 0.01, "layer")
    assert not np.tril(carried, -1).any()
    assert (np.diagonal(carried) == 1).all()
    # V = carried * diag(d), so H = carried * diag(d^2) * carried^T
    wanted = hessian[np.ix_(order, order)] + damping * np.diagonal(hessian).mean() * np.eye(40)
    inverse = np.linalg.inv(carried.astype(np.float64))
    squares = inverse @ wanted @ inverse.T
    assert np.allclose(squares, np.diag(np.diagonal(squares)), atol=1e-4 * np.abs(squares).max())


def test_a_hopeless_hessian_is_an_error_that_names_the_layer() -> None:
    with pytest.raises(CompileError, match=r"layers\.7\.down: the Hessian"):
        factorize(np.diag([1.0, -1.0, -1.0, 0.1]), np.arange(4), 0.01, "layers.7.down")


def test_inputs_that_are_not_finite_name_the_layer() -> None:
    case = layer()
    inputs = case.inputs()
    inputs.hessian[3, 4] = np.nan
    with pytest.raises(CompileError, match=r"layers\.7: 1 of 36864 numbers of the input .*\[3, 4\]"):
        parse_method("gptq").quantize(case.weight, inputs, name="layers.7")


def test_a_huge_outlier_among_inputs() -> None:
    case = layer()
    case.rows[0, 5] = 1e5
    assert case.error(parse_method("gptq:group=64")) < case.error(parse_method("rtn:group=64"))
