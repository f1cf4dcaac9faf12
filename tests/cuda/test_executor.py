"""Whole engines for CUDA: numbers of transformers on the emulator, tokens through the driver API of cuda.bindings."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from cuda_models import distance, executor_for, gpu_for
from driver import fake_gpu
from emulated import CONFIG, Built, EmulatedDevice
from packed import MIXED, expected_logits, random_ids

from llmc import LLM, SamplingParams
from llmc.compiler.cuda.build import kernels_of
from llmc.compiler.diff import diff
from llmc.errors import EngineError, ResourceError, UsageError
from llmc.plugins.cuda import Launch
from llmc.runtime import devices
from llmc.runtime.batch import Batch
from llmc.runtime.devices.cuda.driver import CudaDevice
from llmc.runtime.devices.cuda.executor import CudaExecutor

WHOLE = ((("a", 29),), (("b", 21),))
DECODE = ((("b", 17),), (("b", 1),), (("b", 1),), (("b", 2),))
TOKENS = 6


class Watched(CudaDevice):
    """Remembers what it was asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def run(self, launches: Sequence[Launch]) -> None:
        self.calls.append("run")
        super().run(launches)

    def capture(self, launches: Sequence[Launch]) -> Any:
        self.calls.append("capture")
        return super().capture(launches)

    def replay(self, graph: Any) -> None:
        self.calls.append("replay")
        super().replay(graph)


def clear_answers(model: Any, *lengths: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of these lengths, and what transformers answers where no second choice comes near."""
    generator, found = torch.Generator().manual_seed(3), []
    for length in lengths:
        margin = 0.0
        while margin < 0.2:
            ids = torch.randint(3, CONFIG.vocab_size, (1, length), generator=generator)
            for _ in range(TOKENS):
                ids = torch.cat([ids, expected_logits(model, ids)[:, -1:].argmax(-1)], 1)
            logits = expected_logits(model, ids)[0, length - 1 : -1]
            best = logits.topk(2).values
            margin = float((best[:, 0] - best[:, 1]).min() / logits.std())
        found.append((ids[0, :length].tolist(), ids[0, length:].tolist()))
    return found


def test_a_llama_gives_the_numbers_of_transformers(built: Built) -> None:
    ids = random_ids(CONFIG, a=29, b=21)
    expected = {key: expected_logits(built.model, x)[0].numpy() for key, x in ids.items()}
    tokens = {key: x[0].tolist() for key, x in ids.items()}
    found: dict[str, np.ndarray] = {}
    for steps in (WHOLE, DECODE, MIXED):
        device = EmulatedDevice()
        packed = engines.Packed(CudaExecutor(built.engine, device, num_blocks=16), tokens)
        for key, logits in packed.run(steps).items():
            assert distance(logits, expected[key]) < 0.03
            first = found.setdefault(key, logits)
            size = min(len(first), len(logits))
            assert np.array_equal(first[:size], logits[:size])
        assert device.waits and device.copies


def test_the_driver_gives_the_tokens_of_transformers(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts at once, from a thread that has not opened the device; one sequence goes on into a second block."""
    answers = clear_answers(built.model, 5, 13)
    engine = built.engine
    kernels = kernels_of(engine.plan, engine.limits, engine.kv_cache, 90)
    with fake_gpu([kernel for name, kernel in kernels.items() if name != "move_positions"], mode="plain"):
        device = Watched()
        monkeypatch.setattr(devices, "open_cuda", lambda: device)
        llm = LLM(engine.path)
        found: list[Any] = []
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        prompts = [prompt for prompt, _ in answers]
        thread = threading.Thread(target=lambda: found.extend(llm.generate(prompts, params)))
        thread.start()
        thread.join()
        assert [list(output.choices[0].token_ids) for output in found] == [tokens for _, tokens in answers]
        calls = " ".join(device.calls)
        decoded = "replay run"  # the second chooses tokens
        assert calls == " ".join(["run run capture run", *3 * [decoded], "capture run", *2 * [decoded]])
        llm.close()


def batch(tokens: Sequence[int], done: int, positions: Sequence[int] = (), ancestors: Sequence[int] = ()) -> Batch:
    """The next rows of the one sequence, all with logits."""
    rows = np.arange(len(tokens), dtype=np.int32)
    return Batch(
        input_ids=np.array(tokens, np.int32),
        position_ids=np.array(positions, np.int32) if positions else rows + done,
        logit_rows=rows,
        cu_seqlens=np.array([0, len(tokens)], np.int32),
        num_computed=np.array([done], np.int32),
        block_tables=np.array([[5, 2]], np.int32),
        tree_mask=np.array(ancestors, np.uint64)[:, None] if ancestors else None,
    )


def test_a_tree_of_drafts_through_the_driver(built: Built) -> None:
    """A token with two that may follow, and one after the second, whose branch is taken over."""
    ids = random_ids(CONFIG, a=24)["a"]
    tokens, other = ids[0].tolist(), 99
    expected = expected_logits(built.model, ids)[0].numpy()
    aside = torch.cat([ids[:, :15], torch.tensor([[other]])], 1)
    with gpu_for(built.engine), executor_for(built.engine) as executor:
        assert distance(executor.step(batch(tokens[:14], 0)), expected) < 0.03
        rows = [tokens[14], other, *tokens[15:17]]
        found = executor.step(batch(rows, 14, (14, 15, 15, 16), (0b1, 0b11, 0b101, 0b1101)))
        assert distance(found[[0, 2, 3]], expected[14:17]) < 0.03
        assert distance(found[1:2], expected_logits(built.model, aside)[0, -1:].numpy()) < 0.03
        blocks, kept, places = (np.array(given, np.int32) for given in ([5, 2], [16, 17], [15, 16]))
        executor.move_positions(blocks, kept, places)
        for number in range(17, 24):
            assert (
                distance(executor.step(batch(tokens[number : number + 1], number)), expected[number : number + 1])
                < 0.03
            )


def test_embeddings_through_the_driver(built: Built) -> None:
    ids = random_ids(CONFIG, a=20)["a"]
    with torch.no_grad():
        expected = built.model.model(input_ids=ids, use_cache=False).last_hidden_state[0].numpy()
    with gpu_for(built.engine), executor_for(built.engine) as executor:
        logits = executor.step(batch(ids[0].tolist(), 0)).copy()
        rows, same = executor.embed(batch(ids[0].tolist(), 0), logits=True)
        assert distance(rows, expected) < 0.03
        assert np.array_equal(same, logits)
        assert executor.embed(batch(ids[0, :4].tolist(), 0), logits=False)[1] is None


def test_no_driver(tmp_path: Path) -> None:
    """Of another process: this one may have the stand-in already."""
    (tmp_path / "libcuda.so.1").touch()  # stands before that of a machine with a GPU
    code = "from llmc.runtime.devices import open_cuda\nopen_cuda()"
    variables = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert "this machine has no NVIDIA driver" in done.stderr
    assert "install one, or build an engine with --target cpu" in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"driver": 12080}, r"driver knows CUDA 12\.8; install one that knows 13\.0 or later"),
        ({"devices": 0}, "has no NVIDIA GPU that can be used"),
        ({"capability": 80}, r"has compute capability 8\.0; build it with: llmc build .* --target cuda:sm_80"),
        ({"capability": 120}, r"has compute capability 12\.0; build it with: llmc build .* --target cuda:sm_120"),
    ],
)
def test_a_device_that_cannot_run_the_engine(built: Built, settings: dict[str, int], message: str) -> None:
    with fake_gpu([], **settings), pytest.raises(EngineError, match=message):
        LLM(built.engine.path)


def test_too_little_memory_of_the_device(built: Built) -> None:
    with fake_gpu([], memory=300_000), pytest.raises(ResourceError) as caught:
        LLM(built.engine.path)
    assert f"one sequence of 512 tokens needs {32 * 16 * 2 * 2 * 2 * 16 * 2} bytes" in str(caught.value)
    with (
        fake_gpu([], memory=300_000),
        pytest.raises(ResourceError, match=r"the KV cache of 900 blocks needs \d+ bytes .* \d+ of 300000 are free"),
    ):
        LLM(built.engine.path, num_blocks=900)


def test_what_is_for_the_cpu_alone_refuses_the_engine(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_REFERENCE", "1")
    with pytest.raises(UsageError, match=r"LLMC_REFERENCE=1 runs engines for the CPU, but .* built for cuda:sm_90"):
        devices.make_executor(built.engine, num_blocks=4)
    path = str(built.engine.path)
    refused = CliRunner().invoke(diff, [path, path, "--ids", "5,6"]).exception
    assert "this needs an engine for the CPU" in str(refused)
