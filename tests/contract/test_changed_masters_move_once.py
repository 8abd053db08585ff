"""After every master has changed, as after an optimizer's step, a pass moves each of them once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import master_bytes
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp

#: Wide enough for the weight and bias of a layer to be copied by themselves (a group).
WIDTH, LAYERS = 256, 6
#: Bytes of one layer in float64, and what alignment may add to it.
LAYER = (WIDTH * WIDTH + WIDTH) * 8
SLACK = 8192


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()})


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()}, assign=True)


CHANGES = [in_place, loaded, assigned]


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_pass_after_a_change(
    provider: Provider, change: Callable[[nn.Module], None], resident: bool
) -> None:
    model = mlp(WIDTH, LAYERS).eval()
    budget = (LAYERS if resident else 4) * (LAYER + SLACK)
    _, handle = provider.pair(model, budget=budget)
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            model(x)
        for _ in range(2):
            change(model)
            moved = testing.moved(model, provider.device, torch.float64)
            handle.reset_stats()
            testing.assert_bit_equal(model(x), moved(x), "output")
            stats = handle.stats()
            if resident:
                assert stats.bytes_moved == master_bytes(model)
            else:  # weights that were prefetched before the change, and those for the next pass, come on top
                assert stats.bytes_moved <= 2 * master_bytes(model)
            assert stats.overflow_bytes == 0
            assert stats.peak_bytes <= budget


def test_steps_of_an_optimizer(provider: Provider) -> None:
    model = mlp(WIDTH, LAYERS)
    budget = (LAYERS + 1) * (LAYER + SLACK)
    _, handle = provider.pair(model, budget=budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        handle.reset_stats()
        optimizer.zero_grad()
        model(provider.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        assert handle.stats().bytes_moved == master_bytes(model)
        assert handle.stats().overflow_bytes == 0
