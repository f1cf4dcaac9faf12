"""Memory of a device: what is planned, what is taken, and that it is given back."""

import gc
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from driver import counts, fake_gpu, held
from emulated import Built

from llmc import LLM
from llmc.__main__ import cli
from llmc.errors import EngineError, KernelError, ResourceError, UsageError
from llmc.runtime import devices
from llmc.runtime.devices.cuda import executor as cuda_executor
from llmc.runtime.devices.cuda import memory
from llmc.runtime.devices.cuda.executor import CudaExecutor

MIB = 1 << 20


def executor_of(llm: LLM) -> CudaExecutor:
    assert isinstance(llm.executor, CudaExecutor)
    return llm.executor


def test_all_that_is_planned_is_taken_and_given_back(built: Built) -> None:
    with fake_gpu([], memory=16 * MIB) as gpu:
        for share in ("43%", 0.44, "7MiB"):  # as a server does that reloads
            llm = LLM(built.engine.path, gpu_memory=share)
            plan, found = executor_of(llm).memory, counts(gpu)
            exact = plan.weights + plan.activations + plan.step + plan.scratch + plan.pool
            assert exact - 4096 < found["bytes"] <= exact  # what is not aligned at the end
            limit = memory.budget(share, 16 * MIB)
            assert limit - plan.block < plan.fixed + plan.pool <= limit or plan.blocks == 8 * 32
            assert (found["streams"], found["contexts"]) == (1, 1)
            llm.close()
            assert not held(gpu)
            llm.close()
        with pytest.raises(KernelError, match="the engine is closed"):
            llm.executor.step(None)  # type: ignore[arg-type]
        llm = LLM(built.engine.path)
        del llm  # nobody closed it
        gc.collect()
        assert not held(gpu)


def test_what_was_taken_before_an_error_is_given_back(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu([], memory=8 * MIB) as gpu:
        with pytest.raises(ResourceError, match="gpu_memory"):
            LLM(built.engine.path, num_blocks=10**6)
        assert not held(gpu)
        monkeypatch.setattr(memory, "RESERVE", -1.0)  # somebody else is quicker: the plan fits, the memory is gone
        with pytest.raises(ResourceError, match=r"the KV cache of 2000 blocks: needs \d+ bytes .* \d+ of \d+ are free"):
            LLM(built.engine.path, num_blocks=2000, gpu_memory="1GiB")
        assert not held(gpu)
        monkeypatch.setattr(cuda_executor, "_kernels", lambda engine: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            LLM(built.engine.path, gpu_memory="7MiB")
        with pytest.raises(ZeroDivisionError):
            devices.make_executor(built.engine, num_blocks=4)
        assert not held(gpu)
    with fake_gpu([], capability=80) as gpu:
        with pytest.raises(EngineError, match=r"compute capability 8\.0"):
            LLM(built.engine.path)
        assert not held(gpu)


def test_gpu_memory() -> None:
    total = 1000 * MIB
    assert memory.budget(None, total) == int(0.9 * total)
    assert memory.budget("50%", total) == memory.budget(0.5, total) == memory.budget("0.5", total) == total // 2
    assert memory.budget("30 MiB", total) == memory.budget(30 * MIB, total) == 30 * MIB
    for wrong in (0, "0%", "120%", -0.5, "much"):
        with pytest.raises(UsageError):
            memory.budget(wrong, total)


def test_gpu_memory_is_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Built) -> None:
    from llmc.runtime.kv_budget import blocks_of_cache

    with pytest.raises(UsageError, match="is built for the CPU; use kv_memory"):
        blocks_of_cache(built.engine, 1, None, None, gpu_memory="50%")


def test_a_draft_engine_takes_its_share(built: Built) -> None:
    plan = memory.plan_of(built.engine, "sm_90")
    room = 2 * plan.fixed + 100 * plan.block  # 50 for each
    with fake_gpu([], memory=64 * MIB) as gpu:
        both = LLM(built.engine.path, speculative=f"draft={built.engine.path}", gpu_memory=room)
        assert executor_of(both).num_blocks == 50
        assert counts(gpu)["contexts"] == 2
        assert counts(gpu)["bytes"] <= room
        both.close()
        assert not held(gpu)


def test_a_dry_run_and_inspect_tell_the_plan(built: Built) -> None:
    options = ["--target", "cuda:sm_90", "--dtype", "bfloat16", "--max-batch-tokens", "64", "--max-sequences", "8"]
    model = str(built.engine.path.parent / "model")
    done = CliRunner().invoke(cli, ["build", model, "--dry-run", "--quiet", *options, "--json"])
    assert done.exit_code == 0, done.output
    dry = json.loads(done.stdout)["device_memory"]
    shown = json.loads(CliRunner().invoke(cli, ["inspect", str(built.engine.path), "--json"]).stdout)
    report = json.loads(built.engine.read("report.json") or b"")
    assert dry == report["device_memory"]
    assert report["verified_on_hardware"] is False
    assert set(report["weights"]) == set(built.engine.weights)
    for found in (dry, shown["device_memory"]):
        del found["plan"]["kernels"], found["plan"]["total"]
        del found["fits"]
    assert dry == shown["device_memory"]
    with fake_gpu([], memory=8 * MIB):
        llm = LLM(built.engine.path)
        plan = executor_of(llm).memory.to_json()
        assert {key: plan[key] for key in dry["plan"] if key != "blocks" and key != "kv_cache"} == {
            key: value for key, value in dry["plan"].items() if key != "blocks" and key != "kv_cache"
        }
        llm.close()


def test_people_read_the_plan(built: Built) -> None:
    text = CliRunner().invoke(cli, ["inspect", str(built.engine.path)]).stdout
    for part in ("sm_90: weights", "decode of 8 sequences", "prefill of 64 tokens", "141 GB, of which 90% are taken"):
        assert part in text
    assert "verified on hardware" in text
    assert "no: kernels for CUDA have run on an emulator only" in text
    page = built.engine.read("report.html")
    assert page is None or b"not verified on hardware" in page
    targets = CliRunner().invoke(cli, ["targets"])
    assert targets.stdout.count("unverified on hardware") == 6
    assert "cuda-bindings 13" in targets.stderr
    assert "installed (to build)" in targets.stderr


def test_tokens_of_a_cache(built: Built) -> None:
    plan = memory.plan_of(built.engine, "sm_90")
    assert plan.tokens_on(plan.fixed + 3 * plan.block) == 48
    assert plan.tokens_on(0) == 0
    assert plan.block // plan.block_size >= built.engine.kv_bytes_per_token
    assert min(plan.to_json().values()) >= 0
    assert "MiB of device memory (weights 0.2, KV cache 0.0, activations 0.1, inputs " in str(plan)
