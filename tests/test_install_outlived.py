"""Modules that outlive the container that was installed, or have left it, are still served."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.module_registry import served_by
from dynswap_ext.errors import BudgetError, ConfigError
from sample_models import mlp, trace

#: The module `install`; the package's attribute of that name is the function.


def installed_over(provider: Provider, *modules: nn.Module, **options: Any) -> dynswap_ext.Handle:
    """Install a list of modules, and return the handle when the list is gone."""
    return provider.install(nn.ModuleList(modules), dtype=torch.float64, **options)


def test_its_handle_gives_them_back(provider: Provider) -> None:
    a, b = mlp(), mlp()
    before = trace(a), trace(b)
    moved = testing.moved(mlp(), provider.device, torch.float64)
    moved.load_state_dict(a.state_dict())
    handle = installed_over(provider, a, b)
    gc.collect()
    x = provider.randn(2, 16)
    testing.assert_bit_equal(a(x), moved(x))
    assert handle.active and "active" in repr(handle)
    moved_bytes = handle.stats().bytes_moved
    a(x)
    assert handle.stats().bytes_moved >= moved_bytes > 0
    handle.uninstall()
    assert (trace(a), trace(b)) == before
    assert not handle.active and "inactive" in repr(handle)
    assert handle.stats().bytes_moved >= moved_bytes
    handle.uninstall()


def test_parts_at_any_depth(provider: Provider) -> None:
    model = nn.Sequential(mlp(), nn.Sequential(mlp(), mlp()))
    kept = [model[0][0], model[1][1]]
    handle = provider.install(model, dtype=torch.float64)
    del model
    gc.collect()
    handle.uninstall()
    assert not any(map(dynswap_ext.is_installed, [kept[0], *kept[1].modules()])) and not handle.active


def test_a_part_that_was_taken_out(provider: Provider) -> None:
    model = nn.Sequential(mlp(), mlp())
    handle = provider.install(model, dtype=torch.float64)
    part = model[1]
    del model[1]
    handle.uninstall()
    assert not any(map(dynswap_ext.is_installed, [*model.modules(), *part.modules()]))


def test_a_part_that_joined(provider: Provider) -> None:
    parts, late = nn.ModuleList([mlp()]), mlp()
    handle = provider.install(parts, dtype=torch.float64)
    parts.append(late)
    del parts
    gc.collect()
    assert dynswap_ext.is_installed(late) and handle.active
    handle.uninstall()
    assert not any(map(dynswap_ext.is_installed, late.modules()))


def test_one_by_one(provider: Provider) -> None:
    a, b = mlp(), mlp()
    handle = installed_over(provider, a, b)
    dynswap_ext.uninstall(a)
    assert handle.active and dynswap_ext.is_installed(b)
    dynswap_ext.uninstall(b)
    assert not handle.active
    with pytest.raises(ConfigError, match="uninstalled"):
        handle.retune()


def test_a_new_plan(provider: Provider) -> None:
    a, b = mlp(), mlp()
    moved = testing.moved(mlp(), provider.device, torch.float64)
    handle = installed_over(provider, a, b, budget="1MiB")
    gc.collect()
    x = provider.randn(2, 16)
    a[0].weight = nn.Parameter(torch.ones_like(next(iter(a[0].parameters()))))
    moved.load_state_dict(a.state_dict())
    handle.retune("2MiB")
    for _ in range(5):
        with torch.no_grad():
            testing.assert_bit_equal(a(x), moved(x))
            b(x)
    assert handle.budget == 2 << 20 and handle.tuning is not None
    handle.uninstall()


def test_progress_goes_on(provider: Provider) -> None:
    told: list[int] = []
    a = mlp()
    handle = installed_over(provider, a, progress=lambda done, whole: told.append(done))
    gc.collect()
    end = time.monotonic() + 10
    while not told and time.monotonic() < end:  # the thread looks ten times a second
        a(provider.randn(2, 16))
    handle.uninstall()
    assert told


def test_an_install_that_fails_to_replace_it(provider: Provider) -> None:
    a, b = mlp(), mlp()
    handle = installed_over(provider, a, b)
    with pytest.raises(BudgetError):
        dynswap_ext.install(
            a, device=provider.device, dtype=torch.float64, budget=1, provider=provider.backend
        )
    assert dynswap_ext.is_installed(a) and dynswap_ext.is_installed(b) and handle.active
    handle.uninstall()
    assert not dynswap_ext.is_installed(a) and not dynswap_ext.is_installed(b)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_they_are_collected(provider: Provider, order: tuple[int, int]) -> None:
    kept = {0: mlp(), 1: mlp()}
    watches = [weakref.ref(module._modules["0"]._parameters["weight"]) for module in kept.values()]
    before = len(served_by)
    handle = installed_over(provider, *kept.values())
    gc.collect()
    gc.disable()
    try:
        for count, index in enumerate(order):
            assert handle.active and len(served_by) == before + 1
            del kept[index]
            assert sum(watch() is None for watch in watches) == count + 1
        assert not handle.active and len(served_by) == before
    finally:
        gc.enable()
    handle.uninstall()
