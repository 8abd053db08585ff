"""Small models that together use every kind of weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def mlp(features: int = 16, layers: int = 3) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(features, features), nn.GELU()]
    return nn.Sequential(*parts)


class ConvNet(nn.Module):
    """Convolutions and a batch norm, whose floating and integer buffers are written in training."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(x.mean(dim=(2, 3)))


class TinyTransformer(nn.Module):
    """A transformer with an embedding tied to the output, and with a mask and positions as buffers."""

    def __init__(self, vocabulary: int = 29, width: int = 16, layers: int = 2, length: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embed.weight
        self.register_buffer("positions", torch.randn(length, width))
        self.register_buffer("order", torch.arange(length), persistent=False)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions[self.order]
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.output(x)


class Tied(nn.Module):
    """An embedding and a linear layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight


class Recurrent(nn.Module):
    """An LSTM and a GRU. torch also keeps the weights of such modules in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.gru = nn.GRU(8, 4, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        return self.gru(x)[0]


Trace = list[tuple[type, list[str], dict[str, Any]]]


def trace(model: nn.Module) -> Trace:
    """Return the class, and the keys and values of the `__dict__`, of every module."""
    found = []
    for module in model.modules():
        held = {key: value for key, value in module.__dict__.items() if not isinstance(value, dict)}
        for name in ("_parameters", "_buffers", "_modules"):
            held.update({f"{name}.{key}": id(value) for key, value in module.__dict__[name].items()})
        found.append((type(module), list(module.__dict__), held))
    return found
