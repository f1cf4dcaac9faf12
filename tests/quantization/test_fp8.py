import ml_dtypes
import numpy as np
import pytest

from llmc.errors import CompileError, UsageError
from llmc.quantization.base import Activations, parse_method
from llmc.quantization.fp8 import BLOCK


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)


@pytest.mark.parametrize("columns", [1, 100, 128, 300])
@pytest.mark.parametrize("rows", [1, 128, 200])
@pytest.mark.parametrize("scale", ["tensor", "channel", "block"])
def test_weights_are_as_near_as_the_format_allows(scale: str, rows: int, columns: int) -> None:
    weight = matrix(rows, columns)
    quantized, _ = parse_method(f"fp8:scale={scale}").quantize(weight)
    values = quantized.dequantize()
    step = np.repeat(quantized.scale, quantized.group or columns, axis=1)[:, :columns]
    # 3 bits of mantissa: off by 2^-4 of the number at most, or half a step of the subnormals
    assert (np.abs(values - weight) <= np.abs(weight) * 2**-4 + step * 2**-10).all()
    expected = (weight / step).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(quantized.codes, expected.view(np.uint8))


def test_what_shares_a_scale() -> None:
    weight = matrix(300, 300)
    tensor, channel, block = (
        parse_method(f"fp8:scale={s}").quantize(weight)[0] for s in ("tensor", "channel", "block")
    )
    assert len(np.unique(tensor.scale)) == 1
    assert channel.scale.shape == (300, 1)
    assert block.scale.shape == (300, 3)
    for start in range(0, 300, BLOCK):
        assert (block.scale[start : start + BLOCK] == block.scale[start]).all()
    assert block.scale[0, 1] == pytest.approx(np.abs(weight[:128, 128:256]).max() / 448, rel=1e-3)


def test_zeros_outliers_and_tiny_numbers() -> None:
    assert not parse_method("fp8").quantize(np.zeros((2, 40), np.float32))[0].dequantize().any()
    weight = matrix(2, 40)
    weight[0, 3] = 1e6
    values = parse_method("fp8").quantize(weight)[0].dequantize()
    assert values[0, 3] == pytest.approx(1e6, rel=1e-3)
    assert np.allclose(values[1], weight[1], rtol=0.07, atol=0.01)
    tiny = matrix(2, 40) * np.float32(1e-30)
    assert np.allclose(parse_method("fp8").quantize(tiny)[0].dequantize(), tiny, rtol=0.07, atol=1e-32)


def test_activations() -> None:
    assert parse_method("fp8").activations is Activations.PER_GROUP
    assert parse_method("fp8:inputs=fp8").activations is Activations.FP8
    assert parse_method("fp8:inputs=fp8").x_group == 0


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="expected one of tensor, channel, block"):
        parse_method("fp8:scale=row")
    with pytest.raises(CompileError, match=r"layers\.1: 1 of 4 numbers of the weight"):
        parse_method("fp8").quantize(np.array([[1, np.nan], [0, 1]], np.float32), name="layers.1")
