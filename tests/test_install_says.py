"""Warnings of an install that has no effect, or another than was asked for. It works all the same."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import DynswapWarning, testing
from sample_models import mlp


def test_a_model_without_weights_is_installed_with_a_warning(provider: Provider) -> None:
    model = nn.ReLU()
    with pytest.warns(DynswapWarning, match="ReLU has no weights, so nothing is streamed"):
        handle = provider.install(model)
    x = provider.randn(3)
    testing.assert_bit_equal(model(x), x.relu())
    handle.uninstall()
    assert type(model) is nn.ReLU


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"prefetch": 100, "budget": None},
            r"prefetch is 100, and \d+ group\(s\) of weights are streamed: all",
        ),
        ({"prefetch": 6, "budget": "3MiB"}, r"prefetch is 6, and the budget has room for [0-5] group\(s\)"),
    ],
)
def test_more_prefetch_than_there_is_room_or_groups_is_said(
    provider: Provider, options: dict[str, object], said: str
) -> None:
    if not provider.native:
        pytest.skip("pure Python fetches nothing ahead, and says that")
    model = mlp(features=512, layers=8)
    with pytest.warns(DynswapWarning, match=said):
        moved, handle = provider.pair(model, **options)
    x = provider.randn(2, 512)
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().misses


def pinned(model: nn.Module, device: torch.device) -> nn.Module:
    """Pin the masters. Whether masters in the heap can be page-locked depends on what else is there."""
    if device.type != "cpu":
        for p in model.parameters():
            p.data = p.detach().pin_memory()
    return model


def test_usual_installs_say_nothing(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynswap_ext")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "pure Python does not track writes")  # it warns for any model
        for options in (
            {},
            {"budget": "3MiB"},
            {"budget": "3MiB", "prefetch": 1},
            {"budget": "1GiB", "prefetch": 9},
        ):
            caplog.clear()
            model = pinned(mlp(features=512, layers=8), provider.device)
            provider.install(model, dtype=torch.float64, **options).uninstall()
            everything = any("all weights stay there" in record.message for record in caplog.records)
            assert everything is (options.get("budget") == "1GiB")
