"""Whole engines for CUDA on the emulator: numbers of transformers, and the same bits in any packing."""

from pathlib import Path

import engines
import numpy as np
from emulated import EmulatedDevice
from packed import MIXED, expected_logits, random_ids

from llmc.runtime.devices.cuda.executor import CudaExecutor
from llmc.runtime.engine import load_engine

WHOLE = ((("a", 29),), (("b", 21),))
DECODE = ((("b", 17),), (("b", 1),), (("b", 1),), (("b", 2),))


def test_a_llama_gives_the_numbers_of_transformers(tmp_path: Path) -> None:
    config = engines.small_llama()
    model, path = engines.build(
        config, tmp_path, target="cuda:sm_90", dtype="bfloat16", max_batch_tokens=64, max_sequences=8
    )
    ids = random_ids(config, a=29, b=21)
    expected = {key: expected_logits(model, x)[0].numpy() for key, x in ids.items()}
    tokens = {key: x[0].tolist() for key, x in ids.items()}
    engine = load_engine(path)
    found = {}
    for steps in (WHOLE, DECODE, MIXED):
        device = EmulatedDevice()
        packed = engines.Packed(CudaExecutor(engine, device, num_blocks=16), tokens)
        for key, logits in packed.run(steps).items():
            error = np.sqrt(np.mean((logits - expected[key][: len(logits)]) ** 2)) / expected[key].std()
            assert error < 0.03
            first = found.setdefault(key, logits)
            size = min(len(first), len(logits))
            assert np.array_equal(first[:size], logits[:size])
        assert device.waits and device.copies
