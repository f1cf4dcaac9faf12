"""The order of the passes is computed, so it is written down and reviewed too."""

from pathlib import Path

from llmc.passes import ordered_passes
from llmc.passes.fx import ordered_fx_passes


def test_the_order_is_the_reviewed_one() -> None:
    reviewed = Path(__file__).with_name("order.txt").read_text().splitlines()
    found = [f"FX {p.__name__}" for p in ordered_fx_passes()]
    found += [f"{p.stage.name} {p.__name__}" for p in ordered_passes()]
    assert found == reviewed
