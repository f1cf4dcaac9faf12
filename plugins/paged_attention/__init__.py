"""Attention of packed rows over the keys and values of their own sequences, which live in a paged cache."""

from llmc.plugins.op import Op

OP = Op(
    "paged_attention",
    inputs=("q", "k", "v", "sinks?", "slopes?"),
    attributes={
        "slot": int,
        "write": bool,
        "scale": float,
        "window": int,
        "chunk": int,
        "softcap": float,
    },
    stored_inputs=("key_center?", "key_scale?", "value_center?", "value_scale?", "key_feedback?"),
    rtol=1e-5,
    atol=1e-5,
)
"""q [T, H, Dk], k [T, Hkv, Dk], v [T, Hkv, Dv] -> y [T, H, Dv]; Hkv divides H, and head h reads kv head h // (H / Hkv).

T packs the rows of the step's sequences, whose lengths and caches are no inputs: kernels read them from the batch, the
reference from a ``step.Step``. First k and v are written to the cache of ``slot``, unless ``write`` is false: then an
earlier op of the same step has written them (layers that share keys and values) and the given ones are ignored. What
comes back from the cache is not what was given: ``storage.py`` says what each type of the cache makes of it.

The score of a query at position i and a key at j is scale * q.k, plus slopes[h] * (j - i) (ALiBi), then
softcap * tanh(score / softcap) if softcap > 0. It counts if j <= i, and i - j < window if window > 0, and
i // chunk == j // chunk if chunk > 0. ``sinks`` [H] are one more logit for each head, without a value. Under a tree
mask the rows of a sequence see its cached tokens and, among the new rows, their ancestors and themselves; i is then the
number of cached tokens plus the number of ancestors.

``key_center`` and ``key_scale`` [Hkv, Dk], ``value_center`` and ``value_scale`` [Hkv, Dv] change nothing of that but
what is rounded: the cache holds (k - key_center) * key_scale, and the same of v. All ops on a slot have the same ones.
Scores then lack scale * q.key_center, the same for all positions, so that only softcaps and sinks have to know of it;
weights add up to 1 (less the sink's), so value_center comes back at the end.

``key_feedback`` [Hkv, Dk, Dk], of rotated dims, says how keys of float8_e4m3 are rounded; see ``storage.round_trip``.
"""
