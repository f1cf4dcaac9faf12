"""Sampling on CUDA draws the tokens that the sampler of the runtime draws."""

from typing import Any

import numpy as np
import pytest
from emulator import Emulator

from llmc.plugins import cuda_sampling
from llmc.plugins.cuda import Tensor
from llmc.runtime.request import SamplingParams
from llmc.runtime.sampling import LARGEST, sample_token, uniform

CASES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1e-4},
    {"temperature": 1.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.0001},
    {"temperature": 1.5, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 700, "top_p": 0.5},
)


def sampled(logits: np.ndarray, cases: list[dict[str, Any]], draws: np.ndarray, mode: str) -> tuple[np.ndarray, Any]:
    with Emulator(mode) as device:
        given = device.tensor(logits, "logits")
        arrays = {
            name: device.put(np.array([case.get(name, default) for case in cases], kind), name)
            for name, default, kind in (
                ("temperature", 1, np.float32),
                ("top_k", 0, np.int32),
                ("top_p", 1, np.float32),
                ("min_p", 0, np.float32),
            )
        }
        tokens, scores = (device.alloc(4 * len(cases), name) for name in ("tokens", "scores"))
        arrays |= {"draws": device.put(draws, "draws"), "tokens": tokens, "scores": scores}
        device.launch(cuda_sampling.sample(given, arrays))
        return device.get(tokens, (len(cases),), "int32"), device.get(scores, (len(cases),), "float32")


@pytest.mark.parametrize(("size", "mode"), [(1, "checked"), (33, "checked"), (513, "checked"), (3001, "plain")])
def test_draws(size: int, mode: str) -> None:
    """Scores of all shapes, rounded ones with many ties too."""
    rng = np.random.default_rng(size)
    cases = [case for case in CASES if case.get("top_k", 0) <= size or size > 500]
    rows = [rng.standard_normal(size) * scale for scale in (0.1, 1, 8)]
    rows += [np.round(rng.standard_normal(size)), np.where(rng.random(size) < 0.5, -np.inf, rng.standard_normal(size))]
    rows = [np.where(np.isfinite(row).any(), row, 0) for row in rows]
    logits = np.stack([row for row in rows for _ in cases]).astype(np.float32)
    given = cases * len(rows)
    draws = np.array([uniform(size, 0, place) for place in range(len(given))])
    draws[:2] = 0, 1 - 2.0**-53
    tokens, scores = sampled(logits, given, draws, mode)
    for row, case, draw, token in zip(logits, given, draws, tokens, strict=True):
        params = SamplingParams(**case)
        expected = int(row.argmax()) if params.temperature == 0 else sample_token(row, params, float(draw))
        assert token == expected, (size, case, draw)
    np.testing.assert_array_equal(scores, logits[np.arange(len(given)), tokens])


def test_a_share_that_is_reached_exactly_takes_no_more() -> None:
    """Half of two equal tokens is the first of them, for any draw; of four the first two."""
    rows = np.full((4, 600), -np.inf, np.float32)
    rows[:2, [3, 580]] = 1.0
    rows[2:, [3, 8, 70, 580]] = -2.0
    tokens, _ = sampled(rows, [{"top_p": 0.5}] * 4, np.array([0.0, 0.999, 0.499, 0.999]), "checked")
    np.testing.assert_array_equal(tokens, [3, 3, 3, 8])


def test_a_row_that_is_not_finite_shows_it() -> None:
    rows = np.zeros((4, 40), np.float32)
    rows[0, 7], rows[1, 9], rows[2] = np.nan, np.inf, -np.inf
    rows[3] = -0.0
    rows[3, 5] = 0.0
    tokens, scores = sampled(rows, [{}, {}, {}, {"temperature": 0.0}], np.full(4, 0.5), "checked")
    np.testing.assert_array_equal(tokens, [7, 9, 0, 0])
    np.testing.assert_array_equal(scores, [np.nan, np.inf, -np.inf, 0])


def test_adjusted_logits() -> None:
    """Repetition, presence and frequency, biases and bans, and a mask for some rows."""
    rng = np.random.default_rng(3)
    size = 70
    logits = rng.standard_normal((3, size), np.float32)
    logits[0, :2] = 1e38, -np.inf
    logits[1, 6], logits[2, 7] = np.nan, np.inf  # whatever the mask says
    ids = [np.array([0, 1, 5, 69]), np.array([], int), np.array([3, 64])]
    factors = np.array([1e-3, 1.7, 1.7, 1.7, 1, 1], np.float32)
    penalties = np.array([0, 0, 0.1, 2.3, 0, 0.7])
    biases = np.array([0, 0, 2.5, 0, -np.inf, 0], np.float32)
    bits = rng.integers(0, 2, (1, 96)).astype(np.uint8)
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    with Emulator() as device:
        address = device.put(logits, "logits", writable=True)
        arrays = {
            "bounds": device.put(np.cumsum([0, *map(len, ids)]).astype(np.int32), "bounds"),
            "ids": device.put(np.concatenate(ids).astype(np.int32), "ids"),
            "factors": device.put(factors, "factors"),
            "penalties": device.put(penalties, "penalties"),
            "biases": device.put(biases, "biases"),
            "mask_of": device.put(np.array([-1, 0, 0], np.int32), "mask_of"),
            "masks": device.put(words, "masks"),
        }
        device.launch(cuda_sampling.adjust(Tensor(address, "float32", (3, size), (size, 1)), arrays, 3))
        found = device.get(address, (3, size), "float32")
    expected = logits.copy()
    repeated = [x / factors[2] if x > 0 else x * factors[2] for x in logits[0, [5, 69]]]
    expected[0, [0, 5, 69]] = [LARGEST, *repeated]  # 1e38 over 1e-3 is out of reach
    expected[0, [5, 69]] = (expected[0, [5, 69]] - penalties[2:4]).astype(np.float32) + biases[2:4]
    expected[2, 3], expected[2, 64] = -np.inf, np.float64(expected[2, 64]) - 0.7
    expected[1:][:, bits[0, :size] == 0] = -np.inf
    expected[1, 6], expected[2, 7] = np.nan, np.inf
    np.testing.assert_array_equal(found, expected)
