"""The page about stability lists the public names, variables and commands that exist, and no others."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from dynswap_ext import cli
from test_docs_reference import PUBLIC

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "stability.md").read_text()
sys.path.insert(0, str(ROOT / "build_backend"))

from dynswap_build.supported import TORCHES  # noqa: E402


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_public_names_are_those_of_the_modules() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", section("Public names"), re.MULTILINE)
    listed = {module: re.findall(r"`(\w+)`", names) for module, names in rows}
    modules = [importlib.import_module(f"dynswap_ext{name}") for name in PUBLIC]
    assert listed == {module.__name__: sorted(module.__all__) for module in modules}


def test_the_environment_variables_are_those_that_are_read() -> None:
    when_used, when_built = section("Environment variables").strip().splitlines()[-2:]
    for line, folder in ((when_used, "dynswap_ext"), (when_built, "build_backend")):
        sources = "\n".join(path.read_text() for path in (ROOT / folder).rglob("*.py"))
        read = re.findall(r"(?:environ\.get|_environment)\(\"(DYNSWAP_\w+)\"", sources)
        assert set(re.findall(r"`(DYNSWAP_\w+)`", line)) == set(read) != set()


def test_the_commands_are_those_of_the_command_line() -> None:
    (commands,) = [action.choices for action in cli._parser()._actions if action.choices]
    listed = re.findall(r"`(?:dynswap )?(\w+)`", section("Command line").partition(", their options")[0])
    assert set(listed) == set(commands or ())


def test_the_versions_are_those_that_a_build_takes() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    ((low, above),) = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', project, re.MULTILINE)
    first, last = (".".join(map(str, each)) for each in (TORCHES[0], TORCHES[-1]))
    said = f"CPython 3.{low} to 3.{int(above) - 1} and torch {first} to {last}."
    assert section("Pythons and torches").strip().startswith(said)
