"""README: its example runs as it is, with the outputs of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dynswap_ext
from pages import run_page

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    save_file(plain.state_dict(), "model.safetensors")
    names: dict[str, Any] = {"config": 8, "x": torch.randn(2, 8)}
    names["Model"] = lambda width: nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 8))
    install = dynswap_ext.install
    monkeypatch.setattr(dynswap_ext, "install", lambda *args, **more: install(*args, device="cpu", **more))
    assert run_page(README, names, capsys) == 1
    assert torch.equal(names["y"], plain(names["x"]))
