import numpy as np
import pytest

from llmc.compiler.lowering.values import (
    ONE,
    Buffer,
    View,
    contiguous,
    dims,
    divide,
    product,
    show,
)
from llmc.runtime.plan import Dim, Storage

T, N = Dim(tokens=1), Dim(rows=1)
TOKENS = 7


def whole(*shape):
    shape = dims(shape)
    return View(Buffer("b", Storage.ARENA, "float32", product(shape)), shape, contiguous(shape))


def indices(view, tokens=TOKENS, rows=3):
    """The position in the buffer of each element."""
    size = view.buffer.elements.at(tokens, rows)
    shape = [dim.at(tokens, rows) for dim in view.shape]
    strides = [dim.at(tokens, rows) * 8 for dim in view.strides]
    base = np.arange(size)[view.offset.at(tokens, rows) :]
    return np.lib.stride_tricks.as_strided(base, shape, strides)


def test_views_are_those_of_numpy():
    view = whole(T, 4, 6)
    array = np.arange(TOKENS * 24).reshape(TOKENS, 4, 6)
    np.testing.assert_array_equal(indices(view.transpose([1, 0, 2])), array.transpose(1, 0, 2))
    np.testing.assert_array_equal(indices(view.to_last([0])), np.moveaxis(array, 0, -1))
    np.testing.assert_array_equal(indices(view.narrow(2, Dim(1), Dim(2), 3)), array[:, :, 1:6:3])
    np.testing.assert_array_equal(indices(view.select(1, 2)), array[:, 2])
    np.testing.assert_array_equal(indices(view.unsqueeze([0, -1])), array[None, ..., None])
    np.testing.assert_array_equal(indices(view.unsqueeze([0, -1]).squeeze()), array)
    wide = view.unsqueeze([1]).expand([T, Dim(3), Dim(4), Dim(6)])
    np.testing.assert_array_equal(indices(wide), np.broadcast_to(array[:, None], (TOKENS, 3, 4, 6)))
    with pytest.raises(ValueError, match="broadcast"):
        view.expand([T, Dim(5), Dim(6)])


def test_random_reshapes_are_right_or_refused():
    rng = np.random.default_rng(0)
    shapes = [
        (T, 4, 6),
        (T, 2, 2, 3, 2),
        (4, T, 6),
        (T, 24),
        (T, 1, 8, 3),
        (2, T, 12),
        (24, T),
        (T * 4, 6),
        (2, 2, T, 6),
    ]
    made = refused = 0
    for _ in range(2000):
        view = whole(*shapes[rng.integers(len(shapes))])
        for _ in range(rng.integers(3)):
            view = view.transpose([int(i) for i in rng.permutation(view.rank)])
            axis = int(rng.integers(view.rank))
            size = view.shape[axis]
            if size.is_constant and size.constant > 1 and rng.random() < 0.3:
                view = view.narrow(axis, Dim(1), Dim(size.constant - 1))
            if rng.random() < 0.3:
                view = view.unsqueeze([axis]).expand([*view.shape[:axis], Dim(2), *view.shape[axis:]])
        flat = [dim for dim in view.shape if dim != ONE]
        constant = int(np.prod([dim.constant or dim.tokens for dim in flat]))
        divisors = [d for d in range(1, constant + 1) if constant % d == 0]
        d = divisors[rng.integers(len(divisors))]
        shape = [Dim(d), T, Dim(constant // d)]
        target = [shape[i] for i in rng.permutation(3)]
        found = view.reshape(target)
        if found is None:
            refused += 1
            continue
        made += 1
        expected = indices(view).reshape([dim.at(TOKENS, 3) for dim in target])
        np.testing.assert_array_equal(indices(found), expected)
    assert made > 200
    assert refused > 200


def test_a_reshape_that_could_be_a_view_is_one():
    assert whole(T, 4, 6).reshape([T, Dim(24)]) is not None
    assert whole(T, 24).reshape([ONE, T, Dim(4), ONE, Dim(6)]) is not None
    assert whole(4, T, 6).reshape([T * 4, Dim(6)]) is not None
    assert whole(T, 4, 6).narrow(2, Dim(0), Dim(3)).reshape([T * 4, Dim(3)]) is not None
    assert whole(T, 4, 6).narrow(1, Dim(0), Dim(3)).reshape([T * 3, Dim(6)]) is None
    assert whole(4, T, 6).transpose([1, 0, 2]).reshape([T, Dim(24)]) is None


def test_collapse():
    part = whole(T, 8, 6).narrow(1, Dim(2), Dim(4)).unsqueeze([0])
    assert part.collapse(2) is None
    rows = part.collapse(3)
    assert rows is not None
    assert rows.shape == (T, Dim(4), Dim(6))
    assert whole(1, T, 4, 6).collapse(2).shape == (T * 4, Dim(6))
    assert whole(1, T, 4, 6).collapse(3, keep=2).shape == (T, Dim(4), Dim(6))
    assert whole(6).collapse(2).shape == (ONE, Dim(6))


def test_sizes():
    assert divide(T * 24, Dim(6)) == T * 4
    assert divide(T * 24, T * 6) == Dim(4)
    assert divide(T * 24 + 12, T * 2 + 1) == Dim(12)
    assert divide(T * 24, Dim(7)) is None
    assert divide(T, N) is None
    with pytest.raises(ValueError, match="linear"):
        product([T, T])
    assert show([T * 2 + 3, N, Dim(0)]) == "[2 * T + 3, N, 0]"
