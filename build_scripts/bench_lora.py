"""What LoRA adapters cost: the same requests without one, with one, and with four in one batch, in turns.

    build_scripts/bench_lora.py ENGINE [--rounds 5] [--rank 16] [--prompt 128] [--new 32] [--requests 8]

Makes adapters of random numbers for every product of the engine. Prints tokens/s (read and written) and the ratios.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from llmc import LLM, SamplingParams
from llmc.runtime.adapter_file import CONFIG, WEIGHTS
from llmc.runtime.bench import prompt
from llmc.runtime.engine import load_engine
from llmc.runtime.lora import NAME

ADAPTERS = 4


def write_adapter(folder: Path, engine: Path, rank: int, seed: int) -> Path:
    """Small random numbers beside every product whose parts are known."""
    from safetensors.numpy import save_file

    loaded = load_engine(engine)
    weights = json.loads(loaded.read(NAME) or b"{}")["weights"]
    random, tensors = np.random.default_rng(seed), {}
    plan = loaded.plan
    for step in plan.steps:
        base = plan.value(step.inputs[1]).base if len(step.inputs) > 1 and step.inputs[1] is not None else None
        for part in weights.get(base, {"parts": ()})["parts"] if step.op.endswith("linear") else ():
            stem = "base_model.model." + part["name"].removesuffix(".weight")
            width = plan.value(str(step.inputs[0])).shape[-1].constant
            tensors[f"{stem}.lora_A.weight"] = random.normal(size=(rank, width), scale=0.01).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = random.normal(size=(part["rows"], rank), scale=0.01).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def run(llm: LLM, adapters: list[str | None], length: int, new: int) -> float:
    """Tokens/s of one request for each entry."""
    start = time.perf_counter()
    for i, adapter in enumerate(adapters):
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        llm.add_request(prompt(length, llm.vocab_size, i), params, adapter=adapter)
    while llm.has_unfinished:
        llm.step()
    return len(adapters) * (length + new) / (time.perf_counter() - start)


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    for name, default in (("rounds", 5), ("rank", 16), ("prompt", 128), ("new", 32), ("requests", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lora = {
            f"a{i}": write_adapter(Path(folder) / f"a{i}", arguments.engine, arguments.rank, i) for i in range(ADAPTERS)
        }
        llm = LLM(arguments.engine, lora=lora, prefix_cache=False)
    kinds: dict[str, list[str | None]] = {
        "none": [None] * arguments.requests,
        "one": ["a0"] * arguments.requests,
        "four": [f"a{i % ADAPTERS}" for i in range(arguments.requests)],
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    run(llm, kinds["one"], arguments.prompt, 2)  # first touch of weights and memory
    for _ in range(arguments.rounds):
        for kind, adapters in kinds.items():
            rates[kind].append(run(llm, adapters, arguments.prompt, arguments.new))
    report = {f"tokens/s, adapters: {kind}": statistics.median(values) for kind, values in rates.items()}
    for kind in ("one", "four"):
        ratios = [with_one / without for with_one, without in zip(rates[kind], rates["none"], strict=True)]
        report[f"{kind} : none, median of rounds"] = statistics.median(ratios)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
