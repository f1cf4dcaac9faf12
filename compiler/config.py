"""What a build is asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmc.compiler.quantize import locked
from llmc.errors import UsageError
from llmc.plugins.paged_attention.storage import ALIASES as KV_ALIASES
from llmc.plugins.paged_attention.storage import KV_DTYPES, QUANTIZED
from llmc.quantization.base import parse_method
from llmc.quantization.budget import parse_increase
from llmc.quantization.calibration import BUILT_IN, CalibrationSettings
from llmc.quantization.recipe import Recipe, read_recipe


@dataclass(frozen=True)
class Limits:
    """What an engine is built for: tokens of a sequence, tokens of a step, sequences that run at the same time."""

    max_seq_len: int
    max_batch_tokens: int = 512
    max_sequences: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 1 <= value < 1 << 31:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} {value}: expected a number from 1 to 2147483647")


DTYPES = ("float32", "bfloat16", "float16")
"""What weights can be stored in; the KV cache also in the types of plugins/paged_attention/storage.py."""

DEFAULT_MAX_SEQ_LEN = 32768
"""The longest sequence of an engine, unless the model's own limit is lower or the user asks for another."""

BLOCK_SIZE = 16
"""Positions of a block of the paged KV cache."""


@dataclass(frozen=True)
class BuildConfig:
    """What the user asks for.

    ``max_seq_len`` None: the model's limit, at most DEFAULT_MAX_SEQ_LEN. ``dtype`` and ``kv_dtype`` "auto": that of the
    checkpoint, and that of the weights. ``quantization``: a method with its options. ``dequantize``: make floats of
    weights that the checkpoint stores quantized; otherwise their codes are kept, unless they are quantized anew.
    ``recipe``: a file with all of a quantization, to which the options after it add. ``calib``: a file, ``builtin`` or
    ``self``; ``calib_samples`` 0: as many as the text has, up to 128; ``calib_length`` None: 512, or what the engine
    takes if that is less. ``reuse``: an engine whose quantized weights are taken over if they would come out the same.
    ``lora``: a LoRA adapter that is merged into the weights first.
    ``medusa``: Medusa heads to put into the engine; ``medusa_tree``: auto, chain:N or a file of paths; ``medusa_cost``:
    what the tree is chosen by, the target's ``default`` table or to ``measure`` steps here; ``medusa_vocab``: how many
    tokens, the most frequent ones, the heads choose from: a number, all, or auto.
    ``eagle``: an EAGLE-1 or EAGLE-3 layer to put into the engine.
    ``locked``: the recipe.json of an engine that has to come out again; see compiler/quantize/locked.py.
    """

    target: str = "cpu"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_seq_len: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    quantization: str = "none"
    dequantize: bool = False
    allow_hard_links: bool = False
    recipe: Path | None = None
    compute: str = "auto"
    quant_lm_head: bool = False
    quant_embedding: bool = False
    calib: str = BUILT_IN
    calib_samples: int = 0
    calib_length: int | None = None
    calib_seed: int = 0
    budget: str | None = None
    max_ppl_increase: str | None = None
    reuse: Path | None = None
    locked: Path | None = None
    lora: Path | None = None
    medusa: Path | None = None
    medusa_tree: str = "auto"
    medusa_cost: str = "default"
    medusa_vocab: str = "auto"
    eagle: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", KV_ALIASES.get(self.kv_dtype, self.kv_dtype))
        for option, value, known in (("--dtype", self.dtype, DTYPES), ("--kv-dtype", self.kv_dtype, KV_DTYPES)):
            if value not in ("auto", *known):
                raise UsageError(f"{option} {value}: unknown; known: auto, {', '.join(known)}")
        if self.medusa_cost not in ("default", "measure"):
            raise UsageError(f"--medusa-cost {self.medusa_cost}: unknown; known: default, measure")
        if self.medusa_vocab not in ("auto", "all") and not re.fullmatch("[1-9][0-9]{0,8}", self.medusa_vocab):
            raise UsageError(f"--medusa-vocab {self.medusa_vocab}: expected auto, all or a number of tokens")
        of_heads = self.medusa_tree, self.medusa_cost, self.medusa_vocab
        if self.medusa is None and of_heads != ("auto", "default", "auto"):
            raise UsageError("--medusa-tree, --medusa-cost and --medusa-vocab belong to --medusa HEADS")
        Limits(self.max_seq_len or 1, self.max_batch_tokens, self.max_sequences)
        _ = self.quantization_recipe  # refuses methods and options that don't exist

    @cached_property
    def quantization_recipe(self) -> Recipe | None:
        """What to quantize and how; None: nothing.

        Raises:
            UsageError: an option is wrong, or says something else than the recipe's file.
        """
        if self.locked is not None:
            return self._locked_recipe(self.locked)
        given = Recipe() if self.recipe is None else read_recipe(self.recipe)
        method = None if self.quantization == "none" else parse_method(self.quantization)
        if method is not None and given.method is not None:
            raise UsageError(f"--quant {self.quantization}: {self.recipe} names a method too; give one of them")
        changes: dict[str, Any] = {} if method is None else {"method": method}
        changes |= {"lm_head": True} if self.quant_lm_head else {}
        changes |= {"embedding": True} if self.quant_embedding else {}
        changes |= {} if self.budget is None else {"budget": self.budget}
        if self.max_ppl_increase is not None:
            changes["max_ppl_increase"] = parse_increase(self.max_ppl_increase)
        recipe = replace(given, **changes, calibration=self._chosen(given.calibration))
        if recipe.method is None and not any(rule.method for rule in recipe.rules):
            measured = self.kv_dtype in QUANTIZED or (self.medusa is not None and self.medusa_tree == "auto")
            asked = [option for option, value in self._of_quantization.items() if value]
            if asked := [option for option in asked if not (measured and option.startswith("--calib"))]:
                raise UsageError(f"{asked[0]}: nothing is quantized; say how with --quant METHOD, or --recipe FILE")
            return None
        return recipe

    @property
    def calibration(self) -> CalibrationSettings:
        """Of the weights, and of a quantized KV cache."""
        if self.locked is not None and (found := locked.kv_calibration_of(self.locked)) is not None:
            return found if self.calib == BUILT_IN else replace(found, source=self.calib)
        recipe = self.quantization_recipe
        return self._chosen(CalibrationSettings()) if recipe is None else recipe.calibration

    def _chosen(self, given: CalibrationSettings) -> CalibrationSettings:
        """With what the options say."""
        chosen = {"source": self.calib, "samples": self.calib_samples, "seed": self.calib_seed}
        unset = {"source": BUILT_IN, "samples": 0, "seed": 0}
        settings: dict[str, Any] = {key: value for key, value in chosen.items() if value != unset[key]}
        settings |= {} if self.calib_length is None else {"length": self.calib_length}
        return replace(given, **settings)

    def _locked_recipe(self, path: Path) -> Recipe | None:
        recipe = locked.recipe_of(path)
        of_texts = (
            "--calib",
            self.calib != BUILT_IN,
            (locked.section_of(path).get("calibration") or locked.kv_calibration_of(path)),
        )
        for option, is_given, used in (("--reuse", self.reuse is not None, recipe), of_texts):
            if is_given and not used:
                what = "quantized nothing" if recipe is None else "needed no calibration"
                raise UsageError(f"{option}: the build of {path} {what}; leave the option away")
        if recipe is None or self.calib == BUILT_IN:
            return recipe
        return replace(recipe, calibration=replace(recipe.calibration, source=self.calib))  # where the file is now

    @property
    def _of_quantization(self) -> dict[str, bool]:
        """Options that mean nothing without a method, and whether they are given."""
        return {
            "--recipe": self.recipe is not None,
            "--quant-lm-head": self.quant_lm_head,
            "--quant-embedding": self.quant_embedding,
            "--calib": self.calib != BUILT_IN,
            "--calib-samples": self.calib_samples != 0,
            "--calib-length": self.calib_length is not None,
            "--calib-seed": self.calib_seed != 0,
            "--budget": self.budget is not None,
            "--max-ppl-increase": self.max_ppl_increase is not None,
            "--reuse": self.reuse is not None,
        }

    def limits(self, model_limit: int | None) -> Limits:
        """The limits for a model that was made for so many positions (None: for any number)."""
        longest = self.max_seq_len or min(model_limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
        return Limits(longest, self.max_batch_tokens, self.max_sequences)
