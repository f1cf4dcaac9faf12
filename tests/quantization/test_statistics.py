import numpy as np
import pytest

from llmc.errors import CompileError
from llmc.quantization.base import LayerInputs, Statistics
from llmc.quantization.statistics import SAMPLE, InputCollector


def collect(rows: np.ndarray, piece: int, needs: Statistics = Statistics.HESSIAN, threads: int = 1) -> LayerInputs:
    collector = InputCollector(rows.shape[1], needs, name="layers.3", threads=threads)
    for start in range(0, len(rows), piece):
        collector.add(rows[start : start + piece])
    return collector.finish()


def rows(count: int, columns: int = 40) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, columns)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 7, 512, 3000])
def test_statistics_are_those_of_all_rows(count: int) -> None:
    x = rows(count)
    inputs = collect(x, 100)
    assert inputs.count == count
    assert np.allclose(inputs.mean_abs, np.abs(x).mean(0, dtype=np.float64), rtol=1e-6)
    assert np.array_equal(inputs.max_abs, np.abs(x).max(0))
    assert np.allclose(inputs.hessian, x.T @ x / count, atol=1e-5)
    assert np.array_equal(inputs.hessian, inputs.hessian.T)
    assert inputs.rows.shape == (min(count, SAMPLE), 40)
    places = [int(np.flatnonzero((x == row).all(1))[0]) for row in inputs.rows]
    assert places == sorted(set(places))
    if count > SAMPLE:
        assert np.mean(places) == pytest.approx(count / 2, rel=0.15)


@pytest.mark.parametrize(("piece", "threads"), [(1, 1), (17, 1), (512, 1), (513, 3), (5000, 2)])
def test_the_bits_do_not_depend_on_how_rows_arrive(piece: int, threads: int) -> None:
    x = rows(2700, 500)
    expected, actual = collect(x, 300), collect(x, piece, threads=threads)
    for name in ("count", "mean_abs", "max_abs", "rows", "hessian"):
        assert np.array_equal(getattr(actual, name), getattr(expected, name)), name


def test_nothing_seen() -> None:
    inputs = InputCollector(8, Statistics.HESSIAN).finish()
    assert inputs.count == 0
    assert not inputs.hessian.any()
    assert inputs.rows.shape == (0, 8)


def test_no_hessian_unless_it_is_asked_for() -> None:
    assert collect(rows(10), 10, Statistics.INPUTS).hessian is None


def test_rows_are_copied() -> None:
    x = rows(10)
    collector = InputCollector(40, Statistics.INPUTS)
    collector.add(x)
    x[:] = 0
    assert collector.finish().max_abs.all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_name_the_layer(bad: float) -> None:
    x = rows(10)
    x[4, 2] = bad
    with pytest.raises(CompileError, match=r"layers\.3: 1 of 400 numbers of the input .*\[4, 2\]"):
        collect(x, 10)


def test_inputs_divided_by_a_scale() -> None:
    x = rows(600)
    scale = np.exp(np.random.default_rng(1).normal(size=40)).astype(np.float32)
    expected, actual = collect(x / scale, 600), collect(x, 600).divided(scale)
    for name in ("mean_abs", "max_abs", "rows", "hessian"):
        assert np.allclose(getattr(actual, name), getattr(expected, name), rtol=1e-4, atol=1e-5), name
