"""The page about profiling: its Python runs as it stands."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dynswap_ext
from conftest import Provider
from sample_models import mlp

PAGE = Path(__file__).parents[1] / "docs" / "profiling.md"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs(
    provider: Provider,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNSWAP_PROVIDER", provider.backend)
    model, other = mlp(features=128), mlp(features=128)
    save_file(model.state_dict(), "model.safetensors")
    names: dict[str, Any] = {"model": model, "other": other, "torch": torch, "device": provider.device}
    names["x"] = provider.randn(2, 128)
    logger = logging.getLogger("dynswap_ext")
    before = logger.level
    text = PAGE.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python") > 5
    try:
        for block in blocks:
            line = text[: block.start("code")].count("\n")
            exec(compile("\n" * line + block["code"], str(PAGE), "exec"), names)
    finally:
        logger.setLevel(before)
        dynswap_ext.uninstall(model)
        dynswap_ext.uninstall(other)
    assert names["report"].diagnosis in capsys.readouterr().out.replace("\n", " ")
    assert json.loads(Path("both.json").read_text())["traceEvents"]
    assert {"trace.json.gz", "timeline.png"} <= {path.name for path in tmp_path.iterdir()}
