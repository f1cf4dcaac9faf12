"""AWQ checkpoints, as AutoAWQ and gptqmodel write them in the order of the GEMM kernels.

``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [G, N / 8] hold eight codes of 4 bits in a word, the outputs in the
order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up; ``scales`` [G, N]. The weight is (code - zero) * scale.
"""

from __future__ import annotations

import numpy as np

from llmc.compiler.prequantized.base import FLOATS, Kind, Options, Tensors, group_size
from llmc.compiler.prequantized.sources import Made, Recent, transposed, unpack
from llmc.compiler.quantized_weights import grouped
from llmc.compiler.weights import WeightSource, read

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the outputs 0 to 7 are."""


def _read(options: Options, tensors: Tensors) -> None:
    options.get("bits" if options.has("bits") else "w_bit", int, allowed=(4,))
    group = group_size(options, "group_size" if options.has("group_size") else "q_group_size")
    options.get("zero_point", bool, True, allowed=(True,))
    options.get("version", str, "gemm", allowed=("gemm", "GEMM"))
    options.ignore("modules_to_not_convert", "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len")
    options.ignore("exllama_config", "format", "checkpoint_format", "sym", "desc_act", "pack_dtype", "meta", "lm_head")
    codes, parameters = Recent(1), Recent(9)
    for stem in tensors.stems(".qweight"):
        tensors.put(f"{stem}.weight", _weight(tensors, stem, group, codes, parameters))


def _weight(tensors: Tensors, stem: str, group: int, codes: Recent, parameters: Recent) -> WeightSource:
    qweight = tensors.take(f"{stem}.qweight", "int32", (None, None))
    columns, rows = qweight.shape[0], qweight.shape[1] * 8
    groups = -(-columns // group) if group else 1
    why = f"for a weight of {rows} x {columns} in groups of {group or columns}"
    scales = tensors.take(f"{stem}.scales", FLOATS, (groups, rows), why)
    qzeros = tensors.take(f"{stem}.qzeros", "int32", (groups, rows // 8), why)

    def by_output(packed: WeightSource, count: int, recent: Recent) -> WeightSource:
        return Made(
            lambda: np.ascontiguousarray(unpack(read(packed), 4, rows, ORDER).T), (rows, count), "uint8", recent
        )

    return grouped(
        by_output(qweight, columns, codes),
        transposed(scales, parameters),
        by_output(qzeros, groups, parameters),
        "int4",
        group,
        (rows, columns),
        scales.dtype,
    )


AWQ = Kind("awq", _read)
