import numpy as np
import pytest

from llmc.compiler.lowering.builder import LoweredStep
from llmc.compiler.lowering.values import Buffer, View, contiguous, dims, product
from llmc.compiler.memory import Arena, buffer_bytes, plan_arena, verify_arena
from llmc.errors import CompileError
from llmc.runtime.plan import Dim, Storage

T = Dim(tokens=1)


def view(name, *shape, dtype="float32"):
    shape = dims(shape)
    return View(Buffer(name, Storage.ARENA, dtype, product(shape)), shape, contiguous(shape))


def step(op, inputs, outputs):
    return LoweredStep(op, tuple(inputs), tuple(outputs), {"function": "f"} if op == "elementwise" else {})


def random_steps(rng, count):
    """A chain in which every step reads some of the latest results."""
    made = [view("start", T, 64)]
    steps = [step("embedding", [], [made[0]])]
    for i in range(count):
        inputs = [made[-1 - int(rng.integers(min(6, len(made))))] for _ in range(1 + int(rng.integers(2)))]
        like = inputs[0] if rng.random() < 0.4 else view("x", T, int(rng.integers(1, 300)))
        result = View(Buffer(f"v{i}", Storage.ARENA, "float32", like.buffer.elements), like.shape, like.strides)
        same = all(x.shape == result.shape for x in inputs)
        steps.append(step("elementwise" if same else "linear", inputs, [result]))
        made.append(result)
    return steps, made[-1]


def contents_survive(steps, last, arena, max_tokens):
    """Writes a number of its own for each step into every byte of its result, and finds it where it is read."""
    memory = np.full(arena.nbytes, -1)

    def span(buffer):
        return slice(arena.offsets[buffer], arena.offsets[buffer] + buffer_bytes(buffer, max_tokens))

    written = {}
    for number, s in enumerate(steps):
        for x in s.inputs:
            assert (memory[span(x.buffer)] == written[x.buffer]).all(), f"step {number} reads what is gone"
        for y in s.outputs:
            memory[span(y.buffer)] = number
            written[y.buffer] = number
    assert (memory[span(last.buffer)] == written[last.buffer]).all()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_is_there(seed):
    rng = np.random.default_rng(seed)
    steps, last = random_steps(rng, 60)
    arena = plan_arena(steps, [last.buffer], max_tokens=33)
    contents_survive(steps, last, arena, 33)
    assert all(offset % 64 == 0 for offset in arena.offsets.values())
    assert arena.nbytes < sum(buffer_bytes(buffer, 33) for buffer in arena.offsets) / 3, "memory is reused"


def test_an_elementwise_result_takes_the_place_of_a_dying_input():
    a, b, c, d = (view(name, T, 16) for name in "abcd")
    steps = [
        step("embedding", [], [a]),
        step("elementwise", [a], [b]),
        step("elementwise", [b], [c]),
        step("linear", [c], [d]),
        step("linear", [c, d], [view("e", T, 16)]),
    ]
    arena = plan_arena(steps, [steps[-1].outputs[0].buffer], 8)
    offsets = arena.offsets
    assert offsets[a.buffer] == offsets[b.buffer] == offsets[c.buffer] != offsets[d.buffer]


def test_other_views_keep_an_input_where_it_is():
    a, b = view("a", Dim(4), Dim(4)), view("b", Dim(4), Dim(4))
    steps = [step("embedding", [], [a]), step("elementwise", [a, a.transpose([1, 0])], [b])]
    arena = plan_arena(steps, [b.buffer], 8)
    assert arena.offsets[a.buffer] != arena.offsets[b.buffer]


def test_overlaps_are_found():
    a, b, c = (view(name, T, 16) for name in "abc")
    steps = [step("embedding", [], [a]), step("linear", [a], [b]), step("linear", [a, b], [c])]
    good = plan_arena(steps, [c.buffer], 4)
    for first, second in ((a, b), (b, c), (a, c)):
        bad = Arena({**good.offsets, first.buffer: good.offsets[second.buffer] + 64}, good.nbytes + 256)
        with pytest.raises(CompileError, match="overwrites"):
            verify_arena(steps, [c.buffer], bad, 4)


def test_reading_what_nobody_wrote_is_an_error():
    a, b = view("a", T, 16), view("b", T, 16)
    with pytest.raises(CompileError, match="reads a, which no step has written"):
        plan_arena([step("linear", [a], [b])], [b.buffer], 4)
