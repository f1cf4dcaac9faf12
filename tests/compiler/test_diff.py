"""llmc diff finds nothing between an engine and its model, and names the layer that was changed."""

import json
from pathlib import Path

import engines
import pytest
from click.testing import CliRunner

from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.diff import compare, diff, rank
from llmc.errors import GateError, UsageError
from llmc.runtime.engine import load_engine

IDS = [5, 17, 44, 90, 3, 61, 28, 7]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path]:
    return engines.build(engines.small_llama(), tmp_path_factory.mktemp("diff"))


def test_an_engine_equals_its_model(built: tuple[object, Path]) -> None:
    _, path = built
    found = list(compare(load_engine(path), path.parent / "model", IDS))
    assert {d.phase for d in found} == {"prefill", "decode"}
    modules = {d.module for d in found}
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm"):
        assert f"model.layers.1.{name}" in modules
    assert max(d.relative for d in found) < 1e-5


def test_the_first_changed_layer_is_named(built: tuple[object, Path], tmp_path: Path) -> None:
    model, path = built
    weight = model.model.layers[1].self_attn.o_proj.weight  # type: ignore[attr-defined]
    weight.data[3] += 0.5
    model.save_pretrained(tmp_path / "changed")  # type: ignore[attr-defined]
    weight.data[3] -= 0.5
    arguments = [str(path), str(tmp_path / "changed"), "--ids", ",".join(map(str, IDS))]
    result = CliRunner().invoke(diff, arguments)
    assert isinstance(result.exception, GateError)
    assert "model.layers.1.self_attn.o_proj (prefill)" in str(result.exception)


@pytest.mark.parametrize("method", ["rtn:group=16", "awq:group=16"])
def test_a_quantized_engine_shows_where_it_lost_most(built: tuple[object, Path], tmp_path: Path, method: str) -> None:
    model = built[1].parent / "model"
    lines = [json.dumps({"tokens": [(7 * i + 3 * k) % 128 + 3 for i in range(80)]}) for k in range(4)]
    (tmp_path / "calib.jsonl").write_text("\n".join(lines))
    calib = {"calib": str(tmp_path / "calib.jsonl"), "calib_length": 64}
    build_engine(model, tmp_path / "e", BuildConfig(quantization=method, **calib))
    engine = load_engine(tmp_path / "e")
    found = list(compare(engine, model, IDS))
    ranking = rank(engine, found)
    assert [d.added for d in ranking] == sorted((d.added for d in ranking), reverse=True)
    modules = {d.module for d in ranking}
    assert {f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")} <= modules
    assert 0.005 < max(d.share for d in ranking) < 0.8  # factors that awq moved are no error
    against = {d.module: d for d in rank(engine, list(compare(engine, load_engine(built[1]), IDS)))}
    for damage in ranking:  # another engine of the model, which is as good as the model
        assert against[damage.module].added == pytest.approx(damage.added, abs=1e-4)
    arguments = [str(tmp_path / "e"), str(model), "--ids", ",".join(map(str, IDS))]
    done = CliRunner().invoke(diff, arguments)
    assert done.exit_code == 0 and "where most error is added" in done.output
    done = CliRunner().invoke(diff, [*arguments, "--tolerance", "0.0001", "--rank", "0"])
    assert isinstance(done.exception, GateError) and "most error" not in done.output


def test_the_ranking_is_exact(built: tuple[object, Path], tmp_path: Path) -> None:
    """A projection that is changed is where the error is added."""
    model, path = built
    weight = model.model.layers[1].self_attn.o_proj.weight  # type: ignore[attr-defined]
    weight.data[3] += 0.5
    model.save_pretrained(tmp_path / "changed")  # type: ignore[attr-defined]
    weight.data[3] -= 0.5
    engine = load_engine(path)
    ranking = rank(engine, list(compare(engine, tmp_path / "changed", IDS)))
    assert ranking[0].module == "model.layers.1.self_attn.o_proj" and ranking[0].added > 0.01
    assert sum(d.module == "model.layers.0.self_attn.o_proj" and d.share < 1e-5 for d in ranking) == 1


def test_a_prompt_must_fit(built: tuple[object, Path]) -> None:
    with pytest.raises(UsageError, match="has 2 tokens"):
        list(compare(load_engine(built[1]), built[1].parent / "model", [1, 2]))


def test_two_engines(built: tuple[object, Path], tmp_path: Path) -> None:
    """Equal ones differ nowhere; of two quantized ones the layer that one has rounded more is named."""
    _, path = built
    assert max(d.difference for d in compare(load_engine(path), load_engine(path), IDS)) == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: int8\nrules: [{match: '.*layers.1.mlp.*', method: 'rtn:group=16'}]\n")
    build_engine(path.parent / "model", tmp_path / "one", BuildConfig(quantization="int8"))
    build_engine(path.parent / "model", tmp_path / "two", BuildConfig(recipe=recipe))
    arguments = [str(tmp_path / "two"), str(tmp_path / "one"), "--ids", ",".join(map(str, IDS)), "--json"]
    result = CliRunner().invoke(diff, arguments)
    assert result.exit_code == 0
    assert json.loads(result.output)["ranking"][0]["module"] == "model.layers.1.mlp.down_proj"
    small = engines.small_llama()
    small.vocab_size = 96
    _, other = engines.build(small, tmp_path / "other")
    with pytest.raises(UsageError, match="they are not engines of one model"):
        list(compare(load_engine(path), load_engine(other), IDS))
