"""The page for the first ten minutes has no links, and its code prints what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dynswap_ext import cli
from pages import BLOCK

PAGE = Path(__file__).parents[1] / "docs" / "first_ten_minutes.md"


def same_on_every_machine(shown: str) -> str:
    """Return the part of an output that depends neither on times nor on the machine."""
    if shown.startswith("dynswap-ext "):  # of `dynswap info`, the names of facts that are always there
        return "\n".join(re.findall(r"^(\S[\w -]*?)  +\S", shown, re.MULTILINE)[:9])
    report = re.search(r"^native/host on .*?(?=^A group of weights)", shown, re.DOTALL | re.MULTILINE)
    if report is None:
        return shown
    rows = [re.split(r"\s{2,}", line.strip()) for line in report[0].splitlines() if "─" not in line]
    return "\n".join(" | ".join(row[1:6]) for row in rows)  # without names, whose length varies


def test_it_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("dynswap_ext._C", reason="the extension is not built (make build)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "130")
    names: dict[str, Any] = {}
    compared = 0
    for block in BLOCK.finditer(PAGE.read_text()):
        if block["kind"] == "python":
            exec(compile(block["code"], str(PAGE), "exec"), names)
        elif block["code"].startswith("dynswap "):
            assert cli.main(shlex.split(block["code"])[1:]) == 0
        elif block["kind"] == "text":
            compared += 1
            assert same_on_every_machine(capsys.readouterr().out) == same_on_every_machine(block["code"])
    assert compared > 7


def test_it_sends_nobody_elsewhere() -> None:
    assert "](" not in PAGE.read_text()
