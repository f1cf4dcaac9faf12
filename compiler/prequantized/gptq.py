"""GPTQ checkpoints, as AutoGPTQ and gptqmodel write them.

``qweight`` int32 [K * bits / 32, N] holds the codes of an output below each other, ``qzeros`` int32 [G, N * bits / 32]
those of the zero points beside each other, ``scales`` [G, N]; ``g_idx`` [K] says in which group a column is. The weight
is (code - zero) * scale. Format v1 (``checkpoint_format`` "gptq" or none) stores zero points minus one, v2 as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.prequantized.base import FLOATS, Kind, Options, Tensors, act_order, group_size
from llmc.compiler.prequantized.sources import Made, Recent, ordered, transposed, unpack, words
from llmc.compiler.weights import WeightSource, read
from llmc.errors import CompileError

FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class _Settings:
    bits: int
    group: int
    ordered: bool
    """Whether the groups hold columns in the order of their activations (desc_act)."""

    minus_one: bool
    codes: Recent
    parameters: Recent


def _read(options: Options, tensors: Tensors) -> None:
    bits = options.get("bits", int, allowed=(2, 3, 4, 8))
    group = group_size(options, "group_size")
    name = "checkpoint_format" if options.has("checkpoint_format") else "format"
    version = options.get(name, str, "gptq", allowed=FORMATS)
    ordered = options.get("desc_act", bool, False)
    options.get("is_marlin_format", bool, False, allowed=(False,))
    options.get("pack_dtype", str, "int32", allowed=("int32",))
    _check_dynamic(options)
    options.ignore("sym", "lm_head", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta")
    options.ignore("model_name_or_path", "model_file_base_name", "model_seqlen", "block_name_to_quantize", "backend")
    options.ignore("modules_in_block_to_quantize", "module_name_preceding_first_block", "pad_token_id", "dataset")
    options.ignore("tokenizer", "batch_size", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config")
    options.ignore(
        "max_input_length", "cache_block_outputs", "checkpoint_format", "format", "method", "act_group_aware"
    )
    settings = _Settings(bits, group, ordered, version == "gptq", Recent(1), Recent(9))
    for stem in tensors.stems(".qweight"):
        tensors.put(f"{stem}.weight", _weight(tensors, stem, settings))


def _check_dynamic(options: Options) -> None:
    """Rules by module: those that leave a module out are fine, those that give it other bits are not read."""
    dynamic = options.get("dynamic", dict, {})
    if changed := sorted(rule for rule, values in dynamic.items() if not rule.startswith("-:") and values):
        raise CompileError(
            f"{options.where}: dynamic gives {', '.join(changed)} other settings than the rest, which is not supported"
        )


def _weight(tensors: Tensors, stem: str, settings: _Settings) -> WeightSource:
    bits, group, recent = settings.bits, settings.group, settings.parameters
    qweight = tensors.take(f"{stem}.qweight", "int32", (None, None))
    rows, columns = qweight.shape[1], qweight.shape[0] * 32 // bits
    groups = -(-columns // group) if group else 1
    why = f"for a weight of {rows} x {columns} in groups of {group or columns}"
    scales = tensors.take(f"{stem}.scales", FLOATS, (groups, rows), why)
    qzeros = tensors.take(f"{stem}.qzeros", "int32", (groups, words(rows, bits)), why)
    if settings.ordered and f"{stem}.g_idx" not in tensors.left:
        raise tensors.fail(f"{stem}.g_idx", "is missing, and desc_act asks for it")
    order = act_order(tensors, f"{stem}.g_idx", columns, group)
    codes: WeightSource = Made(
        lambda: unpack(np.ascontiguousarray(read(qweight).T), bits, columns), (rows, columns), "uint8", settings.codes
    )
    scale = transposed(scales, recent)
    zeros: WeightSource = Made(
        lambda: np.ascontiguousarray(_zeros(read(qzeros), bits, rows, settings.minus_one).T),
        (rows, groups),
        "uint8",
        recent,
    )
    format = "int8" if bits == 8 else "int4"
    return ordered(order, codes, scale, zeros, format, group, (rows, columns), scales.dtype)


def _zeros(stored: NDArray[np.int32], bits: int, count: int, minus_one: bool) -> NDArray[np.uint8]:
    """Zero points [G, N] of the words [G, N * bits / 32].

    One is added to whole words, as gptqmodel subtracts it from them: a 0 that borrowed from its neighbour is 0 again.
    Codes of 3 bits lie across the borders of words, so there each is counted up by itself.
    """
    if minus_one and bits != 3:
        ones = np.uint32(sum(1 << i for i in range(0, 32, bits)))
        return unpack(stored.view(np.uint32) + ones, bits, count)
    return unpack(stored, bits, count) + np.uint8(minus_one)


GPTQ = Kind("gptq", _read)
