"""The systemd unit and the Dockerfile use options and signals that the server knows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

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


def test_the_image() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    lists = {line.split()[0]: json.loads(line[line.index("[") :]) for line in lines if re.match("ENTRYPOINT|CMD", line)}
    words = [*lists["ENTRYPOINT"], *lists["CMD"]]
    assert words[1] == "serve" and {a for a in words if a.startswith("--")} <= OPTIONS
    assert "STOPSIGNAL SIGTERM" in lines and "USER llmc" in lines
