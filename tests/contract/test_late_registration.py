"""Weights that are registered during an install are written through like those that were there before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing


class Counter(nn.Module):
    """Makes its buffers in its first call, and writes them in place from then on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(4))
        self.count += 1
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return x - self.mean


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_buffers_written_in_the_forward(provider: Provider, training: bool) -> None:
    model = Counter().train(training)
    provider.install(model, dtype=torch.float64)
    plain = Counter().train(training)
    for step in range(3):
        x = provider.randn(5, 4, seed=step)
        torch.testing.assert_close(model(x), plain(x.cpu().float()).to(x), rtol=1e-6, atol=1e-6)
    assert model.state_dict()["count"].item() == 3
    torch.testing.assert_close(model.state_dict()["mean"], plain.mean, rtol=1e-6, atol=1e-6)


def test_parameters_initialised_through_the_attribute(provider: Provider) -> None:
    model = nn.Module()
    provider.install(model, dtype=torch.float64)
    model.register_parameter("weight", nn.Parameter(torch.zeros(4, 4)))
    model.bias = nn.Parameter(torch.zeros(4))
    nn.init.constant_(model.weight, 2.0)
    model.bias.data.fill_(3.0)
    assert model.state_dict()["weight"].unique().tolist() == [2]
    assert model.state_dict()["bias"].unique().tolist() == [3]


def test_gradients_and_ties(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    provider.install(model, dtype=torch.float64)
    new = nn.Parameter(torch.randn(4, 4))
    model.first = new
    model[0].second = new
    x = provider.randn(3, 4)
    loss = (x @ model.first.t() @ model[0].second).square().sum()
    loss.backward()
    plain = new.detach().to(x).requires_grad_()
    (x @ plain.t() @ plain).square().sum().backward()
    torch.testing.assert_close(new.grad, plain.grad.to(new), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        new.fill_(1)
    testing.assert_bit_equal(model.first.detach(), torch.ones_like(plain))


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_weights_that_get_their_data_later(provider: Provider, budget: str | None) -> None:
    """A module on the meta device may join, and get its data later, as with peft's `low_cpu_mem_usage`."""
    model = nn.Sequential(nn.Linear(4, 4))
    _, handle = provider.pair(model, budget=budget)
    x = provider.randn(3, 4)
    model(x)
    model.add_module("late", nn.Linear(4, 4, device="meta"))
    assert model.late.weight.is_meta
    with pytest.raises(RuntimeError, match=r"not been loaded yet: late\.weight, late\.bias"):
        model(x)
    loaded = {"late.weight": torch.eye(4), "late.bias": torch.ones(4)}
    model.load_state_dict(loaded, strict=False, assign=True)
    moved = testing.moved(model, provider.device, torch.float64)
    for _ in range(3):
        testing.assert_bit_equal(model(x), moved(x))
    handle.uninstall()
    assert model.late.weight.data_ptr() == loaded["late.weight"].data_ptr()


@pytest.mark.parametrize("budget", ["1GiB", None], ids=["resident", "streamed"])
def test_what_leaves_the_model_leaves_the_device(provider: Provider, budget: str | None) -> None:
    if not provider.native:
        pytest.skip("pure Python plans when masters come, not when they go")
    model = nn.Sequential(nn.Linear(4, 4))
    _, handle = provider.pair(model, budget=budget)
    x = provider.randn(3, 4)
    model(x)
    before = handle.stats()
    for _ in range(50):
        model.add_module("late", nn.Linear(4, 4))
        model(x)
        assert handle.stats().weight_bytes == 2 * before.weight_bytes
        del model.late
        model(x)
        after = handle.stats()
        assert (after.weight_bytes, after.groups) == (before.weight_bytes, before.groups)
        assert after.resident_bytes == before.resident_bytes
    assert after.peak_bytes <= 2 * before.peak_bytes
