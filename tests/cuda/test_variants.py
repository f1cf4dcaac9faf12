"""Quantized weights, float16 and each type of KV cache on CUDA: the numbers of the same engine on the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
from configs import CONFIGS
from cuda_models import FAR, build_again, check_variant
from packed import random_ids

from llmc.compiler.api import Compiled
from llmc.errors import UsageError

CALIBRATED = {"calib": "self", "calib_samples": 2, "calib_length": 32}
VARIANTS = {
    "llama-int4": ("llama", {"quantization": "rtn:group=32"}),
    "llama-int8": ("llama", {"quantization": "rtn:bits=8,group=32"}),
    "llama-w8a8": ("llama", {"quantization": "smoothquant", **CALIBRATED}),
    "llama-fp8": ("llama", {"quantization": "fp8:scale=tensor,inputs=fp8"}),
    "llama-f16": ("llama", {"dtype": "float16"}),
    "llama-kv-f16": ("llama", {"kv_dtype": "float16"}),
    "llama-kv-fp8": ("llama", {"kv_dtype": "float8_e4m3"}),
    "llama-kv-int8": ("llama", {"kv_dtype": "int8"}),
    "gemma-int8": ("gemma", {"quantization": "rtn:bits=8,group=0"}),
    "gemma2-kv-int8": ("gemma2", {"kv_dtype": "int8"}),
    "bloom-kv-fp8": ("bloom", {"kv_dtype": "float8_e4m3"}),
    "mixtral-int4": ("mixtral", {"quantization": "rtn:group=32"}),
    "mixtral-w8a8": ("mixtral", {"quantization": "smoothquant", **CALIBRATED}),
    "gpt_oss-f16-int4": ("gpt_oss", {"dtype": "float16", "quantization": "rtn:group=16,sym=false"}),
    "gpt_oss-kv-int8": ("gpt_oss", {"kv_dtype": "int8"}),
    "deepseek_v3-kv-int8": ("deepseek_v3", {"kv_dtype": "int8", "quantization": "rtn:bits=8,group=32"}),
}
FARTHER = {"llama-w8a8": 0.08, "mixtral-w8a8": 0.08, "llama-fp8": 0.15, "deepseek_v3-kv-int8": 0.08}
"""What is allowed where bfloat16 may round inputs, or what a cache keeps, to other codes."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_on_the_cpu(variant: str, models: Callable[[str], Compiled], tmp_path: Path) -> None:
    name, options = VARIANTS[variant]
    ids = {key: x[0].tolist() for key, x in random_ids(CONFIGS[name].make(), a=29, b=21).items()}
    check_variant(models(name), tmp_path, ids, FARTHER.get(variant, FAR), **options)


def test_keys_of_four_bits_are_refused(models: Callable[[str], Compiled], tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--kv-dtype int4: --target cuda:sm_90 has bfloat16, float16, float8_e4m3, int8"
    ):
        build_again(models("llama"), tmp_path / "engine", kv_dtype="int4")
