"""Makes tests/golden/format-N: a tiny engine of the current format with what it generates, for later releases to run.

Run it once when the format gets a new number; an engine that is there is never made anew, since it stands for those
that users have. tests/runtime/test_golden.py loads all of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.runtime.manifest import FORMAT

FOLDER = Path(__file__).parents[1] / "tests/golden" / f"format-{FORMAT}"

PROMPTS = [[5, 17, 44, 30, 3], [61, 28], list(range(3, 43))]

RECIPE = """\
method: rtn:group=32
lm_head: true
rules:
- {match: '.*o_proj.*', method: int8}
- {match: '.*down_proj.*', method: 'fp8:scale=block'}
- {match: '.*layers.0.*up_proj.*', method: 'rtn:group=16,sym=false'}
- {match: '.*layers.1.self_attn.q_proj.*', method: none}
"""
"""All formats of weights, merged weights in parts, and some that stay."""


def main() -> None:
    """Write the folder."""
    if FOLDER.exists():
        sys.exit(f"{FOLDER} exists: engines of a format are made once")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    with tempfile.TemporaryDirectory() as temporary:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)  # far apart logits, which no instruction set orders in another way
        model.save_pretrained(Path(temporary) / "model")
        recipe = Path(temporary) / "recipe.yaml"
        recipe.write_text(RECIPE)
        FOLDER.mkdir(parents=True)
        build_engine(Path(temporary) / "model", FOLDER / "engine", BuildConfig(recipe=recipe, kv_dtype="int8"))
    results = LLM(FOLDER / "engine", isa="scalar").generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
    found = {"prompts": PROMPTS, "tokens": [result.token_ids for result in results]}
    (FOLDER / "generated.json").write_text(json.dumps(found) + "\n")
    print(sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()), "bytes")


if __name__ == "__main__":
    main()
