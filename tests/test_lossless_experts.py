"""Experts in one coded parameter: they are served by slices, or all at once."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from coded_masters import code_masters, is_coded
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext.errors import DynswapWarning
from sample_experts import Fused, Mixture, choices


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("budget", ["minimum", "1GiB"])
def test_experts_in_slices(provider: Provider, trained: bool, budget: Any) -> None:
    torch.manual_seed(0)
    plain = Mixture()
    model = code_masters(copy.deepcopy(plain)).requires_grad_(trained)
    provider.install(model, dtype=torch.float64, budget=budget)
    moved = testing.moved(plain, provider.device, torch.float64).requires_grad_(trained)
    for step in range(3):
        x = provider.randn(2, 24, seed=step)
        chosen = choices(tokens=2, seed=step, device=provider.device)
        outputs = [each(x, chosen) for each in (model, moved)]
        testing.assert_bit_equal(outputs[0].detach(), outputs[1].detach(), f"step {step}")
        if not trained:
            continue
        for each, output in zip((model, moved), outputs, strict=True):
            each.zero_grad()
            output.square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), moved.named_parameters(), strict=True):
            if q[1].grad is not None:
                testing.assert_bit_equal(p.grad, q[1].grad.to("cpu", torch.float32), name)
        with torch.no_grad():  # a step
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                p.add_(0.5)
                q.add_(0.5)
        moved = testing.moved(plain, provider.device, torch.float64)
    assert any(map(is_coded, model.parameters())) != trained


@pytest.mark.parametrize("budget", ["minimum", "1GiB"])
@pytest.mark.parametrize("read", ["listed", "all"])
def test_experts_that_are_read_at_once(provider: Provider, read: str, budget: Any) -> None:
    torch.manual_seed(0)
    plain = Mixture(partial(Fused, read))
    model = code_masters(copy.deepcopy(plain)).requires_grad_(False)
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    moved = testing.moved(plain, provider.device, torch.float64)
    x, chosen = provider.randn(2, 24), choices(tokens=2, device=provider.device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DynswapWarning)
        testing.assert_bit_equal(model(x, chosen), moved(x, chosen))
        if provider.native and read == "all" and budget == "minimum":
            assert handle.stats().overflow_bytes >= plain.mixtures[0].up.numel() * 8  # type: ignore[union-attr, operator]
        for _ in range(2):
            testing.assert_bit_equal(model(x, chosen), moved(x, chosen))
    assert all(map(is_coded, model.parameters()))
