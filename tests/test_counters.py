"""Both providers count what `Stats` has, and `reset_stats` clears the same counters in both."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
import torch

import dynswap_ext
from conftest import Provider
from sample_models import mlp


def cleared() -> dict[str, bool]:
    """Return the names in csrc/core/stats.h, each with whether `reset_stats` clears it."""
    return pytest.importorskip("dynswap_ext._C", reason="the extension is not built (make build)").STATS


def test_stats_has_the_names_of_the_native_table() -> None:
    names = {field.name for field in fields(dynswap_ext.Stats)} - {"provider", "backend"}
    assert names == set(cleared())


def test_reset_stats_clears_what_is_counted_and_nothing_else(provider: Provider) -> None:
    model = mlp(features=256)
    handle = provider.install(model, dtype=torch.float64, budget="1MiB")
    x = provider.randn(2, 256)
    with torch.no_grad():
        for _ in range(2):
            model(x)
    before = asdict(handle.stats())
    handle.reset_stats()
    after = asdict(handle.stats())
    assert 0 < after.pop("peak_bytes") <= before["peak_bytes"]  # the peak starts at what is held now
    assert before["misses"] and before["bytes_moved"] and before["weight_bytes"]
    for name, value in after.items():
        assert value == (0 if cleared().get(name) else before[name]), name
