"""The decoders of more_configs on CUDA, as those of configs in test_coverage.py; too long for every day:

pytest tests/cuda/more_on_cuda.py
"""

from pathlib import Path

import pytest
from cuda_models import build_again, check_on_cuda
from more_configs import MORE
from packed import random_ids
from quantizable import compiled, save_model


# transformers saves the text part of emu3 as something that it can't load again, and builds refuse it
@pytest.mark.parametrize("name", [name for name in MORE if name != "emu3"])
def test_on_cuda(name: str, tmp_path: Path) -> None:
    model = compiled(save_model(name, tmp_path / "model"), max_seq_len=MORE[name].max_len)
    cpu = build_again(model, tmp_path / "cpu", target="cpu", dtype="float32")
    tokens = random_ids(MORE[name].make(), a=29, b=21)
    check_on_cuda(model, cpu, tmp_path / "cuda", {key: ids[0].tolist() for key, ids in tokens.items()})
