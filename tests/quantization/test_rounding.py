import numpy as np
import pytest

from llmc.quantization.base import Scheme
from llmc.quantization.rounding import (
    fit,
    join_groups,
    round_scale,
    round_to_nearest,
    search_clip,
    split_groups,
    spread_rows,
    to_codes,
    to_values,
)

SCHEMES = [Scheme(f, g, s) for f in ("int4", "int8") for g in (16, 32, 128, 0) for s in (True, False)]


def name(scheme: Scheme) -> str:
    return f"{scheme.format}-{scheme.group}-{'sym' if scheme.symmetric else 'asym'}"


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


@pytest.mark.parametrize("columns", [128, 100, 172, 1])
@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_no_weight_is_off_by_more_than_half_a_step(scheme: Scheme, columns: int) -> None:
    weight = matrix(7, columns)
    quantized = round_to_nearest(weight, scheme)
    assert quantized.codes.shape == weight.shape
    assert quantized.codes.max() < 1 << scheme.bits
    assert quantized.scale.shape == (7, scheme.groups(columns))
    step = np.repeat(quantized.scale, scheme.group or columns, axis=1)[:, :columns]
    # Symmetric: the largest of a group is 7 or 127 steps, of a scale that is rounded to 11 bits: a little may be cut.
    # Asymmetric: the zero point is rounded too, which moves the ends by up to half a step more.
    bound = (0.5 if scheme.symmetric else 1.0) + (1 << scheme.bits) / 4096
    assert (np.abs(quantized.dequantize() - weight) <= bound * step).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_zeros_constants_and_single_rows(scheme: Scheme) -> None:
    zeros = np.zeros((1, 40), np.float32)
    assert not round_to_nearest(zeros, scheme).dequantize().any()
    constant = np.full((1, 40), -0.37, np.float32)
    assert np.allclose(round_to_nearest(constant, scheme).dequantize(), constant, rtol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_zero_stays_zero(scheme: Scheme) -> None:
    weight = np.abs(matrix(3, 64)) + 1
    weight[:, ::3] = 0
    assert not round_to_nearest(weight, scheme).dequantize()[:, ::3].any()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_any_magnitude(scheme: Scheme, scale: float) -> None:
    weight = matrix(3, 64)
    expected = round_to_nearest(weight, scheme).dequantize() * np.float32(scale)
    actual = round_to_nearest(weight * np.float32(scale), scheme).dequantize()
    assert np.allclose(actual, expected, rtol=0.2, atol=0.2 * scale)


def test_an_outlier_costs_its_own_group_only() -> None:
    weight = matrix(1, 64)
    weight[0, 40] = 1e4
    values = round_to_nearest(weight, Scheme("int4", 32)).dequantize()
    assert np.abs(values - weight)[0, :32].max() < 0.5
    assert values[0, 40] == pytest.approx(1e4, rel=1e-3)


def test_scales_of_usual_size_are_float16_numbers() -> None:
    scales = np.exp(np.random.default_rng(0).uniform(-9, 10, 10_000)).astype(np.float32)
    assert np.array_equal(round_scale(scales), round_scale(scales).astype(np.float16).astype(np.float32))
    assert np.allclose(round_scale(scales), scales, rtol=2**-11)
    assert round_scale(np.zeros(1, np.float32)) == 1


def test_groups_are_split_and_joined() -> None:
    values = matrix(3, 100)
    groups = split_groups(values, 32)
    assert groups.shape == (3, 4, 32)
    assert not groups[:, 3, 4:].any()
    assert np.array_equal(join_groups(groups, 100), values)
    assert split_groups(values, 0).shape == (3, 1, 100)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_a_searched_span_is_never_worse(scheme: Scheme) -> None:
    groups = split_groups(matrix(16, 256), scheme.group)
    importance = np.random.default_rng(1).uniform(0, 4, groups.shape[1:]).astype(np.float32)
    clip = search_clip(groups, scheme, importance)
    assert (np.abs(clip) >= 0.5).all() and ((clip > 0).all() or scheme.symmetric)

    def loss(share: np.ndarray | float, importance: np.ndarray | None) -> np.ndarray:
        grid = fit(groups, scheme, share)
        error = to_values(to_codes(groups, grid, scheme.bits), grid) - groups
        return np.square(error).sum(-1) if importance is None else (np.square(error) * importance).sum(-1)

    assert (loss(clip, importance) <= loss(1.0, importance)).all()
    plain = search_clip(groups, scheme)
    assert (loss(plain, None) <= loss(1.0, None)).all() or groups.shape[1] > 1
    if scheme.bits == 4 and scheme.group != 16:
        assert loss(clip, importance).sum() < 0.97 * loss(1.0, importance).sum()
        assert loss(plain, None).sum() < 0.99 * loss(1.0, None).sum()


def test_weights_alone_are_not_made_smaller_to_fit_the_grid() -> None:
    """Errors that make all groups of a row smaller add up; see search_clip."""
    groups = split_groups(matrix(64, 1024), 128)
    scheme = Scheme("int4", 128)

    def gain(importance: np.ndarray | None) -> float:
        grid = fit(groups, scheme, search_clip(groups, scheme, importance))
        return float((to_values(to_codes(groups, grid, 4), grid) * groups).sum() / np.square(groups).sum())

    assert abs(gain(None) - 1) < 0.5 * abs(gain(np.ones(groups.shape[1:], np.float32)) - 1)


@pytest.mark.parametrize("rows", [1, 10, 11, 25, 1000])
def test_rows_are_spread_over_a_weight(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.quantization.rounding.SEARCH_ROWS", 10)
    taken = spread_rows(np.arange(rows, dtype=np.float32)[:, None])[:, 0]
    assert len(taken) == min(rows, 10)
    assert taken[0] == 0
    steps = np.diff(taken)
    assert rows == 1 or (steps.min() >= 1 and steps.max() - steps.min() <= 1)
