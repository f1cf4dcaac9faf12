import json
from pathlib import Path

import pytest

from llmc.errors import UsageError
from llmc.quantization.base import parse_method
from llmc.quantization.calibration import CalibrationSettings
from llmc.quantization.recipe import Recipe, Rule, read_recipe, recipe_from

YAML = r"""
method: awq:group=64
rules:
  - match: model\.layers\.0\..*
    method: {name: rtn, bits: 8, group: 0}
  - {role: attention, match: .*o_proj.*, method: none}
  - {role: experts, method: int8}
lm_head: true
calibration: {samples: 64, length: 256, seed: 3, source: texts.jsonl}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(YAML)
    return read_recipe(path)


def test_everything_is_read(recipe: Recipe) -> None:
    assert recipe.method == parse_method("awq:group=64")
    assert recipe.calibration == CalibrationSettings("texts.jsonl", 64, 256, 3)
    assert recipe.lm_head
    assert not recipe.embedding


@pytest.mark.parametrize(
    ("name", "role", "method"),
    [
        ("model.layers.0.self_attn.o_proj.weight", "attention", "rtn:bits=8,group=0"),
        ("model.layers.10.self_attn.o_proj.weight", "attention", None),
        ("model.layers.1.o_proj.weight", "mlp", "awq:group=64"),
        ("model.layers.3.experts.gate_up", "experts", "int8"),
        ("lm_head.weight", "head", "awq:group=64"),
        ("model.embed_tokens.weight", "embedding", None),
    ],
)
def test_the_first_rule_that_fits_counts(recipe: Recipe, name: str, role: str, method: str | None) -> None:
    assert recipe.method_for(name, role) == (parse_method(method) if method else None)


def test_head_and_embedding_are_left_alone_unless_asked_for() -> None:
    method = parse_method("rtn")
    assert Recipe(method).method_for("lm_head.weight", "head") is None
    assert Recipe(method, embedding=True).method_for("embed.weight", "embedding") == method
    assert Recipe(method, rules=(Rule(method, role="head"),)).method_for("lm_head.weight", "head") == method


def test_json_reads_back_the_same(recipe: Recipe, tmp_path: Path) -> None:
    for it in (recipe, Recipe(), Recipe(parse_method("gptq"), budget="4.3bpw"), Recipe(max_ppl_increase=0.02)):
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps(it.to_json()))
        assert read_recipe(path) == recipe_from(it.to_json()) == it


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[1]", "expected an object with some of method, rules"),
        ("methods: rtn", "unknown key methods; known: method, rules"),
        ("method: best", "unknown method; known: none, awq"),
        ("method: {name: rtn, bit: 4}", "unknown option bit; known: bits"),
        ("method: {bits: 4}", "expected a text such as awq:group=64"),
        ("method: {name: rtn, group: many}", "expected a whole number"),
        ("method: 4", "expected a text such as"),
        ("rules: {role: mlp}", "rules: expected a list"),
        ("rules: [{role: mlp}]", "rule 1: no method"),
        ("rules: [{method: rtn}]", "expected match .* role or both"),
        ("rules: [{method: rtn, role: ffn}]", "role ffn: unknown; known: attention, mlp, experts, head, embedding"),
        ("rules: [{method: rtn, match: '['}]", "recipe rule: match '\\['"),
        ("rules: [{method: rtn, role: mlp, bits: 3}]", "rule 1: unknown key bits; known: method, match, role"),
        ("rules: [{method: rtn, match: 3}]", "rule 1: match: expected a text or null, got 3"),
        ("calibration: {sample: 3}", "calibration: unknown key sample; known: source, samples, length, seed"),
        ("calibration: {samples: many}", "calibration samples: expected a whole number, got 'many'"),
        ("calibration: {samples: true}", "calibration samples: expected a whole number, got True"),
        ("calibration: {length: 1}", "calibration length 1: expected a number from 2"),
        ("calibration: {seed: -1}", "calibration seed -1: expected a number from 0"),
        ("lm_head: 1", "lm_head: expected true or false, got 1"),
        ("budget: 4.3", "budget: expected a text or null, got 4.3"),
        ("budget: 4.3 bits", "expected bits per weight"),
        ("max_ppl_increase: 200", "expected a share, such as 0.02 for 2 %"),
        ("{budget: 4.3bpw, max_ppl_increase: 0.01}", "exclude each other"),
        ("a: [", "not YAML"),
        ("method: rtn\nmethod: awq", "'method' occurs twice"),
        ("rules: [{method: rtn, match: 'a{99999999999}'}]", "recipe rule: match .*too large"),
        ("rules: [{method: rtn, match: '" + "(" * 5000 + ")" * 5000 + "'}]", "recipe rule: match .*recursion"),
        ("[" * 5000, "not YAML: .*recursion"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=complaint):
        read_recipe(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--recipe .*none\.yaml: No such file"):
        read_recipe(tmp_path / "none.yaml")


def test_rules_that_decide_for_nothing_are_errors(recipe: Recipe) -> None:
    weights = [("model.layers.0.mlp.weight", "mlp"), ("model.layers.1.o_proj.weight", "attention"), ("e", "experts")]
    recipe.check_rules(weights)
    with pytest.raises(UsageError, match=r"rule 3 \(role 'experts'\) decides for no weight.*model\.layers\.0\.mlp"):
        recipe.check_rules(weights[:2])
    shadowed = Recipe(rules=(Rule(None, role="mlp"), Rule(None, match=".*", role="mlp")))
    with pytest.raises(UsageError, match="rule 2"):
        shadowed.check_rules(weights)
