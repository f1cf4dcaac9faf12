"""Times the linear layers of a model's shape on random weights: GB/s of weights read, and GFLOP/s.

    python build_scripts/bench_kernels.py --model smol135m --rows 1,16,512

Each step of the plan is timed by itself and its best time of all rounds counts, since other processes steal time.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmc.plugins import _kernels, kernels
from llmc.plugins.linear.packing import packed_shape

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as in BENCHMARKS.md."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """(name, outputs, inputs) of the merged linears of one layer."""
        yield "qkv", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden
        yield "o", self.hidden, self.heads * self.head_dim
        yield "gate_up", 2 * self.inner, self.hidden
        yield "down", self.hidden, self.inner


MODELS = {
    "smol135m": Shape(576, 30, 9, 3, 64, 1536, 49152),
    "qwen05b": Shape(896, 24, 14, 2, 64, 4864, 151936),
    "llama1b": Shape(2048, 16, 32, 8, 64, 8192, 128256),
}


def main() -> None:
    """Parse the arguments and print one table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="smol135m")
    parser.add_argument("--dtype", choices=ITEM, default="bfloat16")
    parser.add_argument("--isa", choices=kernels.isas(), default=kernels.best_isa())
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    options = parser.parse_args()
    shape = MODELS[options.model]
    layers = shape.layers if options.layers is None else options.layers
    for rows in map(int, options.rows.split(",")):
        report(shape, layers, rows, options)


def report(shape: Shape, layers: int, rows: int, options: argparse.Namespace) -> None:
    """Run the layers of one number of rows, and the output layer for the last row."""
    kinds = [*shape.linears()] * layers + [("lm_head", shape.vocabulary, shape.hidden)]
    best = measure(kinds, rows, options)
    print(
        f"\n{options.model} {options.dtype} {options.isa}, {options.threads} threads, {rows} rows, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    totals = dict.fromkeys((name for name, _, _ in kinds), (0.0, 0, 0))
    for (name, outputs, inputs), seconds in zip(kinds, best, strict=True):
        used = 1 if name == "lm_head" else rows
        spent, size, operations = totals[name]
        size += outputs * inputs * ITEM[options.dtype]
        totals[name] = spent + seconds, size, operations + 2 * used * outputs * inputs
    totals["all"] = tuple(map(sum, zip(*totals.values(), strict=True)))
    for name, (spent, size, operations) in totals.items():
        print(
            f"  {name:8} {spent * 1e3:9.3f} ms {size / spent / 1e9:7.1f} GB/s {operations / spent / 1e9:8.1f} GFLOP/s"
        )


def measure(kinds: list[tuple[str, int, int]], rows: int, options: argparse.Namespace) -> list[float]:
    """Seconds of each linear."""
    generator = np.random.default_rng(0)
    noise = generator.integers(0x3C00, 0x3D00, 1 << 16, np.uint16) if options.dtype == "float16" else None
    weights, values, steps = [], [], []
    widest = max(max(outputs, inputs) for _, outputs, inputs in kinds[:-1]) if len(kinds) > 1 else kinds[0][1]
    space = rows * widest * 4 + 64
    values.append(("x", "arena", 0, "float32", [(0, 1, 0), (widest, 0, 0)], [(widest, 0, 0), (1, 0, 0)], (0, 0, 0)))
    for number, (name, outputs, inputs) in enumerate(kinds):
        packed = packed_shape(outputs, inputs, options.dtype)
        size = int(np.prod(packed)) * ITEM[options.dtype]
        weights.append(
            np.resize(
                noise if noise is not None else np.float32(0.01 * generator.standard_normal(4099)).view(np.uint8),
                size // 2 if noise is not None else size,
            ).view(np.uint8)
        )
        if options.dtype == "bfloat16":  # any bytes are not any numbers: small ones
            weights[-1].view(np.uint16)[:] &= 0xBDFF
        strides = [int(np.prod(packed[axis + 1 :])) for axis in range(len(packed))]
        values.append(
            (
                f"w{number}",
                "weight",
                number,
                options.dtype,
                [(n, 0, 0) for n in packed],
                [(n, 0, 0) for n in strides],
                (0, 0, 0),
            )
        )
        count = (1, 0, 0) if name == "lm_head" else (0, 1, 0)
        values.append(
            (f"x{number}", "arena", 0, "float32", [count, (inputs, 0, 0)], [(inputs, 0, 0), (1, 0, 0)], (0, 0, 0))
        )
        values.append(
            (f"y{number}", "arena", space, "float32", [count, (outputs, 0, 0)], [(outputs, 0, 0), (1, 0, 0)], (0, 0, 0))
        )
        steps.append(("linear", name, [3 * number + 2, 3 * number + 1], [3 * number + 3], {}))
    arena = space + max(space, kinds[-1][1] * 4)
    executor = _kernels.Executor(
        values, steps, arena, weights, [], "float32", 16, 1, options.threads, options.isa, False
    )
    executor.trace(True)
    one = np.zeros(1, np.int32)
    batch = _kernels.Batch(np.zeros(rows, np.int32), np.array([0, rows], np.int32), one, np.zeros((1, 0), np.int32))
    best = np.full(len(kinds), np.inf)
    for _ in range(options.rounds):
        executor.run(np.zeros(rows, np.int32), one, batch, len(steps))
        best = np.minimum(best, [end - begin for _, begin, end in executor.take_times()])
    return [float(b) / 1e9 for b in best]


if __name__ == "__main__":
    main()
