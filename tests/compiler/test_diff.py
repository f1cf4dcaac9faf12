"""llmc diff finds nothing between an engine and its model, and names the layer that was changed."""

from pathlib import Path

import engines
import pytest
from click.testing import CliRunner

from llmc.compiler.diff import compare, diff
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


def test_a_prompt_must_fit(built: tuple[object, Path]) -> None:
    with pytest.raises(UsageError, match="has 2 tokens"):
        list(compare(load_engine(built[1]), built[1].parent / "model", [1, 2]))
