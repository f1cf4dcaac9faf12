"""Measure a build: time, and peak resident memory above that of the imports, against the bound that llmc promises.

    python build_scripts/measure_build.py MODEL                 a model directory or GGUF file
    python build_scripts/measure_build.py --shape llama7b       a synthetic checkpoint of that shape, in sparse shards

The bound is what `llmc build --dry-run` tells. Prints one JSON object; exit status 3 if the bound is broken.
"""

import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

MIB = 1 << 20
SHAPES = {
    "llama7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama7b-4layers": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
    },
}


def peak_rss() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_sparse_model(shape: str, folder: Path) -> None:
    """A bfloat16 Llama in shards that are holes but for some random bytes at the start of each tensor."""
    import numpy as np
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=32000, tie_word_embeddings=False, dtype="bfloat16", **SHAPES[shape])
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    rng = np.random.default_rng(0)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, size in _tensors(config).items():
        if sum(2 * int(np.prod(s)) for s in shards[-1].values()) > 4 << 30:
            shards.append({})
        shards[-1][name] = size
    index = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, end = {}, 0
        for name, size in tensors.items():
            begin, end = end, end + 2 * int(np.prod(size))
            header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
            index[name] = file
        encoded = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            start = out.tell()
            for entry in header.values():
                out.seek(start + entry["data_offsets"][0])
                # exponents around 2^-7, so that sums stay finite
                values = rng.standard_normal(512, dtype=np.float32).view(np.uint32) >> 16 & 0x80FF | 0x3C00
                out.write(values.astype(np.uint16).tobytes())
            out.truncate(start + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def random_tokens(path: Path) -> Path:
    """Calibration for a model without a tokenizer."""
    import numpy as np

    rows = np.random.default_rng(0).integers(3, 32000, (128, 512))
    path.write_text("\n".join(json.dumps({"tokens": row.tolist()}) for row in rows) + "\n")
    return path


def _tensors(config: object) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@click.command()
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option("--shape", type=click.Choice(list(SHAPES)), help="Make a synthetic checkpoint instead.")
@click.option("--quant", default="none", show_default=True, help="As of `llmc build`.")
@click.option("--kv-dtype", default="auto", show_default=True, help="As of `llmc build`.")
@click.option("--calib", help="As of `llmc build`.")
@click.option("--calib-samples", type=int, default=0, help="As of `llmc build`.")
@click.option("--calib-length", type=int, help="As of `llmc build`.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for what is made; default: a temporary one.")
def main(model: Path | None, shape: str | None, quant: str, kv_dtype: str, work: Path | None, **given: Any) -> None:
    """Build once and report."""
    import onnx_ir  # noqa: F401 - these are the imports that are not counted
    import torch._dynamo  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    from llmc.compiler.api import build_engine
    from llmc.compiler.config import BuildConfig
    from llmc.compiler.progress import Progress
    from llmc.plugins.paged_attention.storage import QUANTIZED

    folder = Path(tempfile.mkdtemp(dir=work))
    try:
        if shape:
            model = folder / "model"
            write_sparse_model(shape, model)
            given["calib"] = given["calib"] or str(random_tokens(folder / "calib.jsonl"))
        if model is None:
            raise click.UsageError("give MODEL or --shape")
        measured = kv_dtype in QUANTIZED or quant != "none"
        calibration = {name: value for name, value in given.items() if value and measured}
        longest = 2048 if shape is None else 4096
        config = BuildConfig(max_seq_len=longest, quantization=quant, kv_dtype=kv_dtype, **calibration)
        before, used = peak_rss(), time.process_time()
        start = time.monotonic()
        with Progress() as progress:
            built = build_engine(model, folder / "engine", config, progress=progress)
        result = {
            "model": shape or model.name,
            "quant": quant,
            "kv_dtype": kv_dtype,
            **calibration,
            "seconds": round(time.monotonic() - start, 1),
            "cpu_seconds": round(time.process_time() - used, 1),
            "steps": {name: round(seconds, 1) for name, seconds in progress.seconds.items()},
            "imports_mib": before // MIB,
            "peak_above_imports_mib": (peak_rss() - before) // MIB,
            "peak_mib": peak_rss() // MIB,
            "bound_mib": built.estimate.build_peak_bytes // MIB,
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result))
    if result["peak_above_imports_mib"] > result["bound_mib"]:
        sys.exit(3)


if __name__ == "__main__":
    main()
