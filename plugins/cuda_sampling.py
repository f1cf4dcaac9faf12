"""Sampling on CUDA: what ``runtime/sampling.py`` does to rows of logits, without them leaving the device.

Random numbers come from the host: they are a function of the place of a token alone, so that it knows them before.
"""

from __future__ import annotations

import ctypes

from llmc.plugins.cuda import Kernel, Launch, Tensor

_SOURCE = "csrc/cuda/sampling.cuh"
_THREADS = 512


class SampleParams(ctypes.Structure):
    """Of sample_rows. Arrays [rows]: temperature, top_p and min_p of float32, top_k of int32, draws of float64.

    To: tokens of int32, and their scores of float32, not finite where `Sampler` reports why there is no token.
    """

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "temperature", "top_k", "top_p", "min_p", "draws", "tokens", "scores")
        ),
        ("stride", ctypes.c_int64),
        ("count", ctypes.c_int32),
    )


class AdjustParams(ctypes.Structure):
    """Of adjust_rows. Entries of row r are ``bounds[r]`` to ``bounds[r + 1]``: an id, no two of a row the same.

    Its logit is divided or multiplied by ``factors`` (repetition; 1: none), ``penalties`` (float64) are taken off it,
    ``biases`` (-inf: not allowed) are added. ``mask_of`` [rows] is a row of ``masks`` [masks, words of 32 bits], or -1.
    """

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "bounds", "ids", "factors", "penalties", "biases", "mask_of", "masks")
        ),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("count", "words")),
    )


def sample(logits: Tensor, arrays: dict[str, int]) -> Launch:
    """Draws a token for each row; ``arrays``: addresses by the names of `SampleParams`."""
    p = SampleParams(logits=logits.address, stride=logits.strides[0], count=logits.shape[1], **arrays)
    return Launch(Kernel("sample_rows_f32", _SOURCE, "sample_rows", SampleParams, _THREADS), p, _grid(logits), 256 * 8)


def adjust(logits: Tensor, arrays: dict[str, int], words: int) -> Launch:
    """Changes logits in place before they are sampled; ``arrays``: addresses by the names of `AdjustParams`."""
    p = AdjustParams(logits=logits.address, stride=logits.strides[0], count=logits.shape[1], words=words, **arrays)
    return Launch(Kernel("adjust_rows_f32", _SOURCE, "adjust_rows", AdjustParams, _THREADS), p, _grid(logits))


def _grid(logits: Tensor) -> tuple[int, int, int]:
    return logits.shape[0], 1, 1
