"""The page about looking into models: its Python runs as it stands, and prints what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import run_page

PAGE = Path(__file__).parents[1] / "docs" / "inspect.md"


def test_every_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE, {}, capsys) > 6
    assert (tmp_path / "flow.png").stat().st_size > 0
