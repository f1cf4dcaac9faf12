"""Results of commands: one dict that is printed as JSON, or as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmc.compiler.progress import format_bytes

if TYPE_CHECKING:
    from llmc.compiler.api import BuildResult, Compiled
    from llmc.compiler.medusa.build import HeadsToBuild

LABELS = {
    "architecture": "architecture",
    "parameters": "parameters",
    "dtype": "weights",
    "quantization": "quantized",
    "bits_per_weight": "bits per quantized weight",
    "goal": "formats chosen",
    "kv_dtype": "KV cache",
    "kv_centred": "cached keys less their means",
    "medusa": "Medusa heads",
    "medusa_expected": "expected of the heads",
    "eagle": "EAGLE layer",
    "heads_bytes": "weights of what drafts",
    "target": "target",
    "limits": "limits",
    "weight_bytes": "weights on disk and in memory",
    "largest_weight_bytes": "largest weight",
    "arena_bytes": "activations at the largest step",
    "kv_bytes_per_token": "KV cache per token",
    "kv_bytes_per_sequence": "KV cache of a full sequence",
    "eagle_kv_bytes_per_token": "KV cache per token, of the EAGLE layer besides",
    "device_memory": "memory of the device",
    "verified": "verified on hardware",
    "build_peak_bytes": "memory to build, above imports",
    "disk_bytes": "disk needed",
    "engine_bytes": "engine on disk",
    "peak_rss_bytes": "peak memory of this build",
    "steps": "steps",
    "ops": "ops",
    "files": "files",
    "format": "engine format",
    "llmc": "built by llmc",
    "digest": "digest",
    "engine": "engine",
    "stored": "stored as",
    "model_limit": "positions",
    "eos_token_ids": "end tokens",
    "bos": "begin token",
    "chat_template": "chat template",
    "rope": "rope",
    "ignored_tensors": "ignored tensors",
    "quality": "quality",
    "gate": "gate",
    "warnings": "notes",
    "seconds": "time",
}
"""Key of a result: what people read. In this order; keys that are not here are for machines."""


def planned(
    compiled: Compiled, heads: HeadsToBuild | None = None, layer_bytes: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """What a dry run tells.

    Args:
        compiled: for a device, as `cuda.sizes.with_drafts` has it.
        heads: Medusa heads that the engine gets.
        layer_bytes: of an EAGLE layer's own weights, and of what it keeps of each token.
    """
    from llmc.compiler.cuda.sizes import device_memory
    from llmc.compiler.quantize.build import quantization_text

    more = 0 if heads is None else heads.heads.nbytes(compiled.dtype, None if heads.ids is None else len(heads.ids))
    more += layer_bytes[0]
    return {
        "architecture": compiled.checkpoint.config.architectures[0],
        "parameters": compiled.checkpoint.parameters,
        "dtype": compiled.dtype,
        "quantization": "" if compiled.planned is None else quantization_text(compiled.planned),
        "kv_dtype": compiled.kv_dtype,
        "target": compiled.target.name,
        "limits": asdict(compiled.limits),
        "steps": len(compiled.lowered.plan.steps),
        **asdict(compiled.estimate),
        "eagle_kv_bytes_per_token": layer_bytes[1] or None,
        "heads_bytes": more or None,
        "disk_bytes": compiled.estimate.disk_bytes + compiled.estimate.work_bytes + more,
        "device_memory": None if compiled.cuda is None else device_memory(compiled),
    }


def built(result: BuildResult) -> dict[str, Any]:
    """What a build tells."""
    return {
        "engine": str(result.path),
        "architecture": result.model.architecture,
        "parameters": result.model.parameters,
        "dtype": result.model.dtype,
        "quantization": result.model.quantization,
        "bits_per_weight": result.report.get("quantization", {}).get("summary", {}).get("bits_per_weight"),
        "goal": result.report.get("quantization", {}).get("goal"),
        "kv_dtype": result.kv_dtype,
        "target": result.target,
        "medusa": result.report.get("medusa", {}).get("shown"),
        "medusa_expected": result.report.get("medusa", {}).get("expected"),
        "eagle": result.report.get("eagle", {}).get("shown"),
        "eagle_kv_bytes_per_token": result.report.get("eagle", {}).get("kv_bytes_per_token"),
        "heads_bytes": sum(result.report.get(name, {}).get("own_bytes", 0) for name in ("medusa", "eagle")) or None,
        "limits": asdict(result.limits),
        "engine_bytes": result.engine_bytes,
        "digest": f"sha256:{result.digest}",
        **{key: result.report[key] for key in ("quality", "gate") if key in result.report},
        **{
            key: value
            for key, value in asdict(result.estimate).items()
            if key not in ("build_peak_bytes", "disk_bytes", "work_bytes")
        },
    }


def rows_for_people(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of a label and a text."""
    return [
        (label, _text(key, result[key])) for key, label in LABELS.items() if result.get(key) not in (None, [], {}, "")
    ]


def _text(key: str, value: Any) -> str:
    if key == "seconds":
        total = sum(value.values())
        return f"{total:.1f} s (" + ", ".join(f"{name} {seconds:.1f}" for name, seconds in value.items()) + ")"
    if key == "gate":
        return "passed: " + ", ".join(f"{c['metric']}{c['wanted']} ({c['shown']})" for c in value["conditions"])
    if key == "quality":
        return _quality_text(value)
    if key == "goal":
        return _goal_lines(value)
    if key == "device_memory":
        return "\n".join(_device_lines(value))
    if key in ("stored", "files"):
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in value.items())
    if key.endswith(("_bytes", "bytes_per_token", "bytes_per_sequence")):
        return format_bytes(value)
    if key == "parameters":
        return f"{value / 1e6:.1f} M"
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list):
        return ("; " if key == "warnings" else ", ").join(map(str, value))
    return str(value)


def _device_lines(found: Mapping[str, Any]) -> Iterator[str]:
    plan = found["plan"]
    yield (
        f"{found['arch']}: weights {format_bytes(plan['weights'])}, activations {format_bytes(plan['activations'])}, "
        f"inputs {format_bytes(plan['step'])}, scratch {format_bytes(plan['scratch'])}, kernels about "
        f"{format_bytes(plan['kernels'])}, graphs about {format_bytes(plan['graphs'])}"
    )
    for size in found["buckets"]:
        yield (
            f"{size['name']}: {size['launches']} launches, scratch {format_bytes(size['scratch'])}, inputs "
            f"{format_bytes(size['inputs'])}"
        )
    yield f"KV cache: {format_bytes(found['kv_bytes_per_token'])} a token"
    for name, its in found["drafts"].items():
        more = f", KV cache {format_bytes(its['block'] // its['block_size'])} a token" if its["block"] else ""
        yield (
            f"--spec {name} besides: weights {format_bytes(its['weights'])}, activations "
            f"{format_bytes(its['activations'])}, inputs {format_bytes(its['step'])}, scratch "
            f"{format_bytes(its['scratch'])}, graphs about {format_bytes(its['graphs'])}{more}"
        )
    for room in found["fits"]:
        yield (
            f"{room['gigabytes']} GB, of which {room['share']:.0%} are taken: {room['tokens']} tokens of KV cache, "
            f"{room['sequences']} sequences of {found['max_seq_len']}"
        )


GOAL_HEADS = ("bits per weight", "size", "perplexity", "layers")


def goal_rows(goal: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The choices of formats that no other beats in both size and damage, as texts under GOAL_HEADS."""
    return [
        (
            f"{row['bits_per_weight']:.3f}" + (" (chosen)" if "chosen" in row else ""),
            format_bytes(row["bytes"]),
            f"{row['ppl_increase'] * 100:+.3g} %",
            ", ".join(f"{count} {label}" for label, count in row["layers"].items()),
        )
        for row in goal["table"]
    ]


def goal_text(goal: Mapping[str, Any]) -> str:
    """What was measured of the choice."""
    found = goal["held_out"]
    return (
        f"perplexity {found['increase'] * 100:+.3g} % on {found['tokens']} held-out tokens "
        f"({found['source']:g} to {found['perplexity']:g}), estimated {found['estimated'] * 100:+.3g} %"
    )


def _goal_lines(goal: Mapping[str, Any]) -> str:
    rows = [GOAL_HEADS, *goal_rows(goal)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]
    return "\n".join([goal_text(goal), *lines])


def _quality_text(quality: dict[str, Any]) -> str:
    compared, generated = quality["comparison"], quality["generation"]
    parts = [f"perplexity {quality['perplexity']:g}"]
    if compared:
        parts[0] += f" (source {compared['perplexity']:g}, {(compared['ratio'] - 1) * 100:+.2f} %)"
        parts += [f"KL {compared['kl']:.3g}", f"same best token {compared['top1']:.2%}"]
    if generated:
        parts.append(f"repeated {generated['repetition']:.1%}")
        if compared:
            parts[-1] += f" (source {generated['reference_repetition']:.1%})"
            parts.append(f"free texts part after {generated['divergence']:.0f} of {generated['limit']} tokens")
    return ", ".join(parts)
