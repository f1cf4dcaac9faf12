"""Decides what becomes of every weight, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.quantize.sites import Part, Site, find_sites, split_parts
from llmc.compiler.weights import WeightSource
from llmc.errors import UsageError
from llmc.quantization.base import Activations, Method, Statistics
from llmc.quantization.options import describe
from llmc.quantization.recipe import NONE, Recipe

COMPUTES = ("auto", "int8", "float32", "bfloat16", "fp8")
DEFAULT_COMPUTE = {"int4": "int8", "int8": "int8", "fp8": "bfloat16"}
"""What a product with a weight of a format computes with, unless the user says otherwise."""

MIN_NUMBERS = 1024
"""Smaller weights stay as they are: they save nothing."""

_OPTIONS = {"head": "--quant-lm-head", "embedding": "--quant-embedding"}


@dataclass(frozen=True)
class Decision:
    """What becomes of rows of a weight. ``reason``: why they stay as they are, or which rule chose the method."""

    method: Method | None
    reason: str


@dataclass(frozen=True)
class Planned:
    """A graph, whose merged weights are split where their parts differ, and what will become of each weight."""

    graph: LoweredGraph
    sites: Sequence[Site]
    decisions: Mapping[str, Decision]
    compute: str
    budget: str | None = None
    max_ppl_increase: float | None = None

    @property
    def has_goal(self) -> bool:
        """Whether formats have to be chosen, by what they do to the model."""
        return self.budget is not None or self.max_ppl_increase is not None

    @property
    def chosen(self) -> Sequence[Site]:
        """Those that are quantized."""
        return [site for site in self.sites if self.decisions[site.name].method is not None]

    def method(self, site: Site) -> Method:
        """That of a chosen one."""
        method = self.decisions[site.name].method
        assert method is not None, f"{site.name} is not quantized"
        return method

    @property
    def needs_calibration(self) -> bool:
        """Whether tokens have to be run."""
        if self.has_goal:
            return True
        return any(self.method(s).needs is not Statistics.NONE for s in self.chosen if s.product is not None)


def plan(graph: LoweredGraph, parameters: Mapping[str, WeightSource], recipe: Recipe, compute: str) -> Planned:
    """Decide for every weight; merged ones whose parts differ are split.

    Raises:
        UsageError: a rule decides for nothing, nothing is quantized, experts that belong together differ, or
            ``compute`` is not for a method.
    """
    sites = find_sites(graph, parameters)
    recipe.check_rules((part.name, site.role) for site in sites for part in site.parts)
    ops = [step.op for step in graph.steps]
    for site in sites:
        decided = [(part, decide(recipe, part, site)) for part in site.parts]
        groups = [[part for part, _ in group] for _, group in groupby(decided, key=lambda pair: pair[1].method)]
        if len(groups) > 1 and all(ops[number] == "linear" for number, _ in site.readers):
            graph = split_parts(graph, site, groups)
    sites = find_sites(graph, parameters)
    decisions = {site.name: _of_all_parts(recipe, site) for site in sites}
    planned = Planned(graph, sites, decisions, compute, recipe.budget, recipe.max_ppl_increase)
    if not planned.chosen:
        raise UsageError(
            f"--quant: none of the {len(sites)} weights would be quantized: "
            + "; ".join(sorted({decision.reason for decision in decisions.values()}))
        )
    for site in planned.chosen:
        compute_of(planned.method(site), compute)
    _check_options(planned, recipe)
    _check_experts(planned)
    return planned


def decide(recipe: Recipe, part: Part, site: Site) -> Decision:
    """What becomes of a part of a weight: the first rule that fits decides, then its role and size."""
    for number, rule in enumerate(recipe.rules, 1):
        if rule.fits(part.name, site.role):
            return Decision(rule.method, f"rule {number}")
    if recipe.method is None:
        return Decision(None, "no rule names it")
    if site.is_router:
        return Decision(None, "router: it chooses experts, and stays exact")
    wanted = {"head": recipe.lm_head, "embedding": recipe.embedding}
    if site.role == "head" and len(site.readers) > 1:  # a table that is tied to the head
        wanted["head"] = recipe.lm_head or recipe.embedding
    if not wanted.get(site.role, True):
        return Decision(None, f"{site.role}: only with {_OPTIONS[site.role]}")
    if site.experts is None and part.rows * site.columns < MIN_NUMBERS:
        return Decision(None, f"too small: less than {MIN_NUMBERS} numbers")
    return Decision(recipe.method, "")


def compute_of(method: Method, wanted: str) -> str:
    """What the products with a method's weights compute with.

    Raises:
        UsageError: there are no such products.
    """
    if wanted not in COMPUTES:
        raise UsageError(f"--compute {wanted}: unknown; known: {', '.join(COMPUTES)}")
    text = method_text(method)
    fixed = {Activations.PER_TOKEN: "int8", Activations.STATIC: "int8", Activations.FP8: "fp8"}.get(method.activations)
    chosen = (fixed or DEFAULT_COMPUTE[method.weights.format]) if wanted == "auto" else wanted
    if fixed is not None and chosen != fixed:
        raise UsageError(f"--compute {wanted}: {text} rounds the inputs too, so it computes with {fixed}")
    if (method.weights.format == "fp8") != (chosen == "fp8") and chosen in ("int8", "fp8"):
        raise UsageError(f"--compute {wanted}: not for the weights of {text}; choose auto, bfloat16 or float32")
    return chosen


def x_group_of(method: Method, compute: str) -> int:
    """Columns of the inputs that share a scale, where they are rounded; else 0."""
    return method.x_group if compute == "int8" else 0


def method_text(method: Method | None) -> str:
    """What ``--quant`` would say."""
    return NONE if method is None else describe(method)


def _of_all_parts(recipe: Recipe, site: Site) -> Decision:
    found = [decide(recipe, part, site) for part in site.parts]
    if len({decision.method for decision in found}) > 1:
        raise UsageError(f"the parts of {site.label} are stored in one tensor; give them the same method")
    return found[0]


def _check_options(planned: Planned, recipe: Recipe) -> None:
    """An option that decides for nothing is a mistake."""
    for role, is_given in (("head", recipe.lm_head), ("embedding", recipe.embedding)):
        meant = [s for s in planned.sites if s.role == role or (s.role == "head" and len(s.readers) > 1)]
        if is_given and not any(site in planned.chosen and not planned.decisions[site.name].reason for site in meant):
            why = "; ".join(sorted({planned.decisions[site.name].reason for site in meant})) or "the model has none"
            raise UsageError(f"{_OPTIONS[role]} (recipe: {'lm_head' if role == 'head' else role}): no effect: {why}")


def _check_experts(planned: Planned) -> None:
    """Both matrices of the experts of a step are stored and multiplied alike."""
    pairs: dict[int, list[Site]] = {}
    for site in planned.sites:
        if site.experts is not None:
            pairs.setdefault(site.readers[0][0], []).append(site)
    for pair in pairs.values():
        if len({planned.decisions[site.name].method for site in pair}) > 1:
            raise UsageError(
                f"{' and '.join(site.label for site in pair)}: one kernel multiplies both matrices of an expert; "
                "give them the same method"
            )
