"""Errors of the classic installer that its replacement must not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from dynswap_ext.compat import DynamicSwapInstaller
from test_compat import install


class Attentions(nn.Module):
    """Layers that are larger than what is prefetched, two groups ahead."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.MultiheadAttention(512, 2, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_attention_moves_each_weight_once(provider: Provider, training: bool) -> None:
    model = Attentions().train(training)
    moved = testing.moved(model, provider.device, torch.float64)
    handle = install(provider, model, dtype=torch.float64)
    x = provider.randn(1, 2, 512)
    with torch.no_grad():
        model(x)
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 0 < handle.stats().bytes_moved <= size


def test_a_lazy_module_turns_real(provider: Provider) -> None:
    model: Any = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2))
    install(provider, model, dtype=torch.float64)
    model(provider.randn(2, 16))
    assert type(model[0]).__name__ == "DynamicSwap_Linear"
    assert model[0].forge_backup_original_class is nn.Linear
    assert model[0].weight.dtype == torch.float64
    DynamicSwapInstaller.uninstall_model(model)
    assert type(model[0]) is nn.Linear and model[0].weight.shape == (8, 16)


class Language(nn.Module):
    """Input and output embeddings with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_an_embedding_module_is_replaced(provider: Provider) -> None:
    model: Any = Language()
    install(provider, model, dtype=torch.float64)
    model.embed = nn.Embedding.from_pretrained(model.embed.weight.detach().repeat(2, 1), freeze=False)
    assert type(model.embed).__name__ == "DynamicSwap_Embedding"  # it joins the install
    model.head.weight = model.embed.weight
    assert model(torch.arange(22, device=provider.device)).shape == (22, 22)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]
