"""The reference has every public name, option, command and environment variable, and no others."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dynswap_ext
from dynswap_ext import cli, config

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(REFERENCE.glob("*.md"))
OVERVIEW = REFERENCE.with_suffix(".md")
PUBLIC = ("", ".checkpoint", ".checkpoint.gguf", ".compat", ".errors", ".inspect", ".planning", ".testing")


def entries() -> dict[str, Any]:
    """Return what the pages show: each entry's path, and the object that it names."""
    paths = [path for page in PAGES for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert len(paths) == len(set(paths)) > 40
    return {path: found(path) for path in paths}


def found(path: str) -> Any:
    """Import what a path names. A module is found even if a function of the same name hides it."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def test_every_entry_is_there() -> None:
    for path, value in entries().items():
        assert value is not None, path


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry(module: str) -> None:
    shown = entries()
    whole = [value for value in shown.values() if isinstance(value, ModuleType)]
    values = [
        *shown.values(),
        *(getattr(part, name) for part in whole for name in getattr(part, "__all__", [])),
    ]
    package = importlib.import_module(f"dynswap_ext{module}")
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, ModuleType | str):
            continue
        assert any(value is one for one in values), f"{package.__name__}.{name}"


def rows_under(heading: str) -> list[str]:
    """Return the names in the first column of the table under a heading of the overview."""
    section = OVERVIEW.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_every_option_of_install_has_a_row() -> None:
    assert rows_under("Options of `install`") == list(inspect.signature(dynswap_ext.install).parameters)[1:]


def test_every_environment_variable_is_named() -> None:
    """The page has the variables of config.py's docstring and of the build, in order, and no others."""
    assert config.__doc__ is not None
    at_run_time = re.findall(r"^(DYNSWAP_\w+) : ", config.__doc__, re.MULTILINE)
    page = (REFERENCE / "environment.md").read_text()
    rows = re.findall(r"^\| `(DYNSWAP_\w+)`", page, re.MULTILINE)
    assert len(at_run_time) == 5
    assert rows[: len(at_run_time)] == at_run_time
    builds = [*(ROOT / "build_backend").rglob("*.py"), ROOT / "setup.py", ROOT / "Makefile"]
    read = set(re.findall(r"DYNSWAP_\w+", "\n".join(path.read_text() for path in builds)))
    assert set(rows[len(at_run_time) :]) <= read


def test_every_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    help_text = capsys.readouterr().out.partition("COMMAND\n")[2].partition("options:")[0]
    commands = re.findall(r"^    (\w+) ", help_text, re.MULTILINE)
    page = (REFERENCE / "command_line.md").read_text()
    assert re.findall(r"^\| `dynswap (\w+)", page, re.MULTILINE) == commands
    assert len(commands) > 3
