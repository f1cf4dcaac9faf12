"""Measures paged attention alone: prefill against the multiply-add peak, decode against the bytes of keys and values.

Trees are measured against as many rows of a prompt: the ratio of the best times, and the median of the ratios.

python build_scripts/bench_attention.py --heads 9 --kv-heads 3 --dim 64 --kv-dtype bfloat16 --threads 2
"""

import argparse
import time

import numpy as np

from llmc.plugins import _kernels, kernels
from llmc.plugins.paged_attention.storage import GROUP, KV_DTYPES, POSITIONS, bytes_per_position

BLOCK = 16


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--value-dim", type=int, default=0, help="default: as dim")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=KV_DTYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=kernels.best_isa(), choices=kernels.isas())
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each case")
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    arguments = parser.parse_args()
    arguments.value_dim = arguments.value_dim or arguments.dim
    for name, past, rows, sequences in (
        ("prefill 512", 0, 512, 1),
        ("prefill 2048", 0, 2048, 1),
        ("chunk 256 at 1792", 1792, 256, 1),
        ("decode at 128", 127, 1, 1),
        ("decode at 512", 511, 1, 1),
        ("decode at 2048", 2047, 1, 1),
        ("decode 16 x 512", 511, 1, 16),
        ("decode at 16384", 16383, 1, 1),
        ("decode at 32768", 32767, 1, 1),
    ):
        if arguments.only not in name:
            continue
        report(name, past, rows, sequences, arguments)
    for past, rows in ((128, 16), (512, 8), (512, 64), (2048, 64)):
        name = f"tree {rows} at {past}"
        if arguments.only in name:
            compare_tree(name, past, rows, arguments)


def compare_tree(name: str, past: int, rows: int, arguments: argparse.Namespace) -> None:
    """Time a tree of so many rows and as many rows of a prompt, in turn."""
    mask = np.zeros((rows, 1), np.uint64)
    for row in range(rows):  # each parent has up to three children
        parent = mask[(row - 1) // 3] if row else np.zeros(1, np.uint64)
        mask[row] = parent | np.uint64(1 << row)
    kinds = [prepare(past, rows, 1, arguments), prepare(past, rows, 1, arguments, mask)]
    times: list[list[int]] = [[], []]
    end = time.perf_counter() + arguments.seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for (executor, batch, ids), found in zip(kinds, times, strict=True):
            executor.run(ids, np.zeros(0, np.int32), batch, 1)
            [(_, begin, stop)] = executor.take_times()
            found.append(stop - begin)
    prompt, tree = (min(found) / 1e3 for found in times)
    ratio = float(np.median(np.array(times[1]) / np.array(times[0])))
    print(f"{name:18} best {tree:9.1f} us, as rows of a prompt {prompt:9.1f} us: {tree / prompt:.2f} ({ratio:.2f})")


def report(name: str, past: int, rows: int, sequences: int, arguments: argparse.Namespace) -> None:
    """Time one case: ``rows`` new tokens behind ``past`` cached ones, in each of the sequences."""
    heads, kv_heads, key_dim, value_dim = arguments.heads, arguments.kv_heads, arguments.dim, arguments.value_dim
    executor, batch, ids = prepare(past, rows, sequences, arguments)
    times: list[int] = []
    end = time.perf_counter() + arguments.seconds
    while time.perf_counter() < end or len(times) < 5:
        executor.run(ids, np.zeros(0, np.int32), batch, 1)
        [(_, begin, stop)] = executor.take_times()
        times.append(stop - begin)
    median, seconds = float(np.median(times)) / 1e3, min(times) / 1e9
    seen = sequences * sum(past + r + 1 for r in range(rows))
    flops = 2 * seen * heads * (key_dim + value_dim)
    read = sequences * (past + rows) * kv_heads * bytes_per_position(arguments.kv_dtype, key_dim, value_dim)
    speed = f"{flops / seconds / 1e9:6.1f} GFLOP/s {read / seconds / 1e9:6.1f} GB/s of K and V"
    print(f"{name:18} best {seconds * 1e6:9.1f} us (median {median:9.1f}): {speed}")


def fill(cache: np.ndarray, dtype: str, kv_heads: int, dims: int, rng: np.random.Generator) -> None:
    """Put numbers of about 1 into the keys or values of a slot; the same into each block."""
    if cache.dtype != np.uint8:
        numbers = rng.standard_normal(cache.shape[1:], dtype=np.float32)
        cache[:] = numbers.view(np.uint32) >> 16 if dtype == "bfloat16" else numbers
        return
    scales = np.full(POSITIONS, 0.01, np.float32)
    if dtype == "int4":
        scales = np.tile(np.repeat(np.array([0.1, -1], np.float16), POSITIONS), -(-dims // GROUP))
    pages = rng.integers(0, 128, cache.shape[1:], np.uint8).reshape(kv_heads * BLOCK // POSITIONS, -1)
    pages[:, -scales.nbytes :] = scales.view(np.uint8)
    cache[:] = pages.reshape(-1)


def prepare(
    past: int, rows: int, sequences: int, arguments: argparse.Namespace, tree: np.ndarray | None = None
) -> tuple[_kernels.Executor, _kernels.Batch, np.ndarray]:
    """An executor whose plan is one attention step, with a filled cache."""
    heads, kv_heads, key_dim, value_dim = arguments.heads, arguments.kv_heads, arguments.dim, arguments.value_dim
    shapes = [(heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim), (heads, value_dim)]
    tokens, per_sequence = rows * sequences, -(-(past + rows) // BLOCK)
    values, offset = [], 0
    for name, (count, width) in zip("qkvy", shapes, strict=True):
        sizes = [(0, 1, 0), (count, 0, 0), (width, 0, 0)]
        strides = [(count * width, 0, 0), (width, 0, 0), (1, 0, 0)]
        values.append((name, "arena", offset, "float32", sizes, strides, (0, 0, 0)))
        offset += (count * width * 4 * tokens + 63) // 64 * 64
    attributes = {"slot": 0, "write": True, "scale": key_dim**-0.5, "window": 0, "chunk": 0, "softcap": 0.0}
    step = ("paged_attention", "", [0, 1, 2, -1, -1], [3], attributes)
    blocks = sequences * per_sequence
    executor = _kernels.Executor(
        values,
        [step],
        offset,
        [],
        [(kv_heads, key_dim, value_dim)],
        arguments.kv_dtype,
        BLOCK,
        blocks,
        arguments.threads,
        arguments.isa,
        False,
    )
    rng = np.random.default_rng(0)
    for cache, dims in ((executor.keys(0), key_dim), (executor.values(0), value_dim)):
        fill(cache, arguments.kv_dtype, kv_heads, dims, rng)
    batch = _kernels.Batch(
        np.tile(np.arange(past, past + rows, dtype=np.int32), sequences),
        np.arange(0, tokens + 1, rows, dtype=np.int32),
        np.full(sequences, past, np.int32),
        rng.permutation(blocks).astype(np.int32).reshape(sequences, per_sequence),
        tree,
    )
    ids = np.zeros(tokens, np.int32)
    executor.run(ids, np.zeros(0, np.int32), batch, 0)
    for value in range(3):
        array = executor.view(value)
        array[...] = rng.standard_normal(array.shape, dtype=np.float32)
    executor.trace(True)
    return executor, batch, ids


if __name__ == "__main__":
    main()
