"""Random programs under both providers, which have to agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import budget_pairs
from conftest import Provider
from provider_pairs import judge
from seeds import seeds


@pytest.mark.parametrize(
    ("judged", "share"), [(judge, 1), (budget_pairs.judge, 1 / 4)], ids=["programs", "budgets"]
)
def test_both_providers_do_the_same(provider: Provider, judged: Callable[..., object], share: float) -> None:
    if not provider.native:
        pytest.skip("the run of the native provider compares it with this one")
    for seed in seeds(range(60), share):
        difference = judged(seed, provider.device)
        assert not difference, difference
