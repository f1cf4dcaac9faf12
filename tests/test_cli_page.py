"""docs/cli.md lists every option of the code, and the code reads no environment variable that is not listed."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from llmc import debug

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "compiler",
    "passes",
    "plugins",
    "quantization",
    "runtime",
    "llmc",
    "build_scripts",
    "tests",
    ".ci",
    "examples",
)
SUFFIXES = (".py", ".sh", ".cpp", ".h", "")

READ = re.compile(
    r"""(?: environ (?: \.get \( | \[ | \.pop \( | \.setdefault \( )? [^"']{0,12} | getenv \s* \( | setenv \( )
        \s* ["'] (LLMC_[A-Z_]+) | \$ \{? (LLMC_[A-Z_]+)""",
    re.VERBOSE,
)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cli_page", ROOT / "build_scripts/cli_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    found = generator.PAGE.read_text(encoding="utf-8")
    assert found == generator.page(), "an option has changed: python build_scripts/cli_page.py"


def test_every_option_says_what_it_does(generator: ModuleType) -> None:
    rows = re.findall(r"^\| (`-.*?) \| (.*?) \|$", generator.page(), re.MULTILINE)
    assert len(rows) > 50
    assert [names for names, text in rows if not text] == []


def test_every_environment_variable_is_listed(generator: ModuleType) -> None:
    listed = set(debug.VARIABLES | generator.OTHER_VARIABLES)
    used: dict[str, str] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__):
                text = path.read_text(encoding="utf-8", errors="ignore")
                used |= {name: path.name for match in READ.findall(text) for name in match if name}
    assert {name: where for name, where in used.items() if name not in listed} == {}
    assert set(generator.OTHER_VARIABLES) <= set(used), "a listed variable is read by nothing"
