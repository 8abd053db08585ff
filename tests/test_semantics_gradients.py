"""Invariant 7: a handed-out tensor is part of the autograd graph of its master."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import Provider, dense_alone_is_pretended
from dynswap_ext import testing
from sample_models import ConvNet, Recurrent, TinyTransformer, mlp

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Provider], torch.Tensor]]] = {
    "mlp": (mlp, lambda p: p.randn(4, 16)),
    "convnet": (ConvNet, lambda p: p.randn(4, 3, 8, 8)),
    "recurrent": (Recurrent, lambda p: p.randn(3, 5, 6)),
}


def assert_gradients_as_moved(model: nn.Module, moved: nn.Module) -> None:
    """The moved model's gradients, in the master's dtype and on its device."""
    expected = dict(moved.named_parameters())
    for name, p in model.named_parameters():
        grad = expected[name].grad
        assert grad is not None
        testing.assert_bit_equal(p.grad, grad.to(p.device, p.dtype), f"gradient of {name}")


@pytest.mark.parametrize("case", CASES)
def test_gradients_reach_masters(provider: Provider, case: str) -> None:
    make, inputs = CASES[case]
    model = make()
    moved, handle = provider.pair(model)
    x = inputs(provider)
    model(x).square().sum().backward()
    moved(x).square().sum().backward()
    assert_gradients_as_moved(model, moved)
    assert handle.stats().bytes_moved > 0


def test_gradients_of_a_tied_transformer(provider: Provider) -> None:
    model = TinyTransformer()
    moved, _ = provider.pair(model)
    tokens = torch.arange(12).reshape(2, 6).to(provider.device)
    model(tokens).square().sum().backward()
    moved(tokens).square().sum().backward()
    assert_gradients_as_moved(model, moved)


class UsedTwice(nn.Module):
    """The first layer's weight is used again at the end, when it has been streamed out."""

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
    """Its uses' gradients are added on the device and in its dtype, as in the moved model, wherever it is."""
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
        for number in (2, 1):  # of two graphs at a time, each has its own gradients
            for graph in graphs:
                graph[0].zero_grad()
                graph[number].backward()
            assert_gradients_as_moved(model, moved)


def test_training_steps_equal_the_plain_model(provider: Provider) -> None:
    model = mlp()
    plain = testing.moved(model, provider.device)
    handle = provider.install(model, dtype=torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for step in range(4):
        x = provider.randn(8, 16, seed=step)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x.to(torch.float64 if m is model else torch.float32)).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-4, atol=1e-5, msg=name)
    # Each step moved every master again, as the optimizer had changed it.
    assert handle.stats().bytes_moved >= 4 * sum(p.numel() * p.element_size() for p in model.parameters())


def test_gradients_accumulate(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    x = provider.randn(4, 16)
    model(x).sum().backward()
    once = model.get_parameter("0.weight").grad.clone()
    model(x).sum().backward()
    testing.assert_bit_equal(model._modules["0"]._parameters["weight"].grad, once * 2)


def test_two_graphs_at_a_time(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    xs = [provider.randn(4, 16, seed=i) for i in range(2)]
    losses = [[m(x).square().sum() for x in xs] for m in (model, moved)]
    for loss in (*losses[0], *losses[1]):
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad.float().cpu(), rtol=1e-6, atol=1e-6, msg=name)


def test_frozen_masters_get_no_gradient(provider: Provider) -> None:
    model = mlp(layers=2)
    model[0].requires_grad_(False)
    provider.pair(model)
    assert not model[0].weight.requires_grad
    assert model[2].weight.requires_grad
    model(provider.randn(2, 16)).sum().backward()
    assert model.get_parameter("0.weight").grad is None
    assert model.get_parameter("2.weight").grad is not None


def test_requires_grad_follows_the_master(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model, budget="1GiB")
    assert model[0].weight.requires_grad
    model.requires_grad_(False)
    assert not model[0].weight.requires_grad
    model.requires_grad_(True)
    assert model[0].weight.requires_grad
    model(provider.randn(2, 16)).sum().backward()
    assert model.get_parameter("0.weight").grad is not None


def test_activation_checkpointing(provider: Provider) -> None:
    model = mlp(layers=3)
    moved, _ = provider.pair(model)
    x = provider.randn(4, 16).requires_grad_()
    y = x.detach().clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    moved(y).square().sum().backward()
    assert_gradients_as_moved(model, moved)
    testing.assert_bit_equal(x.grad, y.grad, "gradient of the input")


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


def test_a_sparse_gradient_stays_sparse(provider: Provider) -> None:
    dense_alone_is_pretended("sparse")
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    provider.pair(model)
    model(torch.tensor([1, 3], device=provider.device)).sum().backward()
    grad = model.get_parameter("0.weight").grad
    assert grad.is_sparse
    assert grad.to_dense().sum() == 8


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
