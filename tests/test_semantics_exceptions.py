"""Invariant 9: an error leaves the model usable, and nothing half-swapped."""

from __future__ import annotations

import pytest
import torch

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._python.destination import Destination
from sample_models import mlp


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
