"""The systemd unit and the Dockerfile use options and signals that the server knows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from llmc.runtime.server.cli import serve

FOLDER = Path(__file__).parents[3] / "examples/deploy"
OPTIONS = {name for parameter in serve.params for name in parameter.opts}


def test_the_unit() -> None:
    text = (FOLDER / "llmc.service").read_text().replace("\\\n", " ")
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    command = shlex.split(values["ExecStart"])
    assert command[1] == "serve" and {a for a in command if a.startswith("--")} <= OPTIONS
    assert int(values["TimeoutStopSec"]) > int(command[command.index("--drain-timeout") + 1]) + 5
    assert "-HUP" in values["ExecReload"] and values["RestartPreventExitStatus"] == "2 4"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_knows_all_of_the_unit(tmp_path: Path) -> None:
    """Also that it is no wide door: 10 is the worst that ``security`` says."""
    unit = tmp_path / "llmc.service"
    unit.write_text((FOLDER / "llmc.service").read_text().replace("/opt/llmc/bin/llmc", "/bin/true"))
    for command in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=50"]):
        done = subprocess.run(["systemd-analyze", *command, str(unit)], capture_output=True, text=True)
        assert done.returncode == 0 and "Unknown" not in done.stderr and "ignoring" not in done.stderr, done.stderr


def test_the_image() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    lists = {line.split()[0]: json.loads(line[line.index("[") :]) for line in lines if re.match("ENTRYPOINT|CMD", line)}
    words = [*lists["ENTRYPOINT"], *lists["CMD"]]
    assert words[1] == "serve" and {a for a in words if a.startswith("--")} <= OPTIONS
    assert "STOPSIGNAL SIGTERM" in lines and "USER llmc" in lines
    known = {"FROM", "RUN", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines if line and not line.startswith("#")} == known
    stages = [line.split()[1:] for line in lines if line.startswith("FROM")]
    assert [stage[-1] for stage in stages] == ["build", stages[0][0]], (
        "the same Python in both, and no compiler in the last"
    )
    (copied,) = (line.split()[1:] for line in lines if line.startswith("COPY --from"))
    assert copied[0] == "--from=build" and copied[1] == copied[2] == words[0].removesuffix("/bin/llmc")
