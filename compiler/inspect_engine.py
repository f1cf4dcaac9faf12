"""What `llmc inspect` tells of an engine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from llmc.compiler.cuda.sizes import memory_facts
from llmc.compiler.medusa.tree import shown
from llmc.plugins import all_ops
from llmc.runtime.devices.cuda import memory, targets
from llmc.runtime.engine import Engine
from llmc.runtime.fusing import fuse_gates
from llmc.runtime.plan import Step
from llmc.runtime.speculative.eagle import EagleProposer
from llmc.runtime.speculative.medusa import MedusaProposer

UNVERIFIED = "no: kernels for CUDA have run on an emulator only"


def describe(engine: Engine) -> dict[str, Any]:
    """Facts, limits, sizes and a summary of the plan. Everything was verified when it was loaded."""
    model = engine.model
    return {
        "engine": str(engine.path),
        "format": engine.manifest.format,
        "llmc": engine.manifest.llmc,
        "digest": f"sha256:{engine.digest}",
        "target": engine.manifest.target,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "bits_per_weight": _report(engine).get("quantization", {}).get("summary", {}).get("bits_per_weight"),
        "kv_dtype": engine.kv_cache.dtype,
        "kv_centred": "yes" if any(_is_centred(step) for step in engine.plan.steps) else "no",
        "medusa": None if engine.heads is None else shown(engine.heads.tree, engine.heads.vocabulary),
        "medusa_expected": _report(engine).get("medusa", {}).get("expected"),
        "eagle": _report(engine).get("eagle", {}).get("shown") if engine.eagle is not None else None,
        "limits": asdict(engine.limits),
        "model_limit": model.max_position_embeddings,
        "rope": model.rope,
        "eos_token_ids": list(model.eos_token_ids),
        "bos": f"{model.bos_token_id}, {'added to texts' if model.add_bos else 'not added to texts'}",
        "chat_template": "yes" if engine.chat_template else "no",
        "weight_bytes": engine.weight_bytes,
        "arena_bytes": engine.plan.arena_bytes,
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "kv_bytes_per_sequence": engine.kv_bytes_per_token * engine.limits.max_seq_len,
        "eagle_kv_bytes_per_token": None if engine.eagle is None else EagleProposer.kv_bytes_per_token(engine, None),
        "device_memory": None if engine.manifest.target == "cpu" else _device(engine),
        "verified": None if engine.manifest.target == "cpu" else UNVERIFIED,
        "kv_slots": [asdict(slot) for slot in engine.plan.kv_slots],
        "steps": len(engine.plan.steps),
        "ops": dict(sorted(Counter(step.op for step in engine.plan.steps).items())),
        "files": {name: entry.size for name, entry in engine.manifest.files.items()},
        "weights": {w.name: {"dtype": w.dtype, "shape": list(w.shape)} for w in engine.weights.values()},
    }


def _device(engine: Engine) -> dict[str, Any]:
    """Memory of a device, for the first architecture."""
    arch = targets.architectures(engine.manifest.target)[0]
    drafts = {
        kind.name: memory.plan_of(kind.beside(engine, None), arch, engine)
        for kind, part in ((MedusaProposer, engine.heads), (EagleProposer, engine.eagle))
        if part is not None
    }
    sizes = engine.kv_cache, engine.limits, arch, drafts
    return memory_facts(memory.plan_of(engine, arch), fuse_gates(engine.plan), *sizes)


def _is_centred(step: Step) -> bool:
    given = dict(zip(all_ops()[step.op].plan_inputs, step.inputs, strict=False))
    return given.get("key_center?") is not None


def _report(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine.read("report.json") or b"{}")
    return found
