"""The reference has every option of `install` and every environment variable, and no others."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import dynswap_ext
from dynswap_ext import config

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"


def rows(heading: str) -> list[str]:
    """The names in the first column of the table under a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_options() -> None:
    parameters = list(inspect.signature(dynswap_ext.install).parameters)
    assert rows("Options of `install`") == parameters[1:]


def test_environment_variables() -> None:
    assert config.__doc__ is not None
    read = re.findall(r"^(DYNSWAP_\w+) :", config.__doc__, re.MULTILINE)
    assert len(read) == 3
    assert [name for name in rows("Environment variables") if name.startswith("DYNSWAP_")] == read
