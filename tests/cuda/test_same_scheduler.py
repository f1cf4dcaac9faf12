"""What the CPU's executor does for the scheduler, that for CUDA does too: adapters, drafts, prefixes, embeddings."""

import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from emulated import CONFIG, Built, EmulatedDevice
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from llmc import LLM, SamplingParams
from llmc.__main__ import cli
from llmc.errors import EngineError, LlmcError
from llmc.runtime import devices
from llmc.runtime.scheduler import SchedulerConfig
from llmc.runtime.speculative.base import Proposer, Query, Tree
from llmc.runtime.speculative.speculator import Speculator
from llmc.runtime.verification import verify_engine

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def random_prompt(seed: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, CONFIG.vocab_size, length).tolist()
    return found


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    return [list(output.choices[0].token_ids) for output in llm.generate(prompts, params, **options)]


def test_verify_replays_the_golden_prompts(built: Built, emulated: list[EmulatedDevice]) -> None:
    report = verify_engine(built.engine.path)
    (replay,) = report.replays
    assert replay.isa == "sm_90 on emulator sm_90"
    assert 0 < replay.error < 0.03 < replay.tolerance
    assert report.passed
    done = CliRunner().invoke(cli, ["verify", str(built.engine.path)])
    assert "prompts on sm_90 on emulator sm_90: largest relative error" in done.stdout


def test_prefixes_are_found_and_chunks_change_nothing(built: Built, emulated: list[EmulatedDevice]) -> None:
    shared = random_prompt(1, 33)
    prompts = [shared + random_prompt(2, 3), shared + random_prompt(3, 9)]
    alone = tokens(LLM(built.engine.path, prefix_cache=False), prompts)
    llm = LLM(built.engine.path, max_batch_tokens=20, check=True)
    assert [tokens(llm, [prompt])[0] for prompt in prompts] == alone
    assert llm.scheduler.statistics.prefix_hits == 32


def test_embeddings(built: Built, emulated: list[EmulatedDevice]) -> None:
    prompt = random_prompt(4, 7)
    with torch.no_grad():
        hidden = built.model.model(torch.tensor([prompt])).last_hidden_state[0].float().numpy()
    llm = LLM(built.engine.path)
    for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        (found,) = llm.embed([prompt], pooling)
        assert np.sqrt(np.mean((found - expected) ** 2)) < 0.03 * expected.std()


class Given(Proposer):
    """Trees with the right tokens, behind wrong ones, so that they have to be moved."""

    name: ClassVar[str] = "given to tests"

    def __init__(self, answer: list[int], prompt: int) -> None:
        self.answer, self.prompt = answer, prompt

    @classmethod
    def open(cls, argument: str, setting: Any) -> Any:
        raise NotImplementedError

    def propose(self, queries: list[Query]) -> list[Tree]:
        (query,) = queries
        right = self.answer[len(query.sequence.tokens) - self.prompt :][:2]
        wrong = [(token + 1) % CONFIG.vocab_size for token in right]
        return [Tree((*wrong[:1], *right), (-1, -1, 1)[: 1 + len(right)])]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=6, seed=5, ignore_eos=True)])
def test_trees_of_drafts_change_nothing(built: Built, emulated: list[EmulatedDevice], params: SamplingParams) -> None:
    prompt = random_prompt(6, 15)
    (plain,) = tokens(LLM(built.engine.path), [prompt], params)
    executor: Any = devices.make_executor(built.engine, num_blocks=8)
    speculator = Speculator(Given(plain, len(prompt)), executor, vocab_size=CONFIG.vocab_size, nodes=3)
    config = SchedulerConfig(512, 64, 8, 64, 8, check=True)
    llm = LLM.from_parts(executor, config, vocab_size=CONFIG.vocab_size, speculator=speculator)
    device, waits = emulated[-1], emulated[-1].waits
    assert tokens(llm, [prompt], params) == [plain]
    assert llm.scheduler.statistics.accepted == 3
    assert device.waits - waits == llm.scheduler.statistics.steps == 3
    assert "move_positions" in device.names


def test_adapters(built: Built, emulated: list[EmulatedDevice], tmp_path: Path) -> None:
    path = built.engine.path.parent / "model"
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"],
    }
    model = get_peft_model(base, LoraConfig(**options))
    torch.manual_seed(2)
    for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "some", save_embedding_layers=False)
    prompts = [random_prompt(7, 9), random_prompt(8, 12)]
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=3, ignore_eos=True)
    llm = LLM(built.engine.path, lora={"some": tmp_path / "some"})

    def run(which: list[int], adapters: list[str | None]) -> list[Any]:
        requests = [llm.request(llm.add_request(prompts[i], params, adapter=adapters[i])) for i in which]
        while llm.has_unfinished:
            llm.step()
        return [(r.sequences[0].error, r.sequences[0].tokens, r.sequences[0].logprobs) for r in requests]

    together = run([0, 1], ["some", None])
    assert [*run([0], ["some", None]), *run([1], ["some", None])] == together
    with torch.no_grad():
        peft = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tmp_path / "some"
        ).eval()
        for (error, ids, found), network in zip(together, (peft, built.model), strict=True):
            assert error is None
            expected = torch.log_softmax(network(torch.tensor([ids])).logits[0].float(), -1).numpy()
            for place, entry in enumerate(found, start=len(ids) - len(found) - 1):
                for token, logprob in entry.top:
                    assert logprob == pytest.approx(expected[place, token], abs=0.05)


def test_an_adapter_of_the_head_is_refused(built: Built, emulated: list[EmulatedDevice], tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(built.engine.path.parent / "model", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"]))
    model.save_pretrained(tmp_path / "head", save_embedding_layers=False)
    message = r"\(lora of lm_head\): there is no kernel .* result is float32; merge it into the model: llmc build"
    with pytest.raises(LlmcError, match=message):
        LLM(built.engine.path, lora={"head": tmp_path / "head"})
    arguments = ["serve", str(built.engine.path), "--port", "0", "--lora", f"head={tmp_path / 'head'}"]
    failed = CliRunner().invoke(cli, arguments).exception  # before anything listens
    assert isinstance(failed, EngineError) and re.search(message, str(failed))


def test_without_the_bindings(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for command in (["run", "-p", "x"], ["serve"], ["verify"]):
        failed = CliRunner().invoke(cli, [command[0], str(built.engine.path), *command[1:]]).exception
        assert isinstance(failed, EngineError)
        assert "needs cuda-bindings: pip install 'llmc-engine[cuda]'" in str(failed)
