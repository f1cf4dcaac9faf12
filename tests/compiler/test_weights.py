import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from llmc.compiler import weights
from llmc.compiler.weights import Array, Cast, Concat, Reshape, Slice, SourceTensor, Stack, Transpose
from llmc.errors import CompileError

A = np.arange(7 * 6, dtype=np.float32).reshape(7, 6)
B = -np.arange(3 * 6, dtype=np.float32).reshape(3, 6)
CUBE = np.arange(3 * 4 * 5, dtype=np.int64).reshape(3, 4, 5)

COMPOSITIONS = {
    "array": (Array(A), A),
    "scalar": (Array(np.float32(3)[()] * np.ones(())), np.array(3.0)),
    "concat": (Concat((Array(A), Array(B), Array(A))), np.concatenate([A, B, A])),
    "concat_axis_1": (Concat((Array(A), Array(A[:, :1])), 1), np.concatenate([A, A[:, :1]], 1)),
    "stack": (Stack((Array(B), Array(B + 1))), np.stack([B, B + 1])),
    "transpose": (Transpose(Array(A), (1, 0)), A.T),
    "transpose_inner": (Transpose(Array(CUBE), (0, 2, 1)), CUBE.transpose(0, 2, 1)),
    "transpose_rotate": (Transpose(Array(CUBE), (2, 0, 1)), CUBE.transpose(2, 0, 1)),
    "cast": (Cast(Array(A / 3), "bfloat16"), (A / 3).astype(ml_dtypes.bfloat16)),
    "reshape": (Reshape(Array(A), (3, 14)), A.reshape(3, 14)),
    "reshape_split": (Reshape(Array(A), (14, 3)), A.reshape(14, 3)),
    "reshape_to_scalar": (Reshape(Array(A[:1, :1]), ()), A[:1, :1].reshape(())),
    "reshape_from_scalar": (Reshape(Array(np.array(2.0)), (1, 1)), np.array([[2.0]])),
    "slice": (Slice(Array(A), (slice(1, 6, 2), slice(None, -1))), A[1:6:2, :-1]),
    "slice_backwards": (Slice(Array(A), (slice(5, None, -2), slice(None, None, -1))), A[5::-2, ::-1]),
    "slice_empty": (Slice(Array(A), (slice(2, 2),)), A[2:2]),
    "slice_of_concat": (Slice(Concat((Array(A), Array(B))), (slice(5, 9),)), np.concatenate([A, B])[5:9]),
    "merged_experts": (
        Stack(tuple(Concat((Array(B + e), Array(B - e))) for e in range(3))),
        np.stack([np.concatenate([B + e, B - e]) for e in range(3)]),
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_equals_numpy_whole_and_in_pieces(name):
    source, expected = COMPOSITIONS[name]
    assert isinstance(source, weights.WeightSource)
    assert source.shape == expected.shape
    assert source.dtype == expected.dtype.name
    assert source.nbytes == expected.nbytes
    np.testing.assert_array_equal(weights.read(source), expected)
    if expected.ndim:
        for start in range(len(expected) + 1):
            for stop in range(start, len(expected) + 1):
                np.testing.assert_array_equal(source.rows(start, stop), expected[start:stop])
    for chunk_bytes in (1, 50, 1 << 20):
        chunks = list(weights.stream(source, chunk_bytes))
        whole = np.concatenate(chunks) if expected.ndim and chunks else np.asarray(weights.read(source))
        np.testing.assert_array_equal(whole, expected)


def test_bad_compositions_are_refused():
    with pytest.raises(CompileError, match="concatenate"):
        Concat((Array(A), Array(CUBE)))
    with pytest.raises(CompileError, match="concatenate"):
        Concat((Array(A), Array(A[:, :2])))
    with pytest.raises(CompileError, match="concatenate"):
        Concat((Array(A), Array(A.astype(np.int32))))
    with pytest.raises(CompileError, match="stack"):
        Stack((Array(A), Array(B)))
    with pytest.raises(CompileError, match="order"):
        Transpose(Array(A), (0, 0))
    with pytest.raises(CompileError, match="elements"):
        Reshape(Array(A), (5, 5))
    with pytest.raises(CompileError, match="unknown dtype 'float7'"):
        weights.numpy_dtype("float7")


def test_only_what_is_needed_is_read():
    class Counting(Array):
        read = 0

        def rows(self, start, stop):
            Counting.read += stop - start
            return super().rows(start, stop)

    Concat((Counting(A), Counting(B))).rows(6, 8)
    assert Counting.read == 2
    Slice(Counting(A), (slice(2, 4),)).rows(0, 1)
    assert Counting.read == 3
    SourceTensor(Counting(A))
    assert Counting.read == 3


def test_source_tensor_is_an_initializer():
    tensor = SourceTensor(Cast(Array(A), "bfloat16"), "w")
    assert (tensor.name, tensor.dtype, tuple(tensor.shape)) == ("w", ir.DataType.BFLOAT16, (7, 6))
    assert tensor.nbytes == 84
    np.testing.assert_array_equal(np.asarray(tensor).astype(np.float32), A)
    assert tensor.tobytes() == A.astype(ml_dtypes.bfloat16).tobytes()
    assert weights.source_of(tensor) is tensor.source
    np.testing.assert_array_equal(weights.read(weights.source_of(ir.tensor(A))), A)
