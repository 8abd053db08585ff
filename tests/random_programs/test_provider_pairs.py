"""Random programs under both providers, which have to agree.

The test runs a short, fixed set; `make programs SECONDS=600` runs new ones until the time is over.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import pytest

import budget_pairs
from conftest import Provider
from provider_pairs import judge

SECONDS = float(os.environ.get("DYNSWAP_PROGRAMS_SECONDS", "0"))
SHORT = range(60)


@pytest.mark.parametrize(
    ("judged", "share"), [(judge, 1), (budget_pairs.judge, 4)], ids=["programs", "budgets"]
)
def test_both_providers_do_the_same(provider: Provider, judged: Callable[..., object], share: int) -> None:
    if not provider.native:
        pytest.skip("the run of the native provider compares it with this one")
    end = time.monotonic() + SECONDS / share
    for seed in itertools.count(time.time_ns() // 1_000_000) if SECONDS else SHORT:
        difference = judged(seed, provider.device)
        assert not difference, difference
        if SECONDS and time.monotonic() > end:
            break
