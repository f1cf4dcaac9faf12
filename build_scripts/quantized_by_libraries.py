"""Compare what llmc reads from quantized checkpoints with the libraries that wrote them: numbers and greedy tokens.

    PYTHON_OF_LIBRARY build_scripts/quantized_by_libraries.py make LIBRARY FOLDER     gptqmodel, autoawq, bitsandbytes
    python build_scripts/quantized_by_libraries.py check FOLDER

``make`` needs the library, torch and transformers, not llmc: it may run in an environment of its own. It quantizes a
small random Llama in each way of the library, and keeps beside each checkpoint what the library itself dequantizes and
generates. ``check`` needs llmc: dequantized weights have to be bit-equal, and greedy tokens equal where the library
computes on a CPU; where it rounds inputs to few bits, the first other token may be one that it finds nearly as good
(within 2 % of the span of its logits). Prints a line of JSON for each checkpoint; exit status 1 if one differs.
"""

import gc
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT = [3, 40, 17, 5, 29, 11, 2, 33, 8]
TOKENS = 24
EXPECTED = "expected.npz"
NEAR = 0.02

Found = tuple[str, Any, dict[str, Any], str, str]
"""Name of a checkpoint, the library's model, its weights, what --compute is like its products, and a remark."""


def small_llama(folder: Path) -> Path:
    """A random model with a tokenizer of words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=127,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
    model.to(torch.float16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w127", pad_token="w127")
    fast.save_pretrained(folder)
    return folder


def calibration() -> list[list[int]]:
    """Samples of token ids."""
    random = np.random.default_rng(1)
    return [random.integers(3, 120, 128).tolist() for _ in range(16)]


def linears(model: Any) -> dict[str, Any]:
    """The modules of the decoder's products, by name."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


# ------------------------------------------------------------------------------------------------ libraries
def gptqmodel(source: Path, folder: Path) -> Iterator[Found]:
    """Each with its own quantizer, loaded again with its torch kernel."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # on two cores it would take one, and then refuse that
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration()]
    ways: dict[str, dict[str, Any]] = {
        "int4-sym": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        "int4-asym": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False},
        "int4-act-order": {"bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        "int8-rows": {"bits": 8, "group_size": -1, "sym": True, "desc_act": False, "act_group_aware": False},
        "int4-v2": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "format": "gptq_v2"},
    }
    for name, options in ways.items():
        model = GPTQModel.load(str(source), QuantizeConfig(**options, device="cpu"))
        model.quantize(samples, batch_size=1)
        model.save(str(folder / name))
        loaded = GPTQModel.load(str(folder / name), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
        weights = {n: m.dequantize_weight().T for n, m in linears(loaded).items()}
        yield name, loaded, weights, "float32", "quantized by gptqmodel"


def autoawq(source: Path, folder: Path) -> Iterator[Found]:
    """The library's own packing; its search of scales is for models of older versions of transformers."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm
    from transformers import AutoModelForCausalLM

    for name, group in {"gemm-32": 32, "gemm-64": 64}.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
        packed, weights = {}, {}
        for module, linear in linears(model).items():
            groups = linear.weight.data.float().reshape(-1, group)
            low, high = groups.amin(1), groups.amax(1)
            scale = ((high - low).clamp(min=1e-5) / 15).half()
            zero = (-torch.round(low / scale.float())).clamp(0, 15)
            shape = (linear.out_features, -1)
            scales, zeros = scale.reshape(shape), zero.reshape(shape)
            made = WQLinear_GEMM.from_linear(linear, 4, group, False, scales.T.contiguous(), zeros.T.contiguous())
            weights[module] = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, group).T
            packed |= {f"{module}.{key}": value for key, value in made.state_dict().items()}
            linear.weight.data = weights[module].clone()
        _write_awq(model, packed, folder / name, group)
        remark = "packed and dequantized by AutoAWQ; generated by transformers with these weights"
        yield name, model, weights, "float32", remark


def _write_awq(model: Any, packed: dict[str, Any], folder: Path, group: int) -> None:
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    rest = {name: value for name, value in model.state_dict().items() if not name.endswith("_proj.weight")}
    tensors = {name: value.contiguous() for name, value in {**rest, **packed}.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    (folder / "config.json").write_text(json.dumps(config))


def bitsandbytes(source: Path, folder: Path) -> Iterator[Found]:
    """Through transformers, as its users do."""
    import bitsandbytes as bnb
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def four(kind: str, nested: bool) -> Any:
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested)

    ways = {
        "int8": BitsAndBytesConfig(load_in_8bit=True),
        "nf4": four("nf4", False),
        "nf4-nested": four("nf4", True),
        "fp4": four("fp4", False),
    }
    for name, config in ways.items():
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float16, quantization_config=config, device_map="cpu"
        )
        model.save_pretrained(folder / name)
        weights = {}
        for module, linear in linears(model).items():
            if name == "int8":
                scb = linear.state.SCB if linear.state.SCB is not None else linear.weight.SCB
                weights[module] = bnb.functional.int8_vectorwise_dequant(linear.weight.data, scb).half()
            else:
                weights[module] = bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
        compute = "int8" if name == "int8" else "auto"  # the others are dequantized
        yield name, model, weights, compute, "quantized by bitsandbytes"


LIBRARIES: dict[str, Callable[[Path, Path], Iterator[Found]]] = {
    "gptqmodel": gptqmodel,
    "autoawq": autoawq,
    "bitsandbytes": bitsandbytes,
}


def make(library: str, folder: Path) -> None:
    """Write the checkpoints of a library."""
    folder.mkdir(parents=True, exist_ok=True)
    source = small_llama(folder / "source")
    version = importlib.metadata.version(library)
    for name, model, weights, compute, remark in LIBRARIES[library](source, folder):
        arrays = {module: weight.detach().float().cpu().numpy() for module, weight in weights.items()}
        tokens, logits = [], np.zeros(0)
        try:
            with torch.no_grad():
                tokens, logits = greedy(model)
        except (RuntimeError, NotImplementedError, ImportError) as error:
            remark += f"; does not generate on this CPU: {str(error)[:120]}"
        facts = {"logits": logits, "tokens": tokens, "compute": compute, "remark": f"{library} {version}: {remark}"}
        np.savez(folder / name / EXPECTED, **facts, **arrays)
        print(json.dumps({"checkpoint": name, "library": library, "version": version, "tokens": len(tokens)}))
        del model, weights
        gc.collect()


def greedy(model: Any) -> tuple[list[int], Any]:
    """The next tokens and their logits, one forward pass of the whole sequence for each."""
    ids, logits = list(PROMPT), []
    for _ in range(TOKENS):
        logits.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].float().numpy())
        ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :], np.stack(logits)


# ------------------------------------------------------------------------------------------------ checking
def check(folder: Path) -> bool:
    """Compare all checkpoints of a folder; whether none differs."""
    from llmc import LLM, SamplingParams
    from llmc.compiler.api import build_engine
    from llmc.compiler.checkpoint import Checkpoint
    from llmc.compiler.config import BuildConfig
    from llmc.compiler.weights import read

    good = True
    for path in sorted(file.parent for file in folder.glob(f"*/{EXPECTED}")):
        expected = dict(np.load(path / EXPECTED))
        tokens, compute, remark = (expected.pop(key).tolist() for key in ("tokens", "compute", "remark"))
        logits = expected.pop("logits")
        checkpoint = Checkpoint.open(path)
        wrong = []
        for module, values in expected.items():
            found = read(checkpoint.weight(f"{module}.weight")).astype(np.float32)
            wrong += [] if found.shape == values.shape and np.array_equal(found, values) else [module]
        result: dict[str, Any] = {"checkpoint": path.name, "made_by": remark, "weights": len(expected), "differ": wrong}
        near = True
        if tokens:
            engine = folder / f"{path.name}.engine"
            config = BuildConfig(dtype="float32", kv_dtype="float32", compute=compute)
            build_engine(path, engine, config, force=True)
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            found_tokens = list(LLM(engine).generate([PROMPT], params)[0].token_ids)
            at = next((i for i, (a, b) in enumerate(zip(found_tokens, tokens, strict=True)) if a != b), None)
            result["tokens_equal"] = at is None
            if at is not None:
                gap = (logits[at, tokens[at]] - logits[at, found_tokens[at]]) / np.ptp(logits[at])
                result |= {"first_difference": at, "gap": round(float(gap), 4)}
            near = at is None or (compute == "int8" and result["gap"] < NEAR)
        good = good and not wrong and bool(expected) and near
        print(json.dumps(result))
    return good


def main() -> None:
    """See the docstring of the module."""
    arguments = sys.argv[1:]
    if len(arguments) == 3 and arguments[0] == "make" and arguments[1] in LIBRARIES:
        make(arguments[1], Path(arguments[2]))
    elif len(arguments) == 2 and arguments[0] == "check":
        sys.exit(0 if check(Path(arguments[1])) else 1)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
