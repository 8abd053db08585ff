"""A master changes while another weight of its layer is in use: the budget holds, the new value is used."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import Provider
from dynswap_ext import testing

WIDTH, LAYERS = 64, 6
FLOATS = [torch.float64, torch.bfloat16]


class Layer(nn.Module):
    """A layer that reads one of weight and bias, runs the functions in `between`, and reads the other."""

    def __init__(self, first: str = "weight") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.first = first
        self.between: list[Callable[[Layer], object]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.first == "weight":
            weight = self.weight
            for write in self.between:
                write(self)
            bias = self.bias
        else:
            bias = self.bias
            for write in self.between:
                write(self)
            weight = self.weight
        return F.linear(x, weight, bias)


def master(layer: nn.Module, name: str) -> Tensor:
    return layer.get_parameter(name)


def by_data(p: Tensor) -> None:
    p.data.mul_(0.5)


def by_numpy(p: Tensor) -> None:
    p.detach().numpy()[...] *= 0.5


def in_place(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def by_assignment(p: Tensor) -> None:
    p.data = p.data * 0.5


WRITES = [by_data, by_numpy, in_place, by_assignment]


def layers(first: str = "weight") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(first) for _ in range(LAYERS)))


def smallest_budget(provider: Provider, dtype: torch.dtype, model: nn.Module) -> int:
    """Return the smallest budget for weight and bias of a layer together."""
    own = sum(p.numel() * dtype.itemsize for p in model[0].parameters())  # type: ignore[index]
    return max(provider.smallest_budget(model, dtype=dtype), own)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("budget", ["smallest", "two layers", "half"])
@pytest.mark.parametrize("first", ["weight", "bias"])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_within_a_strict_budget(
    provider: Provider,
    write: Callable[[Tensor], None],
    first: str,
    budget: str,
    dtype: torch.dtype,
    prefetch: int,
) -> None:
    model, other = layers(first), "bias" if first == "weight" else "weight"
    smallest = smallest_budget(provider, dtype, model)
    size = {"smallest": smallest, "two layers": 2 * smallest, "half": LAYERS // 2 * smallest}[budget]
    handle = provider.install(model, dtype=dtype, budget=size, strict_budget=True, prefetch=prefetch)
    for layer in model:
        layer.between.append(lambda layer: write(master(layer, other)))
    x = provider.randn(3, WIDTH, dtype=dtype)
    with torch.no_grad():
        for _ in range(3):
            y = model(x)
            now = testing.moved(model, provider.device, dtype)  # as the masters are by now
            for layer in now:
                layer.between.clear()
            testing.assert_bit_equal(y, now(x), "output")
    stats = handle.stats()
    assert stats.overflow_bytes == 0
    assert stats.peak_bytes <= size


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("part", ["weight", "bias", "both"])
@pytest.mark.parametrize("share", [1, 3, LAYERS], ids=["streamed", "some resident", "resident"])
def test_written_between_forwards(
    provider: Provider, share: int, part: str, write: Callable[[Tensor], None]
) -> None:
    model = layers()
    budget = share * smallest_budget(provider, torch.float64, model)
    handle = provider.install(model, dtype=torch.float64, budget=budget, strict_budget=True)
    x = provider.randn(3, WIDTH)
    for _ in range(3):
        moved = testing.moved(model, provider.device, torch.float64)
        y, expected = model(x), moved(x)
        testing.assert_bit_equal(y.detach(), expected.detach(), "output")
        y.sum().backward()
        expected.sum().backward()
        for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            testing.assert_bit_equal(p.grad, q.grad.cpu().to(p.dtype), name)
            p.grad = None
        del y, expected
        for layer in model:
            for name in ("weight", "bias") if part == "both" else (part,):
                write(master(layer, name))
    assert handle.stats().overflow_bytes == 0
    assert handle.stats().peak_bytes <= budget


def test_who_has_the_outdated_weight_keeps_its_values(provider: Provider) -> None:
    """A handed-out tensor keeps its values if its master changes while the program holds it."""
    model = layers()
    budget = 3 * smallest_budget(provider, torch.float64, model)
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    layer = model[0]
    seen: list[tuple[Tensor, Tensor]] = []

    def look(layer: Layer) -> None:
        old = layer.bias
        seen.append((old, old.clone()))
        by_data(master(layer, "bias"))

    layer.between.append(look)
    x = provider.randn(3, WIDTH)
    with torch.no_grad():
        y = model(x)
        moved = testing.moved(model, provider.device, torch.float64)
        moved[0].between.clear()  # type: ignore[index,operator]
        testing.assert_bit_equal(y, moved(x), "output")
        ((held, before),) = seen
        testing.assert_bit_equal(held, before, "the tensor that is held")
        layer.between.clear()
        seen.clear()
        del held
        gc.collect()
        testing.assert_bit_equal(model(x), moved(x), "output, once it is let go")
    testing.assert_nothing_held(handle)
