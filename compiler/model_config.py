"""config.json and generation_config.json, read without running anything that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.model_directory import ModelDirectory
from llmc.errors import CheckpointError, CompileError
from llmc.runtime import strict

CODE_KEYS = ("auto_map", "custom_generate", "custom_pipelines")
"""Keys with which a config asks for code of its own; they are dropped, and the model has to be a native one."""

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""How the weights are stored; it is read by itself, and the model is built as if they were floats."""

QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ wrote it before transformers put it into config.json, and the method that means."""

MAX_LAYERS = 4096
"""More would be a mistake or an attack: modules are made for each before a weight is looked at."""

GENERATION_KEYS = {
    "do_sample": bool,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
}
"""What an engine keeps of generation_config.json: the defaults of a request."""


def read_json(directory: ModelDirectory, name: str) -> dict[str, Any]:
    """A JSON object from a small file.

    Raises:
        CheckpointError: missing, or not an object.
    """
    value = strict.parse_json(directory.read(name), str(directory.path / name), CheckpointError, infinite=True)
    if not isinstance(value, dict):
        raise CheckpointError(f"{directory.path / name}: expected a JSON object")
    result: dict[str, Any] = _decode_floats(value)
    return result


def _decode_floats(value: Any) -> Any:
    """Transformers writes a number that JSON lacks as ``{"__float__": "Infinity"}``."""
    if isinstance(value, list):
        return [_decode_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: _decode_floats(item) for key, item in value.items()}


def read_config(directory: ModelDirectory) -> Any:
    """The config of a native causal language model.

    Raises:
        CheckpointError: missing or damaged.
        CompileError: not an architecture that llmc can build, named along with those that it can.
    """
    if not directory.has("config.json"):
        raise CheckpointError(f"{directory.path}: there is no config.json; is this a model directory?")
    return make_config(read_json(directory, "config.json"), str(directory.path / "config.json"))


def make_config(values: Mapping[str, Any], where: str) -> Any:
    """A transformers config object from its JSON form; see ``read_config``."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    values = {key: value for key, value in values.items() if key not in (*CODE_KEYS, *QUANTIZATION_KEYS)}
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CompileError(
            f"{where}: model_type {model_type!r} is not known to transformers; known: {_supported_types()}"
        )
    kind = CONFIG_MAPPING[model_type]
    try:
        config = kind.from_dict(values)
    except Exception as problem:
        raise CheckpointError(f"{where}: not a valid {kind.__name__}: {problem}") from problem
    if (layers := getattr(config.get_text_config(), "num_hidden_layers", 0) or 0) > MAX_LAYERS:
        raise CompileError(f"{where}: {layers} layers; at most {MAX_LAYERS} are supported")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CompileError(
            f"{where}: model_type {model_type!r} has no causal language model; those that have: {_supported_types()}"
        )
    _check_architecture(values.get("architectures"), MODEL_FOR_CAUSAL_LM_MAPPING[kind], where)
    return config


def _check_architecture(found: Any, model: Any, where: str) -> None:
    models = model if isinstance(model, list | tuple) else [model]
    names = [m.__name__ for m in models]
    if not found:
        raise CompileError(f'{where}: `architectures` is missing; for this model_type it has to be ["{names[0]}"]')
    if not isinstance(found, list) or len(found) != 1 or found[0] not in names:
        raise CompileError(
            f"{where}: architectures {found!r} is not supported; for this model_type llmc builds {', '.join(names)}. "
            f"Model types with a causal language model: {_supported_types()}"
        )


def _supported_types() -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return ", ".join(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def read_quantization(directory: ModelDirectory) -> dict[str, Any] | None:
    """How the checkpoint is quantized: the object of config.json or of a file of its own; None if it is not.

    Raises:
        CheckpointError: it is no object.
    """
    values = read_json(directory, "config.json")
    text = values.get("text_config")
    for place in (values, text if isinstance(text, dict) else {}):
        for key in QUANTIZATION_KEYS:
            if found := place.get(key):
                if not isinstance(found, dict):
                    raise CheckpointError(f"{directory.path / 'config.json'}: {key} must be an object, found {found!r}")
                return found
    for name, method in QUANTIZATION_FILES.items():
        if directory.has(name):
            return {"quant_method": method, **read_json(directory, name)}
    return None


def read_generation_config(directory: ModelDirectory) -> dict[str, Any]:
    """generation_config.json as it is, or {} if there is none."""
    return read_json(directory, "generation_config.json") if directory.has("generation_config.json") else {}


def generation_defaults(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The defaults that an engine keeps.

    Raises:
        CheckpointError: one of them has the wrong type.
    """
    result: dict[str, Any] = {}
    for key, kind in GENERATION_KEYS.items():
        value = values.get(key)
        if value is None:
            continue
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{where}: {key} must be {kind.__name__}, found {value!r}")
        result[key] = value
    return result


def eos_token_ids(config: Any, generation: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """One or many: those of generation_config.json, or of config.json if it names none (transformers' rule)."""
    value = generation.get("eos_token_id")
    if value is None:
        value = getattr(config.get_text_config(), "eos_token_id", None)
    return _token_ids(value, "eos_token_id", where)


def token_id(name: str, config: Any, generation: Mapping[str, Any], where: str) -> int | None:
    """``bos_token_id`` or ``pad_token_id``, by the same rule."""
    value = generation.get(name)
    if value is None:
        value = getattr(config.get_text_config(), name, None)
    ids = _token_ids(value, name, where)
    return ids[0] if ids else None


def _token_ids(value: Any, name: str, where: str) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for item in values:
        if type(item) is not int or not 0 <= item < 1 << 31:
            if item == -1 and name == "pad_token_id":  # some configs write -1 for none
                return ()
            raise CheckpointError(f"{where}: {name} {value!r} is no token id")
    return tuple(dict.fromkeys(values))
