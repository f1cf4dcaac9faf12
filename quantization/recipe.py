"""A recipe: all that is asked of a quantization, read strictly from YAML or JSON, and written to be repeated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from llmc.errors import UsageError
from llmc.quantization.base import Method, parse_method
from llmc.quantization.budget import parse_budget
from llmc.quantization.calibration import CalibrationSettings
from llmc.quantization.options import make_method, options_of

NONE = "none"
ROLES = ("attention", "mlp", "experts", "head", "embedding", "other")
"""What a weight is there for."""


@dataclass(frozen=True)
class Rule:
    """Weights whose whole name a pattern matches, or of a role, or both, get another method, or None."""

    method: Method | None
    match: str | None = None
    role: str | None = None

    def __post_init__(self) -> None:
        if self.match is None and self.role is None:
            raise UsageError("recipe rule: expected match (a regular expression), role or both")
        if self.role is not None and self.role not in ROLES:
            raise UsageError(f"recipe rule: role {self.role}: unknown; known: {', '.join(ROLES)}")
        try:
            re.compile(self.match or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"recipe rule: match {self.match!r}: {error}") from error

    def fits(self, name: str, role: str) -> bool:
        """Whether a weight is meant."""
        if self.role is not None and self.role != role:
            return False
        return self.match is None or re.fullmatch(self.match, name) is not None


@dataclass(frozen=True)
class Recipe:
    """The method, exceptions to it, and what it is calibrated with.

    Of the rules, the first that fits a weight counts. Without one the head and the embedding stay as they are unless
    ``lm_head`` or ``embedding`` is set. ``budget``: bits per weight, such as "4.3bpw"; ``max_ppl_increase``: a share of
    the perplexity, such as 0.02. With one of them the method is but the form of the smallest weights.
    """

    method: Method | None = None
    rules: tuple[Rule, ...] = ()
    lm_head: bool = False
    embedding: bool = False
    budget: str | None = None
    max_ppl_increase: float | None = None
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_budget(self.budget)
        if self.max_ppl_increase is not None and not 0 < self.max_ppl_increase < 100:
            raise UsageError(
                f"recipe: max_ppl_increase {self.max_ppl_increase}: expected a share, such as 0.02 for 2 %"
            )
        if self.budget is not None and self.max_ppl_increase is not None:
            raise UsageError("--budget and --max-ppl-increase (recipe: budget, max_ppl_increase) exclude each other")

    def method_for(self, name: str, role: str) -> Method | None:
        """The method for a weight; None leaves it as it is."""
        assert role in ROLES, role
        for rule in self.rules:
            if rule.fits(name, role):
                return rule.method
        if (role == "head" and not self.lm_head) or (role == "embedding" and not self.embedding):
            return None
        return self.method

    def check_rules(self, weights: Iterable[tuple[str, str]]) -> None:
        """Raises UsageError for a rule that decides for none of the weights (name, role)."""
        used = set()
        names = []
        for name, role in weights:
            names.append(name)
            used.add(next((i for i, rule in enumerate(self.rules) if rule.fits(name, role)), None))
        for i, rule in enumerate(self.rules):
            if i not in used:
                what = " and ".join(f"{k} {v!r}" for k, v in (("match", rule.match), ("role", rule.role)) if v)
                raise UsageError(
                    f"recipe: rule {i + 1} ({what}) decides for no weight: none fits, or an earlier rule fits all of "
                    f"them; weights are named like {', '.join(names[:3])}"
                )

    def to_json(self) -> dict[str, Any]:
        """Everything in plain values, defaults too; ``recipe_from`` reads it back."""
        return {
            "method": _plain(self.method),
            "rules": [{"match": r.match, "role": r.role, "method": _plain(r.method)} for r in self.rules],
            "lm_head": self.lm_head,
            "embedding": self.embedding,
            "budget": self.budget,
            "max_ppl_increase": self.max_ppl_increase,
            "calibration": asdict(self.calibration),
        }


def read_recipe(path: Path) -> Recipe:
    """Reads a .yaml, .yml or .json file. Raises UsageError for what is unknown or of the wrong type."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        """Of two equal keys YAML would take the second."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} occurs twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)  # JSON is YAML
    except OSError as error:
        raise UsageError(f"--recipe {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--recipe {path}: not YAML: {error}") from error
    return recipe_from(content, str(path))


def recipe_from(content: Any, where: str = "recipe") -> Recipe:
    """Plain values -> a recipe. Raises UsageError for what is unknown or of the wrong type."""
    given = _mapping(content, Recipe, where)
    if "method" in given:
        given["method"] = _method(given["method"], f"{where}: method")
    if "rules" in given:
        given["rules"] = tuple(
            _rule(rule, f"{where}: rule {i}") for i, rule in enumerate(_list(given["rules"], where), 1)
        )
    if "calibration" in given:
        settings = _mapping(given["calibration"], CalibrationSettings, f"{where}: calibration")
        for key, value in settings.items():
            _check_type(value, (str,) if key == "source" else (int,), f"{where}: calibration {key}")
        given["calibration"] = CalibrationSettings(**settings)
    types: dict[str, tuple[type, ...]] = {"lm_head": (bool,), "embedding": (bool,), "budget": (str, type(None))}
    types["max_ppl_increase"] = (int, float, type(None))
    for key in types.keys() & given.keys():
        _check_type(given[key], types[key], f"{where}: {key}")
    return Recipe(**given)


def _rule(content: Any, where: str) -> Rule:
    given = _mapping(content, Rule, where)
    if "method" not in given:
        raise UsageError(f"{where}: no method; give one, or none")
    for key in ("match", "role"):
        _check_type(given.get(key), (str, type(None)), f"{where}: {key}")
    return Rule(_method(given["method"], f"{where}: method"), given.get("match"), given.get("role"))


def _method(content: Any, where: str) -> Method | None:
    """``awq:group=64``, {name: awq, group: 64}, or none."""
    if content is None or content == NONE:
        return None
    if isinstance(content, str):
        return parse_method(content)
    if isinstance(content, Mapping) and isinstance(content.get("name"), str):
        return make_method(content["name"], {str(key): value for key, value in content.items() if key != "name"})
    raise UsageError(f"{where}: expected a text such as awq:group=64, an object with a name and options, or none")


def _plain(method: Method | None) -> dict[str, Any] | str:
    return NONE if method is None else {"name": method.name, **options_of(method)}


def _mapping(content: Any, kind: type, where: str) -> dict[str, Any]:
    """An object whose keys are fields of a dataclass."""
    known = [f.name for f in fields(kind)]
    if not isinstance(content, Mapping):
        raise UsageError(f"{where}: expected an object with some of {', '.join(known)}")
    for key in content:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key}; known: {', '.join(known)}")
    return dict(content)


def _list(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise UsageError(f"{where}: rules: expected a list")
    return content


def _check_type(value: Any, types: tuple[type, ...], where: str) -> None:
    """Bool is no number here, though Python says so."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
        raise UsageError(f"{where}: expected {' or '.join(names[kind] for kind in types)}, got {value!r}")
