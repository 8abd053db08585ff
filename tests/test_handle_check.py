"""`Handle.check` reports where an install does less than it was asked for. `handle_of` finds the handle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import config
from dynswap_ext.errors import ConfigError, ShortfallError


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))


def test_all_is_well(provider: Provider) -> None:
    model = layers()
    handle = provider.install(model, dtype=torch.float64, budget="minimum")
    with torch.no_grad():
        model(provider.randn(2, 256))
    handle.check(staged=1.0)


def test_by_another_handle_of_the_same_install(provider: Provider) -> None:
    model = layers()
    provider.install(model, dtype=torch.float64, budget="minimum", prefetch=0)
    provider.handles.clear()
    with torch.no_grad():
        for _ in range(3):
            model(provider.randn(2, 256))
    dynswap_ext.handle_of(model).check(staged=1.0, stalled=1.0)  # counted for as long as the figures are
    dynswap_ext.uninstall(model)


def test_nothing_is_streamed(provider: Provider) -> None:
    model = layers().to(provider.device)
    with pytest.warns(match="already") if provider.device.type != "cpu" else torch.no_grad():
        handle = provider.install(model)
    with pytest.raises(ShortfallError, match=r"^nothing is streamed: no weight has to be moved"):
        handle.check()
    handle = provider.install(layers(), dtype=torch.float64)
    with pytest.raises(ShortfallError, match=r"^nothing is streamed: nothing has been used yet"):
        handle.check()


def test_more_than_the_budget(provider: Provider) -> None:
    model = layers()
    handle = provider.install(model, dtype=torch.float64, budget="1MiB")
    with torch.no_grad():
        kept = [layer.weight for layer in model]
        model(provider.randn(2, 256))
    with pytest.raises(ShortfallError, match=r"MiB beyond the budget, .*; drop them .* budget of "):
        handle.check(staged=1.0)
    del kept
    handle.reset_stats()
    with torch.no_grad():
        model(provider.randn(2, 256))
    handle.check(staged=1.0)


def test_waits(provider: Provider) -> None:
    model = layers()
    handle = provider.install(model, dtype=torch.float64, budget="minimum", prefetch=0)
    with torch.no_grad(), handle.record():
        model(provider.randn(2, 256))
    handle.check(staged=1.0)
    if provider.device.type == "cpu":
        with pytest.raises(ShortfallError, match=r"went by waiting for weights, more than stalled=0"):
            handle.check(stalled=0)


def test_what_is_not_page_locked(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    if provider.device.type == "cpu" or not provider.native:
        pytest.skip("nothing is page-locked")
    monkeypatch.setattr(config, "ram_limit", lambda: 0)
    model = layers()
    handle = provider.install(model)
    with torch.no_grad():
        model(provider.randn(2, 256, dtype=torch.float32))
    with pytest.raises(ShortfallError, match=r"of masters in RAM are not page-locked, .* says why"):
        handle.check()
    handle.uninstall()
    handle = provider.install(model, host_budget="minimum")
    with torch.no_grad():
        model(provider.randn(2, 256, dtype=torch.float32))
    handle.check()  # it was asked for


def test_handle_of(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"Sequential is not installed: dynswap_ext\.install\(\) returns"):
        dynswap_ext.handle_of(model)
    first = provider.install(model[0], dtype=torch.float64)
    assert dynswap_ext.handle_of(model) is first is dynswap_ext.handle_of(model[0])
    provider.install(model[1], dtype=torch.float64)
    with pytest.raises(ConfigError, match="2 installs serve parts of Sequential: ask for"):
        dynswap_ext.handle_of(model)
    first.uninstall()
    assert dynswap_ext.handle_of(model).active and not first.active
