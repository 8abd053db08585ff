"""The smallest budget that an error names works, whatever a call needs at once and whatever is shared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import BudgetError, planning, testing

WORDS, WIDTH = 96, 64
#: The most bytes that alignment adds to a weight.
ALIGNED = 4096


# Modules that share some weights ---------------------------------------------------------------------------


class Decoder(nn.Module):
    """A decoder like BERT's: its matrix is the embedding's, and the head may share its bias."""

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
    """An embedding, layers, and decoders that use its matrix."""

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
    """Layers of one width, some of whose weights are tied."""

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
    """Tie the matrices of the first two layers, and the biases of the second and third."""
    layers[1].weight = layers[0].weight
    layers[2].bias = layers[1].bias


def _one_bias(layers: nn.ModuleList) -> None:
    for layer in layers:
        layer.bias = layers[0].bias


def _pairs(layers: nn.ModuleList) -> None:
    """Tie the matrices of pairs of layers that are far apart."""
    half = len(layers) // 2
    for first, second in zip(layers[:half], layers[half:], strict=True):
        second.weight = first.weight


class Attentions(nn.Module):
    """Attention modules, of which two share the input projection and two the output projection."""

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


TIED: dict[str, Callable[[], nn.Module]] = {
    "a decoder with a bias of its own": Language,
    "a decoder whose bias is the head's": lambda: Language(own_bias=False),
    "several decoders": lambda: Language(decoders=5),
    "a chain": lambda: Layers(5, _matrix_then_bias),
    "one bias in all layers": lambda: Layers(8, _one_bias),
    "pairs of layers": lambda: Layers(8, _pairs),
    "attentions": Attentions,
}


# Modules whose call needs several weights at once ----------------------------------------------------------

#: Modules whose call needs several weights at once, and the call.
AT_ONCE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], object]]] = {
    "linear with a wide bias": (lambda: nn.Linear(1, 5000), lambda m, x: m(x[..., :1])),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, 8), lambda m, x: m(x, x)),
    "convolution": (lambda: nn.Conv1d(4, 4096, 3), lambda m, x: m(x[..., :4].transpose(1, 2))),
    "layer norm": (lambda: nn.LayerNorm([3, WIDTH]), lambda m, x: m(x)),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH), lambda m, x: m(x)),
    "lstm of two layers, both ways": (
        lambda: nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True, proj_size=7),
        lambda m, x: m(x),
    ),
    "gru": (lambda: nn.GRU(WIDTH, WIDTH, 2), lambda m, x: m(x)),
    "lstm cell": (lambda: nn.LSTMCell(WIDTH, WIDTH), lambda m, x: m(x[0])),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 4), lambda m, x: m(x, x, x)),
    "attention over other keys": (
        lambda: nn.MultiheadAttention(WIDTH, 4, kdim=WIDTH // 2, vdim=WIDTH // 2),
        lambda m, x: m(x, x[..., : WIDTH // 2], x[..., : WIDTH // 2]),
    ),
}


class Several(nn.Module):
    """Three modules of one kind in a row, so that some are streamed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.run = AT_ONCE[kind]
        self.parts = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[object]:
        return [self.run(part, x) for part in self.parts]


class OneByOne(nn.Module):
    """Reads its weights one after the other, and needs no two of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(5))
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.first
        x = x @ self.second
        for i in range(5):
            x = x @ self.weights[i]
        return x


def container_with_a_buffer() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model.register_buffer("mean", torch.zeros(WIDTH))
    return model


#: Modules, and the bytes in float64 that a call needs at once, without alignment.
ALONE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one by one": (OneByOne, WIDTH * WIDTH * 8),
    "a container with a buffer": (container_with_a_buffer, (WIDTH * WIDTH + WIDTH) * 8),
    "one bias in all layers": (TIED["one bias in all layers"], (WIDTH * WIDTH + WIDTH) * 8),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **TIED,
    **{kind: partial(Several, kind) for kind in AT_ONCE},
    **{kind: make for kind, (make, _) in ALONE.items()},
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in (*TIED, *ALONE)),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind in AT_ONCE
            for dtype in (torch.float64, torch.bfloat16)
        ),
    ],
)
def test_it_works(provider: Provider, name: str, dtype: torch.dtype, prefetch: int) -> None:
    torch.manual_seed(0)
    model, trains = MODELS[name](), name in TIED
    smallest = provider.smallest_budget(model, dtype=dtype)
    with pytest.raises(BudgetError):
        provider.install(model, dtype=dtype, budget=smallest - 1)
    moved, handle = provider.pair(model, dtype, budget=smallest, strict_budget=True, prefetch=prefetch)
    tokens = torch.arange(12).view(2, 6).to(provider.device)
    x = tokens if name in TIED else provider.randn(5, 3, WIDTH, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for each in (model, moved) if trains else ():
                each(x).sum().backward()
            with torch.no_grad():
                testing.assert_bit_equal(model(x), moved(x), "output")
    for expected, parameter in zip(moved.parameters(), model.parameters(), strict=True):
        if trains:
            torch.testing.assert_close(parameter.grad, expected.grad.to(parameter), rtol=1e-4, atol=1e-5)
    stats = handle.stats()
    assert stats.overflow_bytes == 0 and stats.bytes_moved > 0
    assert stats.peak_bytes <= smallest


@pytest.mark.parametrize("name", ALONE)
def test_it_is_no_more_than_calls_need(provider: Provider, name: str) -> None:
    """Layers that share a bias do not have to be on the device together."""
    make, needed = ALONE[name]
    assert provider.smallest_budget(make(), dtype=torch.float64) <= needed + 2 * ALIGNED


@pytest.mark.parametrize("name", TIED)
def test_a_plan_names_it_too(provider: Provider, name: str) -> None:
    if not provider.native:
        pytest.skip("a plan is of the engine")
    model, on_cpu = TIED[name](), provider.device.type == "cpu"
    outline = planning.outline_of_model(model, dtype=torch.float64, disk=on_cpu)
    weights = planning.timed(outline.weights, planning.ASSUMED, rows=1)
    plan = planning.plan(weights, bandwidth=1e9, backend="host" if on_cpu else "cuda")
    assert plan.smallest == provider.smallest_budget(model, dtype=torch.float64)
