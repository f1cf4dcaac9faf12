"""llm-compressor on the CPU: python -m peers.llmcompressor_peer < order.json; prints one line of JSON.

The model in float32, its products in bfloat16 while it is quantized (exact ones are several times slower) and in
float32 while it is measured, with the numbers that the codes stand for as weights.
"""

import json
import math
import sys
import time
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def schemes(model: Any, bits: int, group: int, symmetric: bool) -> dict[str, QuantizationScheme]:
    """One for each size of group: columns that ``group`` does not divide, it refuses, so they get smaller groups."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            width = module.in_features
            size = next(g for g in range(group or width, 0, -1) if width % g == 0)
            names.setdefault(size, []).append(name)
    return {
        f"group_{size}": QuantizationScheme(
            targets=targets,
            weights=QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=size),
        )
        for size, targets in names.items()
    }


def losses(model: Any, ids: list[int], context: int, windows: int, prefix: list[int]) -> list[float]:
    """The mean over the tokens of each window, in nats; they are equally long and do not overlap, as in `llmc eval`."""
    step, found = context - len(prefix), []
    for start in range(0, min(len(ids) // step, windows) * step, step):
        window = torch.tensor([*prefix, *ids[start : start + step]])
        with torch.inference_mode():
            logits = model(window[None], use_cache=False).logits[0, :-1]
        found.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    return found


def main(order: dict[str, Any]) -> None:
    """Quantize (method "none": don't) and measure."""
    torch.set_num_threads(order["threads"])
    torch.set_float32_matmul_precision("medium")
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]  # it pins without a device too
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32).eval()
    started = time.process_time()
    if order["method"] != "none":
        groups = schemes(model, order["bits"], order["group"], order["symmetric"])
        modifiers: dict[str, list[Any]] = {
            "rtn": [QuantizationModifier(config_groups=groups)],
            "awq": [AWQModifier(), QuantizationModifier(config_groups=groups)],
            "gptq": [GPTQModifier(config_groups=groups)],
        }
        tokens = order["calibration"]
        oneshot(
            model=model,
            dataset=Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]}),
            recipe=modifiers[order["method"]],
            max_seq_length=len(tokens[0]),
            num_calibration_samples=len(tokens),
            shuffle_calibration_samples=False,
        )
    seconds = time.process_time() - started
    torch.set_float32_matmul_precision("highest")
    tokenizer = AutoTokenizer.from_pretrained(order["model"])
    with open(order["text"], encoding="utf-8", newline="") as file:
        ids = tokenizer(file.read(), add_special_tokens=False).input_ids
    found = losses(model, ids, order["context"], order["windows"], order["prefix"])
    perplexity = math.exp(sum(found) / len(found))
    print(json.dumps({"perplexity": perplexity, "losses": found, "processor_seconds": seconds}))


if __name__ == "__main__":
    main(json.loads(sys.stdin.read()))
