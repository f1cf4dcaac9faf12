import numpy as np
import pytest
from quantized_layers import Layer, layer

from llmc.quantization.base import Scheme, parse_method
from llmc.quantization.descent import Curvature, Descent
from llmc.quantization.rounding import Grid, fit, join_groups, split_groups, to_codes, to_values

SCHEMES = [Scheme(f, g, s) for f in ("int4", "int8") for g in (32, 128, 256, 0) for s in (True, False)]


def start(case: Layer, scheme: Scheme) -> tuple[np.ndarray, Grid, Descent]:
    """Codes rounded to nearest, and a descent from there."""
    groups = split_groups(case.weight, scheme.group)
    grid = fit(groups, scheme)
    codes = join_groups(to_codes(groups, grid, scheme.bits), case.weight.shape[1])
    curvature = Curvature(case.inputs().hessian, 0.0, 1e-6)
    descent = Descent(case.weight, codes, grid, group=scheme.group, curvature=curvature, bits=scheme.bits)
    return codes, grid, descent


def error(case: Layer, codes: np.ndarray, grid: Grid, scheme: Scheme) -> float:
    values = to_values(split_groups(codes, scheme.group), grid)
    return case.error_of(join_groups(values, case.weight.shape[1]))


@pytest.mark.parametrize("columns", [192, 300, 20])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.format}-{s.group}-{'sym' if s.symmetric else 'asym'}")
def test_every_round_makes_the_error_smaller(scheme: Scheme, columns: int) -> None:
    case = layer(columns=columns)
    codes, grid, descent = start(case, scheme)
    errors = [error(case, codes, grid, scheme)]
    for _ in range(4):
        descent.round()
        codes, grid = descent.result()
        errors.append(error(case, codes, grid, scheme))
        assert codes.min() >= 0 and codes.max() < 1 << scheme.bits
        assert errors[-1] <= 1.001 * errors[-2]
    assert errors[1] < 0.7 * errors[0]


def test_no_other_code_or_scale_is_better_in_the_end() -> None:
    """Where it comes to rest, changing one of them alone is no gain."""
    scheme = Scheme("int4", 32)
    case = layer(rows=4, columns=64)
    *_, descent = start(case, scheme)
    for _ in range(60):
        descent.round()
    codes, grid = descent.result()
    weight, hessian = case.weight.astype(np.float64), case.inputs().hessian.astype(np.float64)

    def losses(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        e = (codes - 8.0) * np.repeat(scale.astype(np.float64), 32, axis=1) - weight
        return np.asarray(((e @ hessian) * e).sum(1))

    least = losses(codes, grid.scale)
    for column in range(64):
        for step in (-1, 1):
            other = codes.copy()
            other[:, column] = np.clip(other[:, column] + step, 0, 15)
            assert (losses(other, grid.scale) >= 0.9999 * least).all()
    for group in range(2):
        for factor in (0.995, 1.005):
            scale = grid.scale.copy()
            scale[:, group] *= factor
            assert (losses(codes, scale) >= 0.9999 * least).all()


def test_rows_are_on_their_own_and_zeros_stay() -> None:
    case = layer(rows=6, columns=64)
    case.weight[2] = 0
    _, grid, descent = start(case, Scheme("int4", 32))
    descent.round()
    found, scales = descent.result()
    assert (found[2] == 8).all() and (scales.scale[2] == grid.scale[2]).all()
    *_, alone = start(Layer(case.weight[3:4], case.rows), Scheme("int4", 32))
    alone.round()
    assert np.array_equal(alone.result()[0][0], found[3])


def test_gptq_is_better_with_it() -> None:
    case = layer()
    errors = [case.error(parse_method(f"gptq:group=64,alike=0,refine={rounds}")) for rounds in (0, 1, 4)]
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.95 * errors[1]
