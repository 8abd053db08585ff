"""A larger budget never moves more, except for a streamed group: real installs on the CPU.

tests/cpp/test_larger_budget.cpp has models, routes and many more budgets on the virtual clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import dynswap_ext
from dynswap_ext import _provider

PREFETCH, CALLS = 2, 6
SHARES = (0.08, 0.15, 0.25, 0.35, 0.5, 0.6, 0.75, 0.9)


@pytest.fixture(autouse=True)
def _native() -> None:
    if reason := _provider.native_unavailable(torch.device("cpu")):
        pytest.skip(reason)


class Branching(nn.Module):
    """Stages with branches, one of which a call runs. In a list named `experts`, the most used ones stay."""

    def __init__(self, name: str, widths: Sequence[int], branches: int) -> None:
        super().__init__()
        self._name = name
        self.add_module(
            name,
            nn.ModuleList(
                nn.ModuleList(
                    nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64)) for _ in range(branches)
                )
                for width in widths
            ),
        )

    def forward(self, x: Tensor, route: Sequence[int]) -> Tensor:
        for stage, branch in zip(self.get_submodule(self._name).children(), route, strict=True):
            x = list(stage.children())[branch](x)
        return x


def moved(name: str, seed: int, share: float) -> tuple[float, float]:
    """Return the bytes of masters that a call moves, and how many more are allowed than with less budget."""
    chance = random.Random(seed)
    widths = [256 * chance.randint(1, 4) for _ in range(chance.randint(6, 12))]
    branches = 4 if name == "experts" else chance.randint(1, 2)
    model = Branching(name, widths, branches).eval().to(torch.float64)
    total = sum(parameter.numel() for parameter in model.parameters()) * 4
    largest = max(widths) * (2 * 64 + 1) * 4 + 64 * 4
    budget = max(int(share * total), 2 * largest + (1 << 16))
    handle = dynswap_ext.install(model, device="cpu", dtype=torch.float32, budget=budget, prefetch=PREFETCH)
    routes = [[chance.randrange(branches) for _ in widths] for _ in range(CALLS)]
    x = torch.randn(2, 64)
    with torch.no_grad():
        for route in routes:
            model(x, route)
        handle.reset_stats()
        for route in routes:
            model(x, route)
    stats = handle.stats()
    dynswap_ext.uninstall(model)
    assert stats.peak_bytes <= budget
    # With experts, one more or less may stay. Branches are copied in order, with their neighbours: a group
    # has a sixteenth of the model, and what does not fit in that. Masters have twice the device's bytes.
    return stats.bytes_moved / CALLS, 2 * (largest if name == "experts" else largest + total / 16)


@pytest.mark.parametrize("name", ["branches", "experts"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 15])
def test_a_larger_budget_never_moves_more_but_a_group(name: str, seed: int) -> None:
    least = float("inf")
    for share in SHARES:
        bytes_moved, more = moved(name, seed, share)
        assert bytes_moved <= least + more, (
            f"{share} of the model moves {bytes_moved}, a smaller share {least}"
        )
        least = min(least, bytes_moved)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_norms_that_are_defined_behind_what_they_precede_bring_no_second_copies(prefetch: int) -> None:
    """Norms that are defined after the layers that they precede cause no second copies.

    If they were grouped with what follows them in the definition, they would be copied twice a pass.
    """
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    total = 8 * sum(parameter.numel() for parameter in layer.parameters()) * 8
    x = torch.randn(1, 2, 256, dtype=torch.float64)
    for share in (0.245, 0.25, 0.2505, 0.252, 0.3, 0.5):
        # In training mode: in eval mode, one fused operation reads each layer.
        model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).train()
        handle = dynswap_ext.install(
            model, device="cpu", dtype=torch.float64, budget=int(share * total), prefetch=prefetch
        )
        with torch.no_grad():
            for _ in range(5):
                model(x)
            handle.reset_stats()
            model(x)
        stats = handle.stats()
        dynswap_ext.uninstall(model)
        assert stats.bytes_moved <= total / 2, (share, stats)  # masters have half the bytes
