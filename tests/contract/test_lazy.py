"""Lazy modules: installed before their masters exist, and streamed once they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import assert_gradients_as_moved, master_bytes, total
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.class_swap import is_swap_class

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], type[nn.Module]]] = {
    "linear": (lambda: nn.LazyLinear(4), (3, 5), nn.Linear),
    "linear without bias": (lambda: nn.LazyLinear(4, bias=False), (3, 5), nn.Linear),
    "convolution": (lambda: nn.LazyConv2d(4, 3), (2, 3, 6, 6), nn.Conv2d),
    "transposed convolution": (lambda: nn.LazyConvTranspose1d(4, 3), (2, 3, 6), nn.ConvTranspose1d),
    "batch norm": (lambda: nn.LazyBatchNorm1d(), (4, 5), nn.BatchNorm1d),
    "instance norm": (
        lambda: nn.LazyInstanceNorm1d(affine=True, track_running_stats=True),
        (2, 3, 5),
        nn.InstanceNorm1d,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_forward_makes_masters_and_the_next_streams_them(provider: Provider, case: str) -> None:
    make, shape, becomes = CASES[case]
    model = nn.Sequential(make())
    handle = provider.install(model, dtype=torch.float64)
    assert all(is_lazy(p) for p in model.parameters())
    x = provider.randn(*shape)
    with torch.no_grad():
        y = model(x)
    assert y.dtype == torch.float64
    assert dynswap_ext.is_installed(model[0])
    assert is_swap_class(type(model[0]))
    assert isinstance(model[0], becomes)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * len(list(model.parameters()))
    assert not any(is_lazy(t) for t in (*model.parameters(), *model.buffers()))
    model.eval()
    moved = testing.moved(model, provider.device, torch.float64)
    handle.reset_stats()
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x), "output")
    assert handle.stats().bytes_moved >= master_bytes(model)
    handle.uninstall()
    assert type(model[0]) is becomes


@pytest.mark.parametrize("case", CASES)
def test_the_masters_are_initialised_as_those_of_the_moved_model(provider: Provider, case: str) -> None:
    make, shape, _ = CASES[case]
    model = nn.Sequential(make())
    with provider.device:  # on some devices, a later move would make its weights ordinary ones
        moved = nn.Sequential(make()).to(torch.float64)
    provider.install(model, dtype=torch.float64)
    x = provider.randn(*shape)
    with torch.no_grad():
        for m in (model, moved):
            torch.manual_seed(1)
            m(x)
    expected = moved.state_dict()
    for name, master in model.state_dict().items():
        wanted = expected[name].to(master.device, master.dtype)
        # Running statistics start from masters that were not rounded, and end rounded.
        torch.testing.assert_close(master, wanted, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_first_forward_reach_the_masters(provider: Provider, case: str) -> None:
    make, shape, _ = CASES[case]
    model = nn.Sequential(make())
    provider.install(model, dtype=torch.float64)
    x = provider.randn(*shape)
    loss = total(model(x))
    moved = testing.moved(model, provider.device, torch.float64)
    loss.backward()
    total(moved(x)).backward()
    assert_gradients_as_moved(model, moved)


def test_uninstalled_before_the_first_forward(provider: Provider) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    handle = provider.install(model, dtype=torch.float64)
    handle.uninstall()
    assert type(model[0]) is nn.LazyLinear
    assert isinstance(model[0].weight, UninitializedParameter)
    assert isinstance(model[1].running_mean, UninitializedBuffer)
    model(torch.randn(3, 5))
    assert type(model[0]) is nn.Linear
    assert type(model[1]) is nn.BatchNorm1d


def test_a_state_loaded_into_a_lazy_module(provider: Provider) -> None:
    model, source = nn.Sequential(nn.LazyLinear(4)), nn.Sequential(nn.Linear(5, 4))
    handle = provider.install(model, dtype=torch.float64)
    model.load_state_dict(source.state_dict())
    testing.assert_bit_equal(model.state_dict(), source.state_dict(), "state")
    moved = testing.moved(source, provider.device, torch.float64)
    x = provider.randn(3, 5)
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x), "output")
    assert handle.stats().bytes_moved >= master_bytes(model)


def test_a_lazy_module_beside_others_in_training(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.LazyLinear(4))
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(3, 5)
    with torch.no_grad():
        model(x)
    plain = testing.moved(model, provider.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x if m is model else x.float()).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-4, atol=1e-6, msg=name)
    assert handle.stats().bytes_moved >= 3 * master_bytes(model)


def test_a_lazy_module_does_not_compute_with_what_it_has_not(provider: Provider) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    provider.install(model, dtype=torch.float64)
    with pytest.raises(ValueError, match="uninitialized"):
        model[0].weight + 1
    assert model[0].has_uninitialized_params()
