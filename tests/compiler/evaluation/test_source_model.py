"""The yardstick is transformers itself for every family: logits in parts, and free generation with its cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from configs import CONFIGS
from packed import expected_logits, random_model

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.evaluation.source_model import SourceModel

IDS = [(7 * i) % 110 + 5 for i in range(40)]


@pytest.mark.parametrize("name", CONFIGS)
def test_source_model(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = random_model(config.make(), config.reference)
    model.save_pretrained(tmp_path)
    source = SourceModel(Checkpoint.open(tmp_path), 1)
    source.begin(IDS)
    found = np.concatenate([source.logits(start, min(start + 16, 40)).copy() for start in range(0, 40, 16)])
    np.testing.assert_allclose(found, expected_logits(model, torch.tensor([IDS]))[0], atol=1e-4)
    [written] = source.generate([IDS[:9]], 6, [2])
    best = expected_logits(model, torch.tensor([IDS[:9] + written]))[0].argmax(-1)
    assert best[8:-1].tolist() == written
    source.begin(IDS[::-1])  # the next window is another one
    other = expected_logits(model, torch.tensor([IDS[::-1]]))[0]
    np.testing.assert_allclose(source.logits(0, 16), other[:16], atol=1e-4)
