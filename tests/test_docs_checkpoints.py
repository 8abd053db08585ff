"""The page about checkpoints: its Python runs as it stands, and prints what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pages import run_page
from sample_subclasses import ScaledInt8

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.register_buffer("positions", torch.arange(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.positions


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the page takes for granted."""
    transformers = pytest.importorskip("transformers", reason="one block takes transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).save_pretrained("mixtral")
    state = Model(8).state_dict()
    save_file(state, "model.safetensors")
    save_file({f"module.{name}": value for name, value in state.items()}, "wrapped.safetensors")
    average = {f"ema.{name}": value / 2 for name, value in state.items()}
    save_file({**state, **average}, "training.safetensors")
    with torch.serialization.safe_globals([ScaledInt8]):  # so that it ends with the test
        yield {"Model": Model, "config": 8, "x": torch.randn(3, 8), "state": state, "ScaledInt8": ScaledInt8}


def test_every_block_runs(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_page(PAGE, names, capsys) > 8
