"""Models that tests save and load, and a way to save them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

kinds = pytest.mark.parametrize("kind", ["safetensors", "torch"])


class Net(nn.Module):
    """Two layers, a saved buffer, a buffer that no checkpoint holds, and a tensor kept as an attribute."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale: torch.Tensor
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 4)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.offset = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.norm(self.first(x)).relu())
        return hidden * self.scale + self.offset


class SharedWeight(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


def saved(model: nn.Module, path: Path, kind: str = "safetensors") -> Path:
    """Save a model's state as the format's library does, and return the path."""
    if kind == "safetensors":
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    else:
        torch.save(model.state_dict(), path)
    return path
