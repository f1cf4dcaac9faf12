"""Model directories: whole ones are read exactly, broken ones are refused by a message that names the culprit."""

from __future__ import annotations

import functools
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    llama_arrays,
    np_dtype,
    safetensors_bytes,
    with_header,
    write_index,
    write_llama,
    write_model,
    write_sharded,
)
from configs import CONFIGS

from llmc.compiler.api import build_engine
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.model_config import eos_token_ids, generation_defaults
from llmc.compiler.weights import read
from llmc.errors import CheckpointError, CompileError, LlmcError

Q = "model.layers.0.self_attn.q_proj.weight"


def refused(folder: Path, *words: str, error: type[LlmcError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_weight_is_read_exactly(tmp_path: Path, dtype: str) -> None:
    arrays = llama_arrays(dtype)
    checkpoint = Checkpoint.open(write_model(tmp_path, arrays))
    assert set(checkpoint.names) == set(arrays) and checkpoint.dtype == dtype
    assert checkpoint.parameters == sum(a.size for a in arrays.values())
    for name, array in arrays.items():
        source = checkpoint.weight(name)
        assert same_bits(read(source), array)
        assert same_bits(source.rows(3, 7), array[3:7])


def test_shards(tmp_path: Path) -> None:
    arrays = llama_arrays()
    names = write_sharded(tmp_path, arrays, 3)
    checkpoint = Checkpoint.open(tmp_path)
    assert all(same_bits(read(checkpoint.weight(name)), array) for name, array in arrays.items())
    assert set(names) < set(checkpoint.directory.used)


def test_norms_in_another_dtype_do_not_decide(tmp_path: Path) -> None:
    arrays = llama_arrays("bfloat16")
    arrays |= {name: a.astype(np.float32) for name, a in arrays.items() if a.ndim == 1}
    assert Checkpoint.open(write_model(tmp_path, arrays)).dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_art_06_short_floats_keep_their_values(tmp_path: Path, dtype: str) -> None:
    """Whole numbers, NaN, a subnormal, minus zero."""
    arrays = llama_arrays()
    subnormal = 2.0**-130 if dtype == "bfloat16" else 2.0**-9 if dtype == "float8_e4m3fn" else 2.0**-16
    special = np.array([1.0, -0.5, 448, np.nan, subnormal, -0.0, 1.75, 2**-6], np.float32).astype(np_dtype(dtype))
    assert special[4] == subnormal
    arrays[Q] = np.tile(special, 32).reshape(16, 16)
    checkpoint = Checkpoint.open(write_model(tmp_path, arrays))
    found = read(checkpoint.weight(Q))
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), arrays[Q].astype(np.float32))
    assert np.signbit(found.reshape(-1)[5].astype(np.float32))
    assert found.reshape(-1)[4].astype(np.float32) == subnormal


@pytest.mark.parametrize("code", ["F4", "F8_E8M0", "FOO"])
def test_art_14_an_unknown_dtype_is_named(tmp_path: Path, code: str) -> None:
    write_llama(tmp_path)
    header = json.dumps({Q: {"dtype": code, "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(with_header(header, b"x"))
    refused(tmp_path, Q, code)


# Tied and shared tensors ---------------------------------------------------------------------------------------------


def test_tied_weights_share_one_source(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_llama(tmp_path, tie_word_embeddings=True))
    assert checkpoint.weight("lm_head.weight") is checkpoint.weight("model.embed_tokens.weight")
    assert not checkpoint.warnings


def test_mth_04_a_stale_head_is_not_used_and_warned_of(tmp_path: Path) -> None:
    arrays = llama_arrays()
    checkpoint = Checkpoint.open(write_model(tmp_path, arrays, tie_word_embeddings=True))
    assert same_bits(read(checkpoint.weight("lm_head.weight")), arrays["model.embed_tokens.weight"])
    assert len(checkpoint.warnings) == 1 and "lm_head.weight" in checkpoint.warnings[0]
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    assert not Checkpoint.open(write_model(tmp_path, arrays, tie_word_embeddings=True)).warnings


def test_a_tied_table_may_be_saved_under_either_name(tmp_path: Path) -> None:
    arrays = llama_arrays(tie_word_embeddings=True)
    arrays["lm_head.weight"] = arrays.pop("model.embed_tokens.weight")
    checkpoint = Checkpoint.open(write_model(tmp_path, arrays, tie_word_embeddings=True))
    assert same_bits(read(checkpoint.weight("model.embed_tokens.weight")), arrays["lm_head.weight"])


def test_mth_32_an_untied_head_must_be_there(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["lm_head.weight"]
    refused(write_model(tmp_path, arrays), "lm_head.weight", "missing")


def test_art_11_an_alias_in_the_metadata_is_resolved(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["lm_head.weight"]
    alias = {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"}
    checkpoint = Checkpoint.open(write_model(tmp_path, arrays, alias))
    assert checkpoint.weight("lm_head.weight") is checkpoint.weight("model.embed_tokens.weight")
    refused(write_model(tmp_path, arrays, {"lm_head.weight": "model.embed"}), "lm_head.weight")


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_checkpoints_of_all_families_are_found_again(tmp_path: Path, name: str) -> None:
    """Saved by transformers in the layout of published checkpoints: experts one by one, old names, shards."""
    torch = pytest.importorskip("torch")
    from llmc.compiler.model import build_model

    torch.manual_seed(0)
    model: Any = build_model(CONFIGS[name].make())
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    checkpoint = Checkpoint.open(tmp_path)
    state = model.state_dict()
    assert set(checkpoint.names) == set(state)
    for parameter, tensor in state.items():
        assert same_bits(read(checkpoint.weight(parameter)), tensor.numpy()), parameter


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_names_without_the_prefix_of_the_base_model(tmp_path: Path, model_type: str) -> None:
    from llmc.compiler.model import build_model

    values = {"tie_word_embeddings": True} if model_type == "llama" else {}
    config = CONFIGS[model_type].make()
    config.update(values)
    model: Any = build_model(config)
    model.save_pretrained(tmp_path)
    prefix = model.base_model_prefix + "."
    state = {name.removeprefix(prefix): t.numpy() for name, t in model.state_dict().items() if name.startswith(prefix)}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(state))
    checkpoint = Checkpoint.open(tmp_path)
    assert same_bits(read(checkpoint.weight(prefix + next(iter(state)))), next(iter(state.values())))


def test_known_buffers_may_be_left_over(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    checkpoint = Checkpoint.open(write_model(tmp_path, arrays))
    assert checkpoint.ignored == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


@pytest.mark.parametrize("extra", [Q.replace("weight", "bias"), "model.layers.7.mlp.up_proj.weight", "adapter.a"])
def test_a_tensor_that_is_left_over_is_an_error(tmp_path: Path, extra: str) -> None:
    """MTH-29, of a bias that no one takes."""
    arrays = llama_arrays()
    arrays[extra] = np.zeros(16, np.float32)
    refused(write_model(tmp_path, arrays), extra)


def test_an_unused_bias_of_gpt2_is_an_error_but_its_mask_is_not(tmp_path: Path) -> None:
    """The pattern that transformers ignores, attn.bias, means the mask; it also fits the biases of linears."""
    from llmc.compiler.model import build_model

    model: Any = build_model(CONFIGS["gpt2"].make())
    model.save_pretrained(tmp_path)
    state = {name: t.numpy() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    mask = {"transformer.h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8)}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(state | mask))
    assert Checkpoint.open(tmp_path).ignored == ["transformer.h.0.attn.bias"]
    stray = {"transformer.h.9.attn.c_attn.bias": np.ones(8, np.float32)}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(state | stray))
    refused(tmp_path, "transformer.h.9.attn.c_attn.bias")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    arrays = llama_arrays()
    short = {name: a for name, a in arrays.items() if name != Q}
    refused(write_model(tmp_path, short), Q, "1 of 21")
    refused(write_model(tmp_path, arrays | {Q: arrays[Q][:8]}), Q, "[8, 16]", "[16, 16]")
    refused(write_llama(tmp_path, attention_bias=True), "q_proj.bias")


# Shards and truncation -----------------------------------------------------------------------------------------------


def test_art_12_missing_shards_are_found_before_any_work(tmp_path: Path) -> None:
    names = write_sharded(tmp_path, llama_arrays(), 3)
    (tmp_path / names[1]).unlink()
    refused(tmp_path, names[1], "model.layers.0.input_layernorm.weight")
    (tmp_path / names[2]).unlink()
    (tmp_path / names[0]).write_bytes(b"")  # not looked at
    refused(tmp_path, names[1], names[2], "14 of the tensors")


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    arrays = llama_arrays()
    names = write_sharded(tmp_path, arrays)
    home = {tensor: names[i % 2] for i, tensor in enumerate(arrays)}
    write_index(tmp_path, home | {Q: names[0] if home[Q] == names[1] else names[1]})
    refused(tmp_path, Q)
    write_index(tmp_path, home | {"ghost": names[0]})
    refused(tmp_path, "ghost")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b", "a": "c"}}')
    refused(tmp_path, "index.json", "twice")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    arrays = llama_arrays()
    names = write_sharded(tmp_path, arrays)
    k = Q.replace("q_proj", "k_proj")
    both = {name: array for i, (name, array) in enumerate(arrays.items()) if i % 2 == 0 or name == k}
    (tmp_path / names[0]).write_bytes(safetensors_bytes(both))
    refused(tmp_path, k, names[0], names[1])


@pytest.mark.parametrize("cut", [1, 100, 0.5])
def test_art_21_a_truncated_shard_is_named_with_both_sizes(tmp_path: Path, cut: float) -> None:
    model = tmp_path / "model"
    names = write_sharded(model, llama_arrays())
    path = model / names[1]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - int(cut if cut >= 1 else len(data) * cut)])
    refused(model, names[1], str(len(data)), str(path.stat().st_size))
    with pytest.raises(CheckpointError, match=names[1]):
        build_engine(model, tmp_path / "engine")
    assert os.listdir(tmp_path) == ["model"]


def test_a_shard_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_llama(tmp_path))
    os.truncate(tmp_path / "model.safetensors", 4000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected \d+ bytes or more, found 4000"):
        read(checkpoint.weight("lm_head.weight"))


# Headers -------------------------------------------------------------------------------------------------------------


def entry(shape: Any = (4,), offsets: Any = (0, 4), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: Any, data: bytes = b"") -> bytes:
    return with_header(header if isinstance(header, bytes) else json.dumps(header).encode(), data)


BROKEN = {
    "empty": b"",
    "seven bytes": b"\x01" * 7,
    "header larger than the file": (100).to_bytes(8, "little") + b"{}",
    "header of 2^63": (1 << 63).to_bytes(8, "little") + b"{}",
    "header above the cap": (100_000_001).to_bytes(8, "little") + b"{" + b" " * 100,
    "not JSON": file_of(b"{nope}"),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "a list": file_of(b"[]"),
    "leading space": file_of(b' {"a": 1}'),
    "deep": file_of(b'{"a":' * 100_000),
    "NaN": file_of(b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 0]}}'),
    "duplicate name": file_of(
        b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "metadata is a list": file_of({"__metadata__": []}),
    "metadata holds a number": file_of({"__metadata__": {"a": 1}}),
    "entry is a number": file_of({"a": 1}),
    "entry lacks the shape": file_of({"a": {"dtype": "U8", "data_offsets": [0, 0]}}),
    "entry has more": file_of({"a": entry([], [0, 1]) | {"x": 1}}, b"x"),
    "dtype is a number": file_of({"a": entry(dtype=4)}, b"xxxx"),
    "shape is a number": file_of({"a": entry(4)}, b"xxxx"),
    "negative size": file_of({"a": entry([-4])}, b"xxxx"),
    "two negative sizes": file_of({"a": entry([-2, -2])}, b"xxxx"),
    "size is a float": file_of({"a": entry([4.0])}, b"xxxx"),
    "size is true": file_of({"a": entry([True], [0, 1])}, b"x"),
    "size is a text": file_of({"a": entry(["4"])}, b"xxxx"),
    "65 dimensions": file_of({"a": entry([1] * 65, [0, 1])}, b"x"),
    "unaligned": file_of({"a": entry([1], [0, 1]), "b": entry([1], [1, 5], "F32")}, b"x" * 5),
    "offset of 2^64 - 1": file_of({"a": entry(offsets=[(1 << 64) - 5, (1 << 64) - 1])}, b"xxxx"),
    "2^60 elements": file_of({"a": entry([1 << 60], [0, 1 << 60])}, b"xxxx"),
    "2^60 tensors of nothing": (1 << 60).to_bytes(8, "little") + b'{"a": {',
    "overflow to zero": file_of({"a": entry([1 << 32, 1 << 32], [0, 0])}),
    "overflow": file_of({"a": entry([1 << 63, 2], [0, 0])}),
    "size of 2^64": file_of({"a": entry([1 << 64], [0, 0])}),
    "one offset": file_of({"a": entry(offsets=[0])}, b"xxxx"),
    "three offsets": file_of({"a": entry(offsets=[0, 4, 8])}, b"xxxx"),
    "negative offset": file_of({"a": entry(offsets=[-4, 0])}, b"xxxx"),
    "reversed offsets": file_of({"a": entry(offsets=[4, 0])}, b"xxxx"),
    "offsets beyond the file": file_of({"a": entry([1 << 40], [0, 1 << 40])}, b"xxxx"),
    "range too short": file_of({"a": entry([4], [0, 3])}, b"xxx"),
    "range too long": file_of({"a": entry([4], [0, 5])}, b"xxxxx"),
    "hole at the start": file_of({"a": entry([4], [4, 8])}, b"x" * 8),
    "hole": file_of({"a": entry(), "b": entry([4], [8, 12])}, b"x" * 12),
    "overlap": file_of({"a": entry(), "b": entry([4], [2, 6])}, b"x" * 6),
    "same range twice": file_of({"a": entry(), "b": entry()}, b"xxxx"),
    "bytes after the end": file_of({"a": entry()}, b"xxxxx"),
    "bytes missing at the end": file_of({"a": entry()}, b"xxx"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_sec_03_a_malformed_file_is_refused(tmp_path: Path, case: str) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(BROKEN[case])
    refused(tmp_path, "model.safetensors")


def test_art_15_sizes_that_are_refused_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_llama(tmp_path)
    Checkpoint.open(tmp_path)  # what is imported or cached at first does not count
    tracemalloc.start()
    for case in ("overflow to zero", "overflow", "negative size", "2^60 elements", "header of 2^63"):
        path.write_bytes(BROKEN[case])
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        refused(tmp_path, "model.safetensors")
        assert tracemalloc.get_traced_memory()[1] - before < 4 << 20, case
    tracemalloc.stop()


def test_unusual_but_proper_headers_are_read(tmp_path: Path) -> None:
    """Padding, any order of keys and of entries, scalars, empty tensors, metadata."""
    from llmc.runtime.safetensors_file import read_header

    entries = {
        "b": {"data_offsets": [4, 8], "shape": [1], "dtype": "F32"},
        "none": {"dtype": "F32", "data_offsets": [8, 8], "shape": [0, 7]},
        "__metadata__": {"format": "pt"},
        "a": {"shape": [], "data_offsets": [0, 4], "dtype": "F32"},
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header(json.dumps(entries).encode() + b" " * 9, np.array([1, 2], np.float32).tobytes()))
    with path.open("rb") as file:
        header = read_header(file.fileno(), "x")
    assert list(header.tensors) == ["a", "b", "none"] and header.metadata == {"format": "pt"}
    assert header.tensors["a"].shape == () and header.tensors["none"].shape == (0, 7)


# What may be opened --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../x", "a/x", "..", "", "a\\b", "a\0b"])
def test_sec_12_shard_names_that_lead_out_of_the_directory(tmp_path: Path, name: str) -> None:
    write_sharded(tmp_path / "model", llama_arrays())
    write_index(tmp_path / "model", {Q: name})
    refused(tmp_path / "model", "model.safetensors.index.json")


def test_sec_12_links_may_not_lead_out_of_the_directory(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    refused(folder, "model.safetensors", "leads out")
    (folder / "model.safetensors").unlink()
    os.link(outside, folder / "model.safetensors")
    refused(folder, "model.safetensors", "--allow-hard-links")
    Checkpoint.open(folder, allow_hard_links=True)
    (folder / "model.safetensors").unlink()
    (folder / "kept").mkdir()
    outside.rename(folder / "kept" / "x")
    (folder / "model.safetensors").symlink_to("kept/x")
    Checkpoint.open(folder)


def test_sec_12_the_layout_of_the_hub_cache(tmp_path: Path) -> None:
    entry_folder = tmp_path / "models--org--name"
    snapshot, blobs = entry_folder / "snapshots" / "abc", entry_folder / "blobs"
    blobs.mkdir(parents=True)
    write_llama(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{number}")
        path.symlink_to(f"../../blobs/{number}")
    Checkpoint.open(snapshot)
    os.symlink(snapshot, tmp_path / "link")
    Checkpoint.open(tmp_path / "link")
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (blobs / "1").rename(other / "1")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other / "1")
    refused(snapshot, "leads out")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "not a regular file")


OPENED: list[str] = []


@functools.cache
def listen() -> None:
    """From now on, every file that Python opens is in OPENED: a hook can't be removed."""
    sys.addaudithook(lambda event, values: OPENED.append(str(values[0])) if event == "open" else None)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_sec_15_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    payload = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    folder = write_llama(tmp_path / "model", num_hidden_layers=1)
    (folder / "training_args.bin").write_bytes(payload)
    (folder / name).write_bytes(payload)
    listen()
    OPENED.clear()
    build_engine(folder, tmp_path / "engine")
    (folder / "model.safetensors").unlink()
    refused(folder, "safetensors only", name)
    with pytest.raises(CheckpointError, match="safetensors only"):
        build_engine(folder, tmp_path / "other")
    assert any(path.endswith("model.safetensors") for path in OPENED)
    assert not [path for path in OPENED if path.endswith((".bin", ".pt", ".ckpt"))]
    assert not marker.exists()


# Configs -------------------------------------------------------------------------------------------------------------


def test_art_18_config_errors_say_what_is_supported(tmp_path: Path) -> None:
    llama = "LlamaForCausalLM"
    refused(write_llama(tmp_path, architectures=...), "architectures", llama, error=CompileError)
    refused(write_llama(tmp_path, architectures=["FooForCausalLM"]), "FooForCausalLM", llama, error=CompileError)
    refused(write_llama(tmp_path, model_type="foo"), "'foo'", "mixtral", error=CompileError)
    refused(write_llama(tmp_path, model_type=...), "model_type", error=CompileError)
    refused(write_llama(tmp_path, model_type="t5"), "t5", error=CompileError)
    arrays = llama_arrays()
    refused(write_model(tmp_path, arrays, hidden_size="wide"), "hidden_size")
    refused(write_model(tmp_path, arrays, num_hidden_layers=10**9), "1000000000 layers", error=CompileError)
    refused(write_llama(tmp_path, quantization_config={"quant_method": "gptq"}), "bits is missing")
    refused(write_llama(tmp_path, quantization_config={"quant_method": "magic"}), "magic", "gptq", error=CompileError)
    rope = {"rope_type": "spiral", "factor": 2.0}
    refused(write_llama(tmp_path, rope_scaling=rope), "'spiral'", "yarn", error=CompileError)


def test_both_spellings_of_rope_and_dtype(tmp_path: Path) -> None:
    old = Checkpoint.open(write_llama(tmp_path / "old", rope_scaling={"type": "linear", "factor": 4.0})).config
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    new = {"rope_theta": ..., "torch_dtype": ..., "rope_parameters": parameters, "dtype": "float32"}
    found = Checkpoint.open(write_llama(tmp_path / "new", **new)).config
    for config in (old, found):
        assert {key: config.rope_parameters[key] for key in parameters} == parameters


def test_no_code_of_a_model_is_run(tmp_path: Path) -> None:
    """What is native builds, what is not is refused."""
    marker = tmp_path / "executed"
    folder = write_llama(
        tmp_path / "model",
        auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "modeling_x.C"},
        trust_remote_code=True,
        custom_generate="custom_generate/generate.py",
    )
    (folder / "custom_generate").mkdir()
    for name in ("modeling_x.py", "custom_generate/generate.py", "__init__.py", "sitecustomize.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w')\n")
    (folder / "generation_config.json").write_text('{"custom_generate": "custom_generate/generate.py"}')
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["modeling_x.T", null]}}')
    Checkpoint.open(folder).tokenizer()
    build_engine(folder, tmp_path / "engine")
    config = CONFIG | {
        "model_type": "mine",
        "architectures": ["X"],
        "auto_map": {"AutoModelForCausalLM": "modeling_x.X"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "'mine'", error=CompileError)
    assert not marker.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "\ufeff{}"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    write_llama(tmp_path)
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json")


def test_directories_without_a_model(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "nothing")
    refused(tmp_path, "no weights")
    (tmp_path / "snapshots").mkdir()
    refused(tmp_path, "name a snapshot")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(llama_arrays()))
    refused(tmp_path, "config.json")


def test_tok_14_end_tokens_come_from_the_generation_config_first() -> None:
    class Config:
        eos_token_id = 2

        def get_text_config(self) -> Any:
            return self

    assert eos_token_ids(Config(), {}, "x") == (2,)
    assert eos_token_ids(Config(), {"eos_token_id": None}, "x") == (2,)
    assert eos_token_ids(Config(), {"eos_token_id": [2, 5]}, "x") == (2, 5)
    for bad in ("2", [2, -1], 1 << 40, True):
        with pytest.raises(CheckpointError):
            eos_token_ids(Config(), {"eos_token_id": bad}, "x")


def test_defaults_of_generation_are_checked() -> None:
    values = {"temperature": 1, "top_k": 20, "do_sample": True, "max_new_tokens": 8, "foo": 1, "top_p": None}
    kept = {"temperature": 1.0, "top_k": 20, "do_sample": True, "max_new_tokens": 8}
    assert generation_defaults(values, "x") == kept
    with pytest.raises(CheckpointError, match="top_k"):
        generation_defaults({"top_k": 1.5}, "x")
