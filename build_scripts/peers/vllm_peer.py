"""vLLM on the CPU: vllm_peer.py DIRECTORY THREADS; vllm_peer.py quantize CHECKPOINT OUTPUT writes W8A8 weights."""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.worker import Request, serve

KV_GIB = 1


class Vllm:
    """A model with vLLM's own defaults, but for the prefix cache and the size of the KV cache."""

    def __init__(self, directory: str, threads: int) -> None:
        os.environ |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        }
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=directory, max_model_len=4096, max_num_seqs=16, enable_prefix_caching=False, disable_log_stats=True
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.requests = 0

    def generate(self, requests: Sequence[Request]) -> list[list[float]]:
        """See Peer."""
        from vllm import SamplingParams

        times: dict[str, list[float]] = {}
        for ids, new in requests:
            name = str(self.requests)
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            self.engine.add_request(name, {"prompt_token_ids": ids}, params)
            times[name] = []
            self.requests += 1
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                stamps = times[output.request_id]
                stamps += [now] * (len(output.outputs[0].token_ids) - len(stamps))
        return list(times.values())


def quantize(source: Path, target: Path) -> None:
    """Write a compressed-tensors checkpoint: int8 weights with a scale for each row, inputs for each token."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight.float() / scale).round().to(torch.int8)
        tensors[name + "_scale"] = scale.to(weight.dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    kind: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    weights, inputs = {**kind, "strategy": "channel"}, {**kind, "strategy": "token", "dynamic": True}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }
    (target / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    if sys.argv[1] == "quantize":
        quantize(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        serve(lambda: Vllm(sys.argv[1], int(sys.argv[2])))
