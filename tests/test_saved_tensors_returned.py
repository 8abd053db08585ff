"""What `ctx.saved_tensors` returns is what plain torch returns: nobody else's memory becomes a gradient.

A backward that returns a saved tensor as a gradient, or writes to it, shows whether it is the tensor that
was saved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing

SIDE = 200
Call = Callable[[Callable[[], Tensor]], Tensor]


class Times(torch.autograd.Function):
    """x * t, whose backward returns `t` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return (x * t).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class MadeInForward(torch.autograd.Function):
    """The sum of squares, whose forward makes the gradient, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


class Overwrites(torch.autograd.Function):
    """The square, whose backward writes to what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(gradient)


class Calls(nn.Module):
    """Calls a function inside the call of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        self.linear(torch.zeros(1, 4, dtype=torch.float64, device=self.where))
        return function()


@pytest.fixture(params=["streamed", "activations", "all stays", "offload_activations"])
def call(request: pytest.FixtureRequest, provider: Provider) -> Call:
    model = Calls()
    model.where = provider.device
    folder = {"activations_folder": tempfile.gettempdir()} if provider.device.type == "cpu" else {}
    if request.param == "streamed":
        provider.install(model, dtype=torch.float64)
    elif request.param == "offload_activations":
        if not provider.native:
            pytest.skip("pure Python refuses it")
        offloading = dynswap_ext.offload_activations(provider.device, "1KiB", **folder)
        return offloading(lambda function: function())
    else:
        provider.offload(model, "1KiB" if request.param == "activations" else "1GiB", dtype=torch.float64)
    return model


def test_a_tensor_of_the_users_is_no_gradient(provider: Provider, call: Call) -> None:
    x = torch.randn(SIDE, SIDE, device=provider.device, requires_grad=True)
    t = torch.ones(SIDE, SIDE, device=provider.device)
    for _ in range(3):
        call(lambda: Times.apply(x, t)).backward()
    testing.assert_bit_equal(t, torch.ones_like(t))
    testing.assert_bit_equal(x.grad, 3 * torch.ones_like(t))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_what_a_kept_graph_saved_is_no_gradient(provider: Provider, call: Call, scale: float) -> None:
    x = torch.randn(SIDE, SIDE, device=provider.device, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for each, made in ((x, call(lambda: MadeInForward.apply(x))), (y, MadeInForward.apply(y))):
        for last in (False, False, True):
            made.backward(retain_graph=not last)
            with torch.no_grad():
                each.grad.mul_(scale)
    testing.assert_bit_equal(x.grad, y.grad)


def test_a_write_on_what_was_saved_raises(provider: Provider, call: Call) -> None:
    x, w = (torch.randn(SIDE, SIDE, device=provider.device, requires_grad=True) for _ in range(2))

    def program() -> Tensor:
        y = x.sin()
        return (y * w + Overwrites.apply(y)).sum()

    for made in (program(), call(program)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(made, [x, w])


def test_jagged_tensors(provider: Provider, call: Call) -> None:
    if provider.device.type != "cpu":
        pytest.skip("the pretend device has no nested tensors")
    parts = [torch.randn(rows, 64, requires_grad=True) for rows in (100, 300, 50)]
    w = torch.randn(64, 64, requires_grad=True)

    def program() -> Tensor:
        nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        return (nested @ w).sin().values().sum()

    found, expected = (torch.autograd.grad(made, [*parts, w]) for made in (call(program), program()))
    testing.assert_bit_equal(found, expected)
