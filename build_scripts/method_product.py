"""Every method, option mode and KV type on every decoder of the coverage list, one by one. CI runs a covering array.

    python -P build_scripts/method_product.py --results product.jsonl       13 modes and 5 KV types: half an hour
    python -P build_scripts/method_product.py --results product.jsonl --wide  all options by all others: hours

One line of JSON for each combination goes to the file; those that are there are not run again, unless they failed.
Exit status 1 if one failed.
"""

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click

TESTS = Path(__file__).resolve().parent.parent / "tests"

ERRORS = {"rtn": (0.25, 0.03), "awq": (0.25, 0.03), "gptq": (0.4, 0.05), "smoothquant": (1, 0.03), "fp8": (1, 0.06)}
"""The largest relative error of a weight, with 4 bits and with 8."""


def wide_modes() -> list[str]:
    """All options by all others, but for those of one method only, which are tried one by one."""
    shared = product(("rtn", "awq", "gptq"), (4, 8), (0, 16, 32, 128), ("true", "false"))
    modes = [f"{name}:bits={bits},group={group},sym={sym}" for name, bits, group, sym in shared]
    modes += ["rtn:clip=true", "awq:grid=0", "awq:duo=false", "awq:clip=false"]
    modes += ["gptq:act_order=false", "gptq:damping=0.1", "gptq:clip=false", "gptq:alike=0", "gptq:refine=0"]
    smooth = product(("group", "token", "static"), (0, 32), ("true", "false"))
    modes += [f"smoothquant:inputs={inputs},group={group},search={search}" for inputs, group, search in smooth]
    return modes + [f"fp8:scale={s},inputs={i}" for s, i in product(("tensor", "channel", "block"), ("float", "fp8"))]


def check(model: Any, mode: str, folder: Path, wanted: Any) -> dict[str, Any]:
    """Quantize all that can be with one method, and run it. Raises AssertionError for a result that is too far off."""
    from method_grid import LOGITS, _routed
    from quantizable import distance, logits, quantize, samples

    lowered, report = quantize(model, mode, folder, calib_samples=4)
    entries = [entry for entry in report["weights"] if "format" in entry]
    assert entries, "nothing is quantized"
    bound = ERRORS[mode.split(":")[0]]
    wrong = [f"{e['name']}: {e['error']}" for e in entries if not e["error"] < bound[e["bits"] == 8]]
    assert not wrong, wrong
    (ids,) = samples(1, 40, seed=9)
    far = distance(logits(lowered, ids), wanted)
    assert far < LOGITS + _routed(model), f"logits are off by {far}"
    return {"weights": len(entries), "error": max(e["error"] for e in entries), "logits": far}


def check_kv(model: Any, dtype: str, wanted: Any) -> dict[str, Any]:
    """Run with keys and values in a type. Raises AssertionError for a result that is too far off."""
    from method_grid import KV, _routed
    from quantizable import distance, logits, samples

    (ids,) = samples(1, 40, seed=9)
    far = distance(logits(model.lowered, ids, kv_dtype=dtype), wanted)
    assert far < KV[dtype] + _routed(model), f"logits are off by {far}"
    return {"logits": far}


def combinations(name: str, wide: bool, done: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """What comes of each one of a decoder that is not done yet."""
    from method_grid import KV, METHODS
    from quantizable import compiled, logits, samples, save_model

    modes = [*(wide_modes() if wide else METHODS), *(f"kv={dtype}" for dtype in KV)]
    modes = [mode for mode in modes if (name, mode) not in done]
    if not modes:
        return
    with tempfile.TemporaryDirectory() as folder:
        model = compiled(save_model(name, Path(folder) / "model"))
        (ids,) = samples(1, 40, seed=9)
        wanted = logits(model.lowered, ids)
        for number, mode in enumerate(modes):
            start, place = time.monotonic(), Path(folder) / str(number)
            place.mkdir()
            try:
                kv = mode.startswith("kv=")
                found = check_kv(model, mode[3:], wanted) if kv else check(model, mode, place, wanted)
            except Exception as problem:  # whatever it is, the others are to be tried
                found = {"failed": f"{type(problem).__name__}: {problem}", "trace": traceback.format_exc(limit=-3)}
            yield {"model": name, "mode": mode, **found, "seconds": round(time.monotonic() - start, 2)}


@click.command()
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Lines are added here.")
@click.option("--wide", is_flag=True, help="All options by all others.")
@click.argument("models", nargs=-1)
def main(results: Path, wide: bool, models: tuple[str, ...]) -> None:
    """Run what is not done for MODELS, or all of them; print the counts."""
    sys.path[:0] = [str(TESTS), str(TESTS / "compiler")]
    from configs import CONFIGS

    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(line["model"], line["mode"]) for line in lines if "failed" not in line}
    failed = 0
    with results.open("a") as file:
        for name in models or CONFIGS:
            for found in combinations(name, wide, done):
                print(json.dumps(found), file=file, flush=True)
                done |= set() if "failed" in found else {(name, found["mode"])}
                if "failed" in found:
                    failed += 1
                    click.echo(f"{name}: {found['mode']}: {found['failed']}")
    click.echo(f"{len(done)} are right, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
