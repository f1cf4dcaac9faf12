"""Inputs near those of a corpus, as a strategy of hypothesis, which also makes those that fail small."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

ODD = (b"", b"\0", b"\xff", b"\xc3", b"\r\n", b"\n", b'"', b"\\", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"-1")
ODD += (b"0", b"1e999", b"NaN", b"null", b"true", b"9" * 30, b"4294967296", b"9223372036854775808", b"1.5", b"[" * 70)
ODD += (
    b"\xff" * 8,
    b"\0" * 8,
    b"{}",
    b"[]",
    b"()",
    b"*",
    b"+",
    b"?",
    b"|",
    b"{%",
    b"{{",
    b"a" * 300,
    b"\xf0\x9f\x98\x80",
)


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds after a few changes: bytes replaced, removed, doubled, or taken from another one."""
    data = draw(st.sampled_from(list(seeds)))
    for _ in range(draw(st.integers(0, 5))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.sampled_from((0, 0, 1, 1, 2, 8, 64))))
        kind = draw(st.sampled_from(("odd", "odd", "byte", "double", "cut", "other", "any")))
        if kind == "odd":
            new = draw(st.sampled_from(ODD))
        elif kind == "byte":
            new = bytes([draw(st.integers(0, 255))])
        elif kind == "double":
            new = data[begin:end] * 2
        elif kind == "cut":
            new, end = b"", draw(st.integers(begin, len(data)))
        elif kind == "other":
            other = draw(st.sampled_from(list(seeds)))
            at = draw(st.integers(0, len(other)))
            new = other[at : at + draw(st.integers(0, 100))]
        else:
            new = draw(st.binary(max_size=20))
        data = data[:begin] + new + data[end:]
    return data
