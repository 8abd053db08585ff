"""Random programs under both providers, which have to agree.

The test runs a short, fixed set; `make programs SECONDS=600` runs new ones until the time is over.
"""

from __future__ import annotations

import itertools
import os
import time

import pytest

import budget_pairs
from conftest import Provider
from provider_pairs import judge

SECONDS = float(os.environ.get("DYNSWAP_PROGRAMS_SECONDS", "0"))
SHORT = range(60)


def test_both_providers_do_the_same(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("the run of the native provider compares it with this one")
    end = time.monotonic() + SECONDS
    for seed in itertools.count(time.time_ns() // 1_000_000) if SECONDS else SHORT:
        difference = judge(seed, provider.device)
        assert not difference, difference
        if SECONDS and time.monotonic() > end:
            break


def test_both_providers_say_the_same_of_budgets(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("the run of the native provider compares it with this one")
    end = time.monotonic() + SECONDS / 4
    for seed in itertools.count(time.time_ns() // 1_000_000) if SECONDS else SHORT:
        budget_pairs.judge(seed, provider.device)
        if SECONDS and time.monotonic() > end:
            break
