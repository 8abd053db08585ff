"""Invariant 7: a handed-out tensor is part of the autograd graph of its master."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp


def assert_gradients_as_moved(model: nn.Module, moved: nn.Module) -> None:
    """Assert that masters have the moved model's gradients, in their own dtype and on their device."""
    expected = dict(moved.named_parameters())
    for name, p in model.named_parameters():
        grad = expected[name].grad
        assert grad is not None
        testing.assert_bit_equal(p.grad, grad.to(p.device, p.dtype), f"gradient of {name}")


class UsedTwice(nn.Module):
    """Uses two of its weights again at the end, when they have left the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0], self.layers[2]):
            x = x + layer(x).tanh()
        return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("budget", [None, "12KiB", "1GiB"])
def test_a_weight_that_is_used_twice(provider: Provider, budget: str | None, dtype: torch.dtype) -> None:
    """Gradients of a weight's uses are added on the device and in its dtype, as in the moved model."""
    model = UsedTwice()
    budget = "24KiB" if budget == "12KiB" and dtype is torch.float64 else budget
    moved, _ = provider.pair(model, dtype, budget=budget)
    for step in range(3):
        x = provider.randn(4, 32, dtype=dtype, seed=step)
        for each in (model, moved):
            each.zero_grad()
            each(x).float().square().mean().backward()
        assert_gradients_as_moved(model, moved)
        graphs = [(each, each(x).sum(), each(2 * x).sum()) for each in (model, moved)]
        for number in (2, 1):  # each of two graphs has its own gradients
            for graph in graphs:
                graph[0].zero_grad()
                graph[number].backward()
            assert_gradients_as_moved(model, moved)


def test_double_backward(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    for m in (model, moved):
        x = provider.randn(4, 16).requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad.float().cpu(), rtol=1e-5, atol=1e-6, msg=name)


def test_gradient_through_a_view_kept_alone(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    row = model[0].weight[3]
    row.sum().backward()
    del row
    grad = model.get_parameter("0.weight").grad
    assert grad.sum() == 16
    assert grad[3].sum() == 16


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("read", ["before", "after"])
def test_gradients_that_are_asked_for_by_what_is_handed_out(
    provider: Provider, budget: str | None, read: str
) -> None:
    if not provider.native and read == "after":
        pytest.skip("pure Python: each tensor is a result of its own")
    if not provider.native and budget is None:
        pytest.skip("pure Python: each tensor is a result of its own")
    model = UsedTwice()
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(4, 32)
    before = model.layers[0].weight if read == "before" else None
    y = model(x).square().mean()
    weight = before if before is not None else model.layers[0].weight
    (found,) = torch.autograd.grad(y, [weight])
    (expected,) = torch.autograd.grad(moved(x).square().mean(), [moved.layers[0].weight])
    testing.assert_bit_equal(found, expected)
