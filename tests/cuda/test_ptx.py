"""The PTX that NVRTC makes of kernels, interpreted: it agrees with the references, and with the emulator bit by bit."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract import Contract, compare, converted, reference, run
from emulator import INCLUDES, Emulator
from ptx import Interpreter
from ptx import run as interpret
from ptx_memory import Global
from ptx_parser import PtxError, parse
from test_nvrtc import LayoutParams
from test_small_ops import CONTRACTS

from llmc.compiler.cuda.nvrtc import compile_text, included
from llmc.plugins import all_ops
from llmc.plugins.cuda import Kernel, Launch

LAYOUTS = {
    "bf16": ("layout<BF16>", ml_dtypes.bfloat16, np.float32),
    "f16": ("layout<F16>", np.float16, np.float32),
    "s8": ("layout<int8_t, int32_t>", np.int8, np.int32),
    "e4m3": ("layout<E4M3>", ml_dtypes.float8_e4m3fn, np.float32),
}


def layout(name: str, function: str) -> Kernel:
    return Kernel(f"kernel_{name}", "layouts.cuh", function, LayoutParams, 32)


def launched(device: Emulator, kernel: Kernel, *arrays: np.ndarray, shared: int = 0, blocks: int = 1) -> np.ndarray:
    """What a kernel makes of its third array."""
    *inputs, out = arrays
    places = [device.put(a) for a in inputs] + [device.put(out, writable=True)]
    device.launch(Launch(kernel, LayoutParams(*places), (blocks, 1, 1), shared))
    return device.get(places[-1], out.shape, out.dtype)


@pytest.mark.parametrize("name", LAYOUTS)
def test_products_have_the_layout_of_the_manual(name: str) -> None:
    function, dtype, number = LAYOUTS[name]
    rng, inner = np.random.default_rng(1), 32 // np.dtype(dtype).itemsize
    a, b = (rng.integers(-8, 9, shape).astype(dtype) for shape in ((16, inner), (inner, 8)))
    c = rng.integers(-9, 9, (16, 8)).astype(number)
    per, group, thread = 4 // np.dtype(dtype).itemsize, np.arange(32)[:, None] // 4, np.arange(32)[:, None] % 4
    i, j, k = np.arange(4 * per), np.arange(2 * per), np.arange(4)
    lanes_a = a[group + 8 * (i // per % 2), thread * per + i % per + inner // 2 * (i // per // 2)]
    lanes_b = b[thread * per + j % per + inner // 2 * (j // per), group]
    place_c = (group + 8 * (k // 2), 2 * thread + k % 2)
    expected = c + a.astype(np.float64) @ b.astype(np.float64)
    for device in (Emulator(), Interpreter()):
        found = launched(device, layout(name, function), lanes_a, lanes_b, np.ascontiguousarray(c[place_c]))
        np.testing.assert_array_equal(found, expected[place_c].astype(number), err_msg=type(device).__name__)


def test_matrices_are_loaded_as_the_manual_says() -> None:
    rows = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    group, thread = np.arange(32) // 4, np.arange(32) % 4
    plain = np.stack([np.stack([m[group, 2 * thread], m[group, 2 * thread + 1]], -1) for m in rows], 1)
    transposed = np.stack([np.stack([m[2 * thread, group], m[2 * thread + 1, group]], -1) for m in rows], 1)
    expected = np.concatenate([plain, transposed], 1).astype(np.uint16)
    for device in (Emulator(), Interpreter()):
        kernel = layout("ldmatrix", "layout_ldmatrix<>")
        found = launched(device, kernel, rows, rows, np.zeros((32, 8, 2), np.uint16), shared=512)
        np.testing.assert_array_equal(found, expected, err_msg=type(device).__name__)


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_both_device_layers_give_the_same_bits(name: str) -> None:
    rng = np.random.default_rng(2)
    special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 448, 464, 465, 1e-3, 2.0**-9, 65504, 65520, 3e-8], "f")
    a = rng.integers(0, 1 << 32, 2048, dtype=np.uint32)
    a[1024:] = (rng.standard_normal(1024) * 2.0 ** rng.integers(-12, 10, 1024)).astype(np.float32).view(np.uint32)
    a[: len(special)], a[256:512] = special.view(np.uint32), np.arange(256) | np.arange(256) << 16
    b = rng.integers(0, 1 << 32, 2048, dtype=np.uint32)
    kernel = layout(f"words_{name}", f"layout_words<{name}>")
    found, other = (
        launched(device, kernel, a, b, np.zeros((2048, 8), np.uint32), blocks=64)
        for device in (Emulator(), Interpreter())
    )
    with np.errstate(invalid="ignore"):
        number = np.isnan(found.view(np.float32)) & np.isnan(other.view(np.float32))
    number[:, :4] = False
    words = (found != other) & ~number
    words[:, 1] = False  # pairs: a number that is none has many forms
    assert not words.any(), [
        (hex(a[i]), hex(b[i]), j, hex(found[i, j]), hex(other[i, j])) for i, j in np.argwhere(words)
    ]
    dtype = ml_dtypes.bfloat16 if name == "BF16" else np.float16
    pairs = [np.ascontiguousarray(x[:, 1]).view(dtype).astype(np.float32) for x in (found, other)]
    np.testing.assert_array_equal(*pairs)
    codes = a[256:512].astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.ascontiguousarray(found[256:512, 6]).view(np.float32), codes)
    x = a.view(np.float32)
    small = np.abs(x) < 448
    nearest = x[small].astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(found[small, 7], nearest)


@pytest.mark.parametrize("name", CONTRACTS)
def test_small_ops_agree_with_their_references(name: str) -> None:
    check(CONTRACTS[name][0], CONTRACTS[name][1], "compute_80", 18)


@pytest.mark.parametrize(("name", "arch"), [("softmax", "compute_90"), ("glu", "compute_120"), ("topk", "compute_100")])
def test_ptx_of_newer_targets(name: str, arch: str) -> None:
    check(CONTRACTS[name][0], CONTRACTS[name][1], arch, 18)


def check(contract: Contract, dtype: str, arch: str, step: int) -> None:
    """Some samples of an op."""
    op = all_ops()[contract.op]
    for number, sample in enumerate((contract.samples or op.plan_samples)(np.random.default_rng(7))):
        if number % step:
            continue
        sample = converted(op, contract, sample, dtype)
        expected = reference(op, contract, sample, dtype)
        outputs = [(e.shape, e.dtype.name) for e in expected]
        for one, other in zip(run(contract, sample, dtype, Interpreter(arch), outputs), expected, strict=True):
            compare(one, other, contract.units, f"llmc::{op.name} in {dtype}, sample {number}, {arch}")


MISTAKES = [
    ('"=r"(r) : "f"(high), "f"(low)', '"=r"(r) : "f"(low), "f"(high)', "words"),
    ('"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])', "product"),
    ("x4.trans.shared", "x4.shared", "ldmatrix"),
    ("fma.rn.bf16x2 %0, %1, %2, %3", "fma.rn.bf16x2 %0, %1, %3, %2", "words"),
    ("prmt.b32 %0, %1, %2", "prmt.b32 %0, %2, %1", "words"),
    ("lop3.b32 %0, %1, %2, %3", "lop3.b32 %0, %2, %1, %3", "words"),
    ('"r"(ok ? 16 : 0)', '"r"(ok ? 0 : 16)', "copy"),
    ('wait_group %0;\\n" ::"n"(N)', 'wait_group 3;\\n" ::"n"(N)', "copy"),
]


@pytest.mark.parametrize(("old", "new", "what"), MISTAKES)
def test_a_mistake_in_inline_ptx_is_found(old: str, new: str, what: str) -> None:
    """Each of them is invisible to the emulator, which never compiles that file."""
    kernel = {
        "words": layout("words_BF16", "layout_words<BF16>"),
        "product": layout("bf16", "layout<BF16>"),
        "ldmatrix": layout("ldmatrix", "layout_ldmatrix<>"),
        "copy": layout("copy", "layout_copy<>"),
    }[what]
    headers = included(kernel.source_text, INCLUDES)
    assert headers["csrc/cuda/gpu.cuh"].count(old) >= 1
    results: list[Any] = []
    for text in (headers["csrc/cuda/gpu.cuh"], headers["csrc/cuda/gpu.cuh"].replace(old, new)):
        ptx = compile_text(kernel.source_text, headers | {"csrc/cuda/gpu.cuh": text}, "compute_80", "mistake").decode()
        memory, rng = Global(1 << 20), np.random.default_rng(3)
        places = [memory.alloc(8192, name, True, True) for name in "abc"]
        for place in places:
            memory.view(place, 8192)[:] = (rng.standard_normal(4096) * 3).astype(ml_dtypes.bfloat16).view(np.uint8)
        try:
            interpret(ptx, Launch(kernel, LayoutParams(*places), (1, 1, 1), 512), memory)
            results.append(memory.view(places[2], 8192).tobytes())
        except PtxError as error:
            assert results, error
            results.append(str(error))
    assert results[0] != results[1]


@pytest.mark.parametrize(
    "text", ["mul.rz.f32 %f1, %f2, %f3;", "add.sat.s32 %r1, %r2, %r3;", "bar.sync 1;", "sin.approx.f32 %f1, %f2;"]
)
def test_unknown_forms_are_refused(text: str) -> None:
    with pytest.raises(PtxError, match=f"unknown instruction: {text[:-1]}"):
        parse(f".entry k(\n)\n.maxntid 32\n{{\n {text}\n ret;\n}}", "k")
