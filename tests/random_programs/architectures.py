"""Small models for random programs, which together use every kind of weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sample_models import Recurrent, TinyTransformer

#: Weights of a narrow model are copied together; those of a wide one are larger than 64 KiB each.
NARROW, WIDE = 24, 160
#: Rows at which a growing buffer starts again with one.
LONGEST = 4


class Extras(nn.Module):
    """A base with a parameter and a buffer that programs add, replace and delete."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain: nn.Parameter | None = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("shift", torch.randn(width))

    def finish(self, y: Tensor) -> Tensor:
        gain, shift = getattr(self, "gain", None), getattr(self, "shift", None)
        y = y if gain is None else y * gain
        return y if shift is None else y + shift


class TiedLayers(Extras):
    """Square layers, of which the first and the last share a weight."""

    def __init__(self, width: int = NARROW, layers: int = 5) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.finish(x)


class Layers(Extras):
    """Square layers, each used once."""

    def __init__(self, width: int = NARROW, layers: int = 5) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.finish(x)


class ConvNorms(Extras):
    """Convolutions, one of them grouped, and batch norms, which write buffers without a new version."""

    def __init__(self, width: int = NARROW) -> None:
        super().__init__(width)
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, momentum=0.3) for _ in range(2))
        self.grouped = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.stem(x)))
        x = torch.relu(self.norms[1](self.grouped(x)))
        return self.finish(self.head(x.mean(dim=(2, 3))))


class Rows(Extras):
    """An embedding of which few rows are used, attention, a layer norm and dropout."""

    def __init__(self, width: int = NARROW, sparse: bool = False) -> None:
        super().__init__(width)
        self.embed = nn.Embedding(40, width, padding_idx=3, sparse=sparse)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.finish(self.head(x))


class SparseRows(Rows):
    def __init__(self, width: int = NARROW) -> None:
        super().__init__(width, sparse=True)


class Remembers(Extras):
    """Buffers that a forward writes: a counter, a mean, one assigned, one written in part, one that grows."""

    def __init__(self, width: int = NARROW) -> None:
        super().__init__(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("last", torch.zeros(width), persistent=False)
        self.register_buffer("ring", torch.zeros(LONGEST, width))
        self.register_buffer("cache", torch.zeros(1, width))

    def forward(self, x: Tensor) -> Tensor:
        # Writes only values that every dtype can represent, as buffers may be rounded to another dtype.
        self.count += 1
        mean, ring, cache = self.mean, self.ring, self.cache
        y = torch.tanh(self.first(x)) + self.last
        seen = y.detach().mean(0).bfloat16().to(y.dtype)
        mean.neg_().copy_(seen)
        ring[int(self.count) % LONGEST] = seen
        self.last = seen
        cache = torch.cat([cache if len(cache) < LONGEST else cache[:1], seen[None]])
        self.cache = cache
        return self.finish(self.second(y - mean + ring.mean(0) + cache.sum(0)))


class Shared(Extras):
    """A module that is used twice under two names, lists, a parametrization, a weight read from outside."""

    def __init__(self, width: int = NARROW) -> None:
        super().__init__(width)
        self.twice = nn.Linear(width, width)
        self.again = self.twice
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(width)) for _ in range(2)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(width))})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(x)) * self.scales[0]
        x = torch.tanh(self.normed(x)) * self.scales[1]
        x = self.again(x) + self.named["bias"]
        return self.finish(F.linear(x, self.normed.weight))


class FusedExperts(Extras):
    """Experts that are the slices of one parameter; the input chooses two for each token."""

    def __init__(self, width: int = NARROW, experts: int = 8) -> None:
        super().__init__(width)
        self.num_experts = experts
        self.first = nn.Linear(width, width)
        self.up = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.up_bias = nn.Parameter(torch.randn(experts, width))
        self.down = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        chosen = x[:, : self.num_experts].topk(2).indices
        out = torch.zeros_like(y)
        for index in chosen.unique():
            tokens = (chosen == index).any(-1).nonzero()[:, 0]
            inner = torch.tanh(F.linear(y[tokens], self.up[index], self.up_bias[index]))
            out = out.index_add(0, tokens, F.linear(inner, self.down[index]))
        return self.finish(out)


class ListedExperts(Extras):
    """Experts that are modules in a list; the input chooses two for each token."""

    def __init__(self, width: int = NARROW, experts: int = 6) -> None:
        super().__init__(width)
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        chosen = x[:, : len(self.experts)].topk(2).indices
        out = torch.zeros_like(y)
        for index in chosen.unique().tolist():
            tokens = (chosen == index).any(-1).nonzero()[:, 0]
            out = out.index_add(0, tokens, self.experts[index](y[tokens]))
        return self.finish(out)


def _vectors(seed: int, width: int) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _images(seed: int, _: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, 6, 6, generator=generator, dtype=torch.float64)


def _tokens(seed: int, _: int) -> Tensor:
    return torch.randint(0, 29, (2, 6), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Architecture:
    """How to make a model and its inputs, and the properties that programs have to know.

    Attributes
    ----------
    several
        A weight has several uses, so the order in which its gradients are summed is not fixed.
    twice
        A module has two names. (torch's own functional_call leaves its new tensor in such a module.)
    writes
        The forward writes buffers, in eval mode too.
    norms
        It has running statistics.
    sparse
        It has sparse gradients.
    chooses
        The input chooses the weights that a call uses, so they may still be on the device from the last call.
    widths
        The widths that it can be made in.
    """

    name: str
    make: Callable[[int], nn.Module]
    inputs: Callable[[int, int], Tensor]
    several: bool = False
    twice: bool = False
    writes: bool = False
    norms: bool = False
    sparse: bool = False
    chooses: bool = False
    widths: tuple[int, ...] = (NARROW,)

    def input(self, seed: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        x = self.inputs(seed, width)
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("Layers", Layers, _vectors, widths=(NARROW, WIDE)),
        Architecture("TiedLayers", TiedLayers, _vectors, several=True, widths=(NARROW, WIDE)),
        Architecture("ConvNorms", ConvNorms, _images, norms=True),
        Architecture("Rows", Rows, _tokens, widths=(NARROW, WIDE)),
        Architecture("SparseRows", SparseRows, _tokens, sparse=True, widths=(NARROW, WIDE)),
        Architecture("TinyTransformer", lambda _: TinyTransformer(), _tokens, several=True),
        Architecture("Remembers", Remembers, _vectors, writes=True, widths=(NARROW, WIDE)),
        Architecture("Shared", Shared, _vectors, several=True, twice=True, widths=(NARROW, WIDE)),
        Architecture("FusedExperts", FusedExperts, _vectors, chooses=True, widths=(NARROW, WIDE)),
        Architecture("ListedExperts", ListedExperts, _vectors, chooses=True, widths=(NARROW, WIDE)),
        Architecture("Recurrent", lambda _: Recurrent(), lambda seed, _: _vectors(seed, 6)[None]),
    )
}


def make(name: str, width: int, seed: int) -> nn.Module:
    """Return the model of an architecture, with weights drawn from the seed."""
    torch.manual_seed(seed)
    return ARCHITECTURES[name].make(width)


def total(output: Any) -> Tensor:
    """Return a scalar loss whose gradient depends on the output."""
    return output.square().mean()
