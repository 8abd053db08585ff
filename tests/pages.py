"""Runs the Python of a page of the documentation, and compares what it prints with the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(page: Path, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> int:
    """Run the page's blocks of Python in order; return how many there are.

    A block of text has to be what was printed since the block of text before it.
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
