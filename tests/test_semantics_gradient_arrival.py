"""Gradients that are being copied to the host: nothing reads or changes them before they are complete.

See Note [Gradients travel on a stream of their own].
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp
from threads import in_threads

N = 16


class Weights(nn.Module):
    """Two weights, and a function that computes from them."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(N, N, dtype=dtype))
        self.second = nn.Parameter(torch.randn(N, N, dtype=dtype))
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


class NegativeView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(-grad)


LAYOUTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "expanded from one element": lambda m, x: m.first.sum() + (m.second + x).sum(),
    "expanded along one dimension": lambda m, x: m.first.mean(0).square().sum() + m.second.mean(1).sum(),
    "transposed": lambda m, x: (m.first.t() @ x).square().sum() + (x @ m.second.t()).sum(),
    "with gaps": lambda m, x: (torch.cat([m.first, m.second], 1) * torch.cat([x, x], 1)).square().sum(),
    "with gaps, transposed": lambda m, x: torch.cat([m.first.t(), m.second.t()], 1).square().sum(),
    "one element": lambda m, x: m.first[3, 5] * 2 + m.second[0, 0].square(),
    "a negative view": lambda m, x: (NegativeView.apply(m.first) * x + m.second).square().sum(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(provider: Provider, layout: str, dtype: torch.dtype) -> None:
    model = Weights(LAYOUTS[layout], torch.float32)
    moved, _ = provider.pair(model, dtype)
    x = provider.randn(N, N, dtype=dtype)
    for m in (model, moved):
        for _ in range(2):  # the second is added
            m(x).backward()
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        expected = q.grad.to("cpu", torch.float32)
        if dtype is torch.bfloat16:  # added in float32 here, and in bfloat16 there
            torch.testing.assert_close(p.grad, expected, rtol=1e-2, atol=1e-2)
        else:
            torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=1e-6)


COMPLEX: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "conjugated": lambda m, x: (m.first.conj() * x).abs().sum() + (m.second.conj() + x).abs().sum(),
    "adjoint": lambda m, x: (m.first.mH * x).abs().sum() + m.second.abs().sum(),
    "imaginary part": lambda m, x: m.first.conj().imag.square().sum() + (m.second * x).abs().sum(),
}


@pytest.mark.parametrize("case", COMPLEX)
def test_complex_gradients(provider: Provider, case: str) -> None:
    model = Weights(COMPLEX[case], torch.complex64)
    moved, _ = provider.pair(model, None)
    real, imaginary = (provider.randn(N, N, dtype=torch.float32, seed=seed) for seed in (1, 2))
    x = torch.complex(real, imaginary)
    for m in (model, moved):
        m(x).backward()
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad.cpu(), rtol=1e-6, atol=1e-6)


def test_autograd_adds_to_what_was_sent(provider: Provider) -> None:
    # `u` and the weight get the same tensor as gradient. Later, another is added to that of `u`.
    added = threading.Event()

    def compute(m: Any, x: torch.Tensor) -> torch.Tensor:
        u = x * 1
        other = u.sin()
        if provider.device.type != "cpu":
            u.register_hook(lambda _: (provider.device_module.current_stream().synchronize(), added.set())[0])
        else:
            u.register_hook(lambda _: added.set())
        y = (m.first + u).square()  # after `other`: backward comes here first
        return y.sum() + other.sum() + 0 * m.second.sum()

    model = Weights(compute, torch.float32)
    moved, _ = provider.pair(model, None)
    x = provider.randn(N, N, dtype=torch.float32).requires_grad_()
    # The thread that waits for gradients is busy until the sum is complete. On the CPU it adds them itself.
    patience = 0 if provider.device.type == "cpu" else 20
    model.get_parameter("second").register_hook(lambda _: (added.wait(patience), None)[1])
    for m in (model, moved):
        x.grad = None
        added.clear()
        m(x).backward()
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        testing.assert_bit_equal(p.grad, q.grad.cpu())


def test_two_backward_passes_through_the_same_nodes(provider: Provider) -> None:
    model = mlp(layers=3)
    provider.pair(model, budget="1GiB")  # residents are handed out once
    masters = list(model.parameters())
    xs = [provider.randn(4, N, seed=seed) for seed in range(4)]
    alone = [torch.autograd.grad(model(x).square().sum(), masters) for x in xs]

    def work(index: int) -> None:
        for _ in range(6):
            found = torch.autograd.grad(model(xs[index]).square().sum(), masters)
            for one, other in zip(found, alone[index], strict=True):
                testing.assert_bit_equal(one, other)

    in_threads(work, len(xs))


def test_a_graph_that_is_kept(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model, budget="1GiB")
    for m in (model, moved):
        losses = [m(provider.randn(4, N, seed=seed)).square().sum() for seed in range(2)]
        losses[0].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad.float().cpu(), rtol=1e-6, atol=1e-6)


def test_a_backward_pass_that_fails_leaves_nothing_to_wait_for(provider: Provider) -> None:
    model = mlp(layers=3)
    moved, _ = provider.pair(model, budget="1GiB")
    x = provider.randn(4, N)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    hook = model.get_parameter("2.weight").register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(x).square().sum().backward()
    hook.remove()
    model.zero_grad()
    for m in (model, moved):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        testing.assert_bit_equal(p.grad, q.grad.float().cpu())


def test_a_hook_on_the_node_sees_the_values(provider: Provider) -> None:
    seen: list[torch.Tensor] = []

    def compute(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = m.first
        first.grad_fn.register_hook(lambda inputs, _: seen.append(inputs[0].clone()))
        return (first * x + m.second).square().sum()

    model = Weights(compute, torch.float32)
    provider.pair(model)
    model(provider.randn(N, N)).backward()
    testing.assert_bit_equal(seen[0].cpu().float(), model.get_parameter("first").grad)
