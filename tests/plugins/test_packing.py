import ml_dtypes
import numpy as np
import pytest

from llmc.plugins.linear import packing

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(16, 8), (1, 1), (15, 7), (17, 9), (48, 33), (100, 2)])
def test_every_element_is_where_the_layout_says(rows, columns, dtype):
    weight = np.random.default_rng(0).standard_normal((rows, columns)).astype(DTYPES[dtype])
    packed = packing.pack(weight)
    assert packed.shape == packing.packed_shape(rows, columns, dtype)
    assert packed.dtype == weight.dtype
    expected = np.zeros(packed.shape, packed.dtype)
    for n in range(rows):
        for k in range(columns):
            if dtype == "bfloat16":
                expected[n // 16, k // 2, n % 16, k % 2] = weight[n, k]
            else:
                expected[n // 16, k, n % 16] = weight[n, k]
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(packing.unpack(packed, rows, columns), weight)
    ids = np.array([[rows - 1, 0], [rows // 2, rows - 1]])
    np.testing.assert_array_equal(packing.unpack_rows(packed, ids, columns), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_streaming_gives_the_same(dtype, chunk_bytes):
    weight = np.random.default_rng(0).standard_normal((85, 13)).astype(DTYPES[dtype])
    pieces = list(packing.pack_stream(lambda a, b: weight[a:b], 85, 13, chunk_bytes))
    np.testing.assert_array_equal(np.concatenate(pieces), packing.pack(weight))
    assert (len(pieces) > 1) == (chunk_bytes < 1 << 20)


def test_a_view_can_be_packed():
    weight = np.arange(20 * 8, dtype=np.float32).reshape(8, 20).T
    np.testing.assert_array_equal(packing.unpack(packing.pack(weight), 20, 8), weight)
