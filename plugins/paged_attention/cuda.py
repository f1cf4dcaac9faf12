"""Paged attention on CUDA: the kernels of a step, and how a slot of the cache is laid out in device memory.

A step is up to four launches: keys and values to the cache (and queries to where quantized keys are), sequences of many
rows, sequences of few rows unit by unit, and the sum of their units. Every sequence is the business of one of the two
ways, which give the same bits; see rows_cuda.cuh.
"""

from __future__ import annotations

import ctypes
from math import log2

from llmc.errors import EngineError
from llmc.plugins.cuda import Cache, Call, Kernel, Launch, Tensor

_FOLDER = "paged_attention"
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float8_e4m3": "E4M3", "int8": "I8"}
_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
KV_DTYPES = tuple(_TYPES)
"""What the cache may hold here."""

SHORT_ROWS = 64
"""A sequence with at most so many rows (new tokens times heads of a group) is split by units."""

MOST_SCRATCH = 256 << 20
"""Bytes beyond which only sequences of one new token are split."""

MOST_DIMS = 256
_UNITS = ((0, 256), (4096, 1024))  # from a position on, so many each
_LEAST_SHARED = 99 << 10  # bytes that a block may have on every device
_BLOCKS = 1024  # that share the units of a batch, for each kv head


class AttentionParams(ctypes.Structure):
    """Of all kernels of a step. Strides and sizes in elements."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("given_q", "q", "k", "v", "y", "sinks", "slopes"),
                *("key_center", "key_scale", "value_center", "value_scale", "key_feedback"),
                *("turned", "shifts", "part_values", "part_sums"),
                *("keys", "values", "key_scales", "value_scales"),
                *("position_ids", "cu_seqlens", "num_computed", "block_tables", "tree_mask"),
            )
        ),
        *(
            (f"{name}_{stride}", ctypes.c_int64)
            for name in ("given", "q", "k", "v", "y")
            for stride in ("token", "head")
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("sinks_kind", "slopes_kind"),
                *("key_center_kind", "key_scale_kind", "value_center_kind", "value_scale_kind"),
                "key_feedback_kind",
                *("heads", "kv_heads", "group", "key_dim", "value_dim", "key_width", "value_width"),
                *("q_dim", "q_vectors", "writes", "sequences", "max_blocks", "tree_words", "block_size"),
                *("short_rows", "part_rows", "max_units", "window", "chunk"),
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "true_scale", "softcap")),
    )


class MoveParams(ctypes.Structure):
    """Of attention_move. Bytes: of a key and a value of one head at one position."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("keys", "values", "key_scales", "value_scales"),
                *("blocks", "sources", "targets"),
            )
        ),
        *((name, ctypes.c_int32) for name in ("count", "block_size", "kv_heads", "key_bytes", "value_bytes")),
    )


def padded(dims: int) -> int:
    """Dims of a key or a value in the cache: two warps share those of a value behind 128, 16 at a time."""
    step = 16 if dims <= 128 else 32
    return -(-dims // step) * step


def array_bytes(
    kv_heads: int, key_dim: int, value_dim: int, dtype: str, block_size: int, blocks: int
) -> tuple[int, int, int, int]:
    """Bytes of the arrays of a slot: keys, values, and their scales, 0 where the dtype has none.

    Raises:
        EngineError: there are no kernels for that.
    """
    if dtype not in _TYPES:
        raise EngineError(f"a cache of {dtype} can't be kept on CUDA; choose one of {', '.join(KV_DTYPES)}")
    if max(key_dim, value_dim) > MOST_DIMS:
        raise EngineError(f"heads of {max(key_dim, value_dim)} dims have no CUDA kernels; the most are {MOST_DIMS}")
    rows, size = blocks * kv_heads * block_size, _code_bytes(dtype)
    scales = 4 * rows if size == 1 else 0
    return rows * padded(key_dim) * size, rows * padded(value_dim) * size, scales, scales


def launches(call: Call) -> list[Launch]:
    """The kernels of a step.

    Raises:
        EngineError: there are no kernels for these types or dims.
    """
    q, _, v, *_ = call.inputs
    assert q is not None and v is not None
    cache, batch = call.caches[call.attributes["slot"]], call.batch
    dtypes, widths = (q.dtype, cache.dtype), (padded(q.shape[2]), padded(v.shape[2]))
    array_bytes(1, q.shape[2], v.shape[2], cache.dtype, 16, 1)
    if q.dtype not in ("bfloat16", "float16"):
        raise EngineError(f"attention on CUDA computes in bfloat16 or float16, not in {q.dtype}")
    p, biased = _params(call)
    group = p.group
    made = []
    if p.writes or p.turned:
        made.append(_store(p, dtypes, widths, batch.rows))
    longest = min(batch.longest, batch.rows)
    if longest * group > p.short_rows:
        made.append(_prefill(p, dtypes, widths, biased, batch.rows))
    made.append(_decode(p, dtypes, widths, biased))
    kernel = _kernel(f"attention_combine_{_short(q.dtype)}_{widths[1]}", f"<{_TYPES[q.dtype]}, {widths[1]}>", 128)
    made.append(Launch(kernel, p, (batch.rows, -(-p.heads // 4), 1)))
    return made


def move_positions(
    cache: Cache, kv_heads: int, dims: tuple[int, int], blocks: int, sources: int, targets: int, count: int
) -> Launch:
    """Copies what the slot holds of ``count`` positions of a sequence, one after the other; all are device addresses.

    ``blocks``, ``sources`` and ``targets`` are int32; positions count in the sequence that has these blocks.
    """
    sizes = [padded(dim) * _code_bytes(cache.dtype) for dim in dims]
    arrays = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    p = MoveParams(*arrays, blocks, sources, targets, count, cache.block_size, kv_heads, *sizes)
    kernel = Kernel("move_positions", f"{_FOLDER}/move_cuda.cuh", "attention_move", MoveParams, 64)
    return Launch(kernel, p, (kv_heads, 1, 1))


def _code_bytes(dtype: str) -> int:
    return 1 if dtype in ("float8_e4m3", "int8") else 2


def _short(dtype: str) -> str:
    return _TYPES[dtype].lower()


def _params(call: Call) -> tuple[AttentionParams, bool]:
    """The params, and whether logits are more than multiples of products."""
    inputs: list[Tensor | None] = [*call.inputs, *[None] * (10 - len(call.inputs))]
    q, k, v, sinks, slopes, *stored = inputs
    assert q is not None and k is not None and v is not None
    y, attributes, batch = call.outputs[0], call.attributes, call.batch
    cache = call.caches[attributes["slot"]]
    p = AttentionParams()
    p.heads, p.kv_heads, p.group = q.shape[1], k.shape[1], q.shape[1] // k.shape[1]
    p.key_dim, p.value_dim = q.shape[2], v.shape[2]
    p.key_width, p.value_width = padded(p.key_dim), padded(p.value_dim)
    for name, tensor in (("given", q), ("k", k), ("v", v), ("y", y)):
        assert tensor.strides[2] == 1 or tensor.shape[2] == 1, f"{name} of attention has gaps between its dims"
        setattr(p, "given_q" if name == "given" else name, tensor.address)
        setattr(p, f"{name}_token", tensor.strides[0])
        setattr(p, f"{name}_head", tensor.strides[1])
    sides = ("sinks", "slopes", "key_center", "key_scale", "value_center", "value_scale", "key_feedback")
    for name, side in zip(sides, (sinks, slopes, *stored), strict=True):
        if side is not None:
            setattr(p, name, side.address)
            setattr(p, f"{name}_kind", _KINDS[side.dtype])
    p.window, p.chunk, p.softcap = attributes["window"], attributes["chunk"], attributes["softcap"]
    p.writes = attributes["write"]
    p.keys, p.values, p.block_size = cache.keys, cache.values, cache.block_size
    p.key_scales, p.value_scales = cache.key_scales, cache.value_scales
    for name in ("position_ids", "cu_seqlens", "num_computed", "block_tables", "tree_mask"):
        setattr(p, name, getattr(batch, name))
    p.sequences, p.max_blocks, p.tree_words = batch.sequences, batch.max_blocks, batch.tree_words
    biased = p.softcap > 0 or slopes is not None
    shifted = stored[0] is not None and (p.softcap > 0 or sinks is not None)
    _turn(p, call, q, shifted)
    biased = biased or shifted
    p.true_scale = attributes["scale"]
    p.scale = attributes["scale"] if biased else attributes["scale"] * log2(2.718281828459045)
    p.max_units = _unit_of(max(1, batch.max_blocks * cache.block_size) - 1) + 1
    row_bytes = batch.sequences * p.max_units * p.kv_heads * (4 * p.value_width + 8)
    p.short_rows = p.part_rows = _short_rows(max(1, min(batch.longest, batch.rows)) * p.group, p.group, row_bytes)
    parts = batch.sequences * p.max_units * p.kv_heads * p.part_rows
    p.part_values, p.part_sums = call.scratch(parts * p.value_width * 4), call.scratch(parts * 8)
    return p, biased


def _short_rows(longest: int, group: int, row_bytes: int) -> int:
    """How many rows a sequence may have that is split by units; fewer where their sums would take too much memory."""
    rows = min(longest, max(SHORT_ROWS, group))
    while rows > group and rows * row_bytes > MOST_SCRATCH:
        rows = max(group, rows // 2)
    return rows


def _turn(p: AttentionParams, call: Call, q: Tensor, shifted: bool) -> None:
    """Where queries are read, and whether they are brought to where keys are before."""
    rows = q.shape[0] * p.heads
    if _code_bytes(call.caches[call.attributes["slot"]].dtype) == 1 or p.key_scale or shifted:
        p.turned = p.q = call.scratch(max(1, rows * p.key_width) * 2)
        p.q_token, p.q_head, p.q_dim = p.heads * p.key_width, p.key_width, p.key_width
        if shifted:
            p.shifts = call.scratch(max(1, rows) * 4)
    else:
        p.q, p.q_token, p.q_head, p.q_dim = p.given_q, p.given_token, p.given_head, p.key_dim
    p.q_vectors = not ((p.q or 0) % 16 or p.q_token % 8 or p.q_head % 8 or p.q_dim % 8)


def _unit_of(position: int) -> int:
    """See rows_cuda.cuh."""
    (_, short), (long_from, long) = _UNITS
    return position // short if position < long_from else long_from // short + (position - long_from) // long


def _kernel(name: str, arguments: str, threads: int, source: str = "paged_attention_cuda.cuh") -> Kernel:
    function = "_".join(name.split("_")[:2])
    return Kernel(name, f"{_FOLDER}/{source}", f"{function}{arguments}", AttentionParams, threads)


def _store(p: AttentionParams, dtypes: tuple[str, str], widths: tuple[int, int], rows: int) -> Launch:
    count = -(-max(widths) // 32)
    types = [_TYPES[dtype] for dtype in dtypes]
    name = f"attention_store_{'_'.join(types).lower()}_{count * 32}"
    kernel = _kernel(name, f"<{types[0]}, {types[1]}, {count}>", 128, "store_cuda.cuh")
    items = (2 * p.kv_heads if p.writes else 0) + (p.heads if p.turned else 0)
    return Launch(kernel, p, (rows, -(-items // 4), 1))


def _tile_bytes(dtypes: tuple[str, str], widths: tuple[int, int]) -> int:
    """Tile<...>::BYTES of tile_cuda.cuh."""
    keys = 32 if max(widths) > 128 else 64
    size = _code_bytes(dtypes[1])
    codes = 0 if dtypes[0] == dtypes[1] else keys * sum(widths) * size
    return keys * (2 * sum(widths) + 32) + codes + (keys * 8 if size == 1 else 0) + 16


def _share(widths: tuple[int, int]) -> int:
    """Tile<...>::SHARE: warps that share 16 rows."""
    return 2 if widths[1] > 128 else 1


def _prefill_bytes(dtypes: tuple[str, str], widths: tuple[int, int], warps: int) -> int:
    """Shared memory of attention_prefill: queries, a tile, and for each warp what it saw of the units before."""
    seen = widths[1] * 64 + 512 * _share(widths)
    return warps * (16 * (2 * widths[0] + 16) + seen) + _tile_bytes(dtypes, widths)


def _prefill(p: AttentionParams, dtypes: tuple[str, str], widths: tuple[int, int], biased: bool, tokens: int) -> Launch:
    warps = 4 if max(widths) <= (128 if dtypes[0] == dtypes[1] else 96) else 2
    if _prefill_bytes(dtypes, widths, warps) > _LEAST_SHARED:
        warps = 1
    rows, shared = 16 * warps, _prefill_bytes(dtypes, widths, warps)
    kernel = _instance("attention_prefill", dtypes, widths, biased, f"{warps}, ", 32 * warps * _share(widths))
    return Launch(kernel, p, (-(-tokens * p.group // rows) + p.sequences, p.kv_heads, 1), shared)


def _decode(p: AttentionParams, dtypes: tuple[str, str], widths: tuple[int, int], biased: bool) -> Launch:
    kernel = _instance("attention_decode", dtypes, widths, biased, "", 32 * _share(widths))
    shared = 16 * (2 * widths[0] + 16) + _tile_bytes(dtypes, widths)
    blocks = min(p.sequences * p.max_units, _BLOCKS)
    return Launch(kernel, p, (blocks, p.kv_heads * -(-p.part_rows // 16), 1), shared)


def _instance(
    function: str, dtypes: tuple[str, str], widths: tuple[int, int], biased: bool, more: str, threads: int
) -> Kernel:
    types = [_TYPES[dtype] for dtype in dtypes]
    name = f"{function}_{'_'.join(types).lower()}_{widths[0]}_{widths[1]}{'_biased' if biased else ''}"
    flag = str(biased).lower()
    return _kernel(name, f"<{types[0]}, {types[1]}, {widths[0]}, {widths[1]}, {more}{flag}>", threads)
