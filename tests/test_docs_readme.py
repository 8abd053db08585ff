"""README: its example runs as it is, with the outputs of the plain models."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from pages import run_page

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    written = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    written.save_pretrained("llm")
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    names: dict[str, Any] = {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "name": "llm",
        "pipe": SimpleNamespace(components={"text_encoder": nn.Linear(8, 8), "tokenizer": None}),
        "model": copy.deepcopy(plain),
        "x": torch.randn(2, 8),
    }
    install = dynswap_ext.install
    monkeypatch.setattr(dynswap_ext, "install", lambda *args, **more: install(*args, device="cpu", **more))
    assert run_page(README, names, capsys) == 1
    assert torch.equal(names["y"], plain(names["x"]))
    tokens = torch.arange(6)[None]
    assert torch.equal(names["llm"](tokens).logits, written(tokens).logits)
    assert dynswap_ext.is_installed(names["llm"]) and dynswap_ext.is_installed(names["pipe"])
    assert not dynswap_ext.is_installed(names["model"])
    dynswap_ext.uninstall([names["llm"], names["pipe"]])
