"""Kernels and references run the same engines: every dtype, packed weights, experts."""

import engines
import numpy as np
import pytest
from configs import CONFIGS
from packed import MIXED, random_ids

from llmc.compiler.reference_executor import ReferenceExecutor, for_engine
from llmc.plugins import kernels
from llmc.runtime.devices import make_executor
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-3, "float16": 1e-3}
"""bfloat16 rounds activations and keys: a sum that differs in its last bit can round the other way."""

KV_ERRORS = {"float8_e4m3": 5e-2, "int8": 2e-2, "int4": 1e-1}
"""Of the logits, relative to their standard deviation, where some numbers got another code."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["llama_tied_bias", "gpt_oss"])
def test_kernels_give_what_references_give(name, dtype, tmp_path):
    config = CONFIGS[name].make()
    _, path = engines.build(config, tmp_path, max_seq_len=64, max_batch_tokens=32, dtype=dtype)
    engine = load_engine(path)
    tokens = {key: ids[0].tolist() for key, ids in random_ids(config, a=29, b=21).items()}
    # attention with products of bfloat16 rounds queries
    isa = [isa for isa in kernels.isas() if isa not in ("avx512bf16", "amx")][-1]
    native = engines.Packed(CpuExecutor(engine, num_blocks=16, isa=isa), tokens).run(MIXED)
    reference = engines.Packed(for_engine(engine, num_blocks=16), tokens).run(MIXED)
    for key, logits in native.items():
        difference = np.abs(logits - reference[key])
        assert np.median(difference) < TOLERANCE[dtype]
        assert difference.max() < 20 * TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", KV_ERRORS)
def test_quantized_caches_give_what_the_references_give(kv_dtype, tmp_path):
    """A number that differs in its last bit can get another code: few logits then differ by more than a little."""
    config = CONFIGS["llama_tied_bias"].make()
    _, path = engines.build(config, tmp_path, max_seq_len=64, max_batch_tokens=32, kv_dtype=kv_dtype)
    engine = load_engine(path)
    assert engine.kv_cache.dtype == kv_dtype
    tokens = {key: ids[0].tolist() for key, ids in random_ids(config, a=29, b=21).items()}
    native = engines.Packed(CpuExecutor(engine, num_blocks=16, isa="scalar"), tokens).run(MIXED)
    reference = engines.Packed(for_engine(engine, num_blocks=16), tokens).run(MIXED)
    for key, logits in native.items():
        difference = np.abs(logits - reference[key]) / logits.std()
        assert np.median(difference) < 1e-4
        assert np.sqrt((difference**2).mean()) < KV_ERRORS[kv_dtype]


def test_the_debug_variable_chooses_it(tmp_path, monkeypatch):
    _, path = engines.build(engines.small_llama(), tmp_path, max_seq_len=64, max_batch_tokens=32)
    engine = load_engine(path)
    assert isinstance(make_executor(engine, num_blocks=4), CpuExecutor)
    monkeypatch.setenv("LLMC_REFERENCE", "1")
    assert isinstance(make_executor(engine, num_blocks=4), ReferenceExecutor)
