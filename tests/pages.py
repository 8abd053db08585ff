"""Runs a page of the documentation: its Python as it stands, and holds what it prints against the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(page: Path, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> int:
    """Run the blocks of Python one after the other; those of text are what was printed since the last one.

    Returns how many blocks of Python there are.
    """
    text = page.read_text()
    ran = 0
    for block in BLOCK.finditer(text):
        line = text[: block.start("code")].count("\n")
        if block["kind"] == "python":
            ran += 1
            exec(compile("\n" * line + block["code"], str(page), "exec"), names)
        elif block["kind"] == "text":
            assert capsys.readouterr().out == block["code"], f"the output at line {line} is another one"
    assert ran == text.count("```python")
    return ran
