"""Invariant 9: an error leaves the model usable, and nothing half-swapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._python.destination import Destination
from sample_models import mlp


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        if self.fail:
            raise ValueError("the forward's own error")
        return x @ weight.t()


def test_a_forward_that_raises(provider: Provider) -> None:
    model = nn.Sequential(*mlp(), Fails(), *mlp())
    moved, handle = provider.pair(model)
    x = provider.randn(2, 16)
    for fail in (False, True, False, True, False):
        model[6].fail = fail
        if fail:
            with pytest.raises(ValueError, match="own error"):
                model(x)
        else:
            testing.assert_bit_equal(model(x), moved(x))
    testing.assert_nothing_held(handle)


def test_a_wrong_input(provider: Provider) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    with pytest.raises(RuntimeError):
        model(provider.randn(2, 5))
    x = provider.randn(2, 16)
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved > 0


def test_uninstall_after_an_error(provider: Provider) -> None:
    model = mlp()
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    with pytest.raises(RuntimeError), provider.install(model, dtype=torch.float64):
        model(provider.randn(2, 5))
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == before


def test_out_of_memory_is_an_error_of_its_own(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    if provider.native:
        pytest.skip("the native engine's allocations are tested with the fake device")
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 16)

    def full(self: Destination, master: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Destination, "convert", full)
        with pytest.raises(dynswap_ext.OutOfMemoryError, match=r"for 0\.weight, 2 KiB \(2048 bytes\)"):
            model(x)
    testing.assert_bit_equal(model(x), moved(x))
    testing.assert_nothing_held(handle)


def test_an_error_in_backward(provider: Provider) -> None:
    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("the backward's own error")

    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(2, 16)
    with pytest.raises(ValueError, match="own error"):
        Refuse.apply(model(x)).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    moved(x).sum().backward()
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        testing.assert_bit_equal(p.grad, q.grad.to("cpu", torch.float32))
