"""The smallest budget that an error names works where modules share weights and have others of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import BudgetError, planning, testing

WORDS, WIDTH = 96, 64


class Decoder(nn.Module):
    """As BERT's: the head has the bias, and so has the decoder, whose matrix is the embedding's."""

    def __init__(self, own_bias: bool) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, WORDS)
        if not own_bias:
            self.bias = nn.Parameter(torch.randn(WORDS))
            self.decoder.bias = self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.decoder(x)
        return logits


class Language(nn.Module):
    """An embedding, layers, and decoders with its matrix."""

    def __init__(self, *, own_bias: bool = True, decoders: int = 1, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.decoders = nn.ModuleList(Decoder(own_bias) for _ in range(decoders))
        for each in self.decoders:
            each.decoder.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.words(x)
        for layer in self.layers:
            inner = torch.tanh(layer(inner))
        return torch.stack([decoder(inner) for decoder in self.decoders])


class Layers(nn.Module):
    """Layers of one width, some of whose weights are one."""

    def __init__(self, count: int, tie: Callable[[nn.ModuleList], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        tie(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.one_hot(x, WORDS)[..., :WIDTH].to(self.layers[0].weight.dtype)
        for layer in self.layers:
            inner = torch.tanh(layer(inner))
        return inner


def _matrix_then_bias(layers: nn.ModuleList) -> None:
    """The first two share the matrix, the second and third the bias."""
    layers[1].weight = layers[0].weight
    layers[2].bias = layers[1].bias


def _one_bias(layers: nn.ModuleList) -> None:
    for layer in layers:
        layer.bias = layers[0].bias


def _pairs(layers: nn.ModuleList) -> None:
    """Each matrix is of two layers that are far apart."""
    half = len(layers) // 2
    for first, second in zip(layers[:half], layers[half:], strict=True):
        second.weight = first.weight


class Attentions(nn.Module):
    """What goes into two attentions is projected alike."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(4))
        self.attentions[2].in_proj_weight = self.attentions[0].in_proj_weight
        self.attentions[3].out_proj.weight = self.attentions[1].out_proj.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.one_hot(x, WORDS)[..., :WIDTH].to(self.attentions[0].in_proj_weight.dtype)
        for attention in self.attentions:
            inner = attention(inner, inner, inner, need_weights=False)[0]
        return inner


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a decoder with a bias of its own": Language,
    "a decoder whose bias is the head's": lambda: Language(own_bias=False),
    "several decoders": lambda: Language(decoders=5),
    "a chain": lambda: Layers(5, _matrix_then_bias),
    "one bias in all layers": lambda: Layers(8, _one_bias),
    "pairs of layers": lambda: Layers(8, _pairs),
    "attentions": Attentions,
}


def smallest_budget(provider: Provider, model: nn.Module, dtype: torch.dtype) -> int:
    with pytest.raises(BudgetError) as raised:
        provider.install(model, dtype=dtype, budget=1)
    found = raised.value.smallest_bytes
    assert found is not None
    return found


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_it_works(provider: Provider, name: str, prefetch: int) -> None:
    torch.manual_seed(0)
    model, dtype = MODELS[name](), torch.float64
    smallest = smallest_budget(provider, model, dtype)
    with pytest.raises(BudgetError):
        provider.install(model, dtype=dtype, budget=smallest - 1)
    moved, handle = provider.pair(model, dtype, budget=smallest, prefetch=prefetch)
    x = torch.arange(12).view(2, 6).to(provider.device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for each in (model, moved):
                each(x).sum().backward()
            with torch.no_grad():
                testing.assert_bit_equal(model(x), moved(x), "output")
    for expected, parameter in zip(moved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad.to(parameter), rtol=1e-4, atol=1e-5)
    stats = handle.stats()
    assert stats.overflow_bytes == 0
    assert stats.peak_bytes <= smallest


def test_it_is_no_more_than_calls_need(provider: Provider) -> None:
    """Layers that share a bias do not have to be on the device together."""
    smallest = smallest_budget(provider, Layers(8, _one_bias), torch.float64)
    layer = (WIDTH * WIDTH + WIDTH) * 8
    assert smallest <= layer + 2 * 4096


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_names_it_too(provider: Provider, name: str) -> None:
    if not provider.native:
        pytest.skip("a plan is of the engine")
    model, on_cpu = MODELS[name](), provider.device.type == "cpu"
    outline = planning.outline_of_model(model, dtype=torch.float64, disk=on_cpu)
    weights = planning.timed(outline.weights, planning.ASSUMED, rows=1)
    plan = planning.plan(weights, bandwidth=1e9, backend="host" if on_cpu else "cuda")
    assert plan.smallest == smallest_budget(provider, model, torch.float64)
