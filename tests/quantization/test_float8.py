import ml_dtypes
import numpy as np

from llmc.quantization.float8 import LARGEST, decode_e4m3, encode_e4m3

CODES = np.arange(256, dtype=np.uint8)


def test_every_code_is_read_as_ml_dtypes_reads_it() -> None:
    assert np.array_equal(decode_e4m3(CODES), CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32), equal_nan=True)


def test_every_number_goes_back_to_its_code() -> None:
    finite = CODES[(CODES & 0x7F) != 0x7F]
    assert np.array_equal(encode_e4m3(decode_e4m3(finite)), finite)


def test_numbers_between_are_rounded_as_ml_dtypes_rounds_them() -> None:
    rng = np.random.default_rng(0)
    values = np.exp(rng.uniform(np.log(1e-4), np.log(448), 50_000)).astype(np.float32) * rng.choice([-1, 1], 50_000)
    halves = (decode_e4m3(CODES[:0x7E]) + decode_e4m3(CODES[1:0x7F])) / 2
    for numbers in (values.astype(np.float32), halves, -halves, np.zeros(3, np.float32)):
        assert np.array_equal(encode_e4m3(numbers), numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_what_is_too_large_saturates() -> None:
    values = decode_e4m3(encode_e4m3(np.array([449, 1e30, np.inf, -np.inf, -465], np.float32)))
    assert np.array_equal(values, np.array([LARGEST, LARGEST, LARGEST, -LARGEST, -LARGEST], np.float32))
    assert encode_e4m3(np.array([np.nan], np.float32)) & 0x7F == 0x7F
