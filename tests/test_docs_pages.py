"""README and pages of docs: their Python runs as it is, and prints what they show."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext.profile.recording import CAUSES
from pages import run_page
from sample_models import mlp
from sample_subclasses import ScaledInt8

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.register_buffer("positions", torch.arange(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.positions


def test_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", reason="one block takes transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).save_pretrained("mixtral")
    state = Model(8).state_dict()
    save_file(state, "model.safetensors")
    save_file({f"module.{name}": value for name, value in state.items()}, "wrapped.safetensors")
    average = {f"ema.{name}": value / 2 for name, value in state.items()}
    save_file({**state, **average}, "training.safetensors")
    names = {"Model": Model, "config": 8, "x": torch.randn(3, 8), "state": state, "ScaledInt8": ScaledInt8}
    with torch.serialization.safe_globals([ScaledInt8]):  # ends what the page allows for good
        assert run_page(DOCS / "checkpoints.md", names, capsys) > 8


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert run_page(DOCS / "inspect.md", {}, capsys) > 6
    assert Path("flow.png").stat().st_size > 0


def test_profiling(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNSWAP_PROVIDER", provider.backend)
    model, other = mlp(features=128), mlp(features=128)
    save_file(model.state_dict(), "model.safetensors")
    names: dict[str, Any] = {"model": model, "other": other, "torch": torch, "device": provider.device}
    names["x"] = provider.randn(2, 128)
    logger = logging.getLogger("dynswap_ext")
    before = logger.level
    try:
        assert run_page(DOCS / "profiling.md", names, capsys) > 5
    finally:
        logger.setLevel(before)
        dynswap_ext.uninstall([model, other])
    assert names["report"].diagnosis in capsys.readouterr().out.replace("\n", " ")
    assert json.loads(Path("both.json").read_text())["traceEvents"]
    assert {"trace.json.gz", "timeline.png"} <= {path.name for path in Path().iterdir()}


def test_the_causes_are_those_that_there_are() -> None:
    table = (
        (DOCS / "guides" / "troubleshooting.md").read_text().partition("| cause |")[2].partition("\n\n")[0]
    )
    rows = re.findall(r"^\| ([\w -]+?) \| ", table, re.MULTILINE)
    assert [row for row in rows if row != "---"] == list(CAUSES)


def test_readme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """README's Python runs, with the outputs of the plain models."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
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
    assert run_page(ROOT / "README.md", names, capsys) == 1
    assert torch.equal(names["y"], plain(names["x"]))
    tokens = torch.arange(6)[None]
    assert torch.equal(names["llm"](tokens).logits, written(tokens).logits)
    assert dynswap_ext.is_installed(names["llm"]) and dynswap_ext.is_installed(names["pipe"])
    assert not dynswap_ext.is_installed(names["model"])
    dynswap_ext.uninstall([names["llm"], names["pipe"]])
