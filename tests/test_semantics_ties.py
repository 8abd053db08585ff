"""Tied masters are one weight."""

from __future__ import annotations

import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import TinyTransformer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("one", torch.ones(8))
        self.register_buffer("other", self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.one) + self.other


def test_both_names_give_one_tensor(provider: Provider) -> None:
    model = Tied()
    provider.pair(model)
    weight = model.first.weight
    assert model.second.weight is weight
    one = model.one
    assert model.other is one


def test_a_tied_weight_is_planned_and_counted_once(provider: Provider) -> None:
    model = Tied()
    _, handle = provider.pair(model)
    if not provider.native:  # there it counts what lies between them, too
        assert handle.stats().weight_bytes == (8 * 8 + 8) * 8
    kept = [model.first.weight, model.second.weight, model.one, model.other]
    assert handle.stats().bytes_moved == (8 * 8 + 8) * 4
    del kept


def test_outputs_and_gradients(provider: Provider) -> None:
    model = Tied()
    moved, _ = provider.pair(model)
    x = provider.randn(4, 8)
    y, expected = model(x), moved(x)
    testing.assert_bit_equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    grad = moved.first.weight.grad.float().cpu()
    torch.testing.assert_close(model.first.get_parameter("weight").grad, grad, rtol=1e-6, atol=1e-6)


def test_names_and_state_stay_as_they_were(provider: Provider) -> None:
    model = TinyTransformer()
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    masters = [id(p) for p in model.parameters()]
    provider.pair(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == masters


def test_a_write_through_one_name_shows_under_the_other(provider: Provider) -> None:
    model = Tied()
    provider.pair(model)
    model.one.mul_(3)
    assert model.other.tolist() == [3] * 8
    assert model.state_dict()["other"].tolist() == [3] * 8


def test_a_tie_broken_while_installed(provider: Provider) -> None:
    model = Tied()
    moved, _ = provider.pair(model)
    new = torch.randn(8, 8)
    model.second.weight = nn.Parameter(new.clone())
    moved.second.weight = nn.Parameter(new.to(provider.device, torch.float64))
    assert model.first.weight is not model.second.weight
    x = provider.randn(4, 8)
    testing.assert_bit_equal(model(x), moved(x))


def test_empty_masters_are_not_tied_to_each_other(provider: Provider) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.empty(0, 3))
    model.b = nn.Parameter(torch.empty(2, 0))
    provider.pair(model)
    assert model.a.shape == (0, 3)
    assert model.b.shape == (2, 0)
    assert model.a.dtype == torch.float64
