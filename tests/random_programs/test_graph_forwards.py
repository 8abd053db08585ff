"""Random forwards under a compiler or an exporter: outputs of several calls, and the masters afterwards.

The tests run a short, fixed set; `make programs SECONDS=600` runs new ones until the time is over.
"""

from __future__ import annotations

import itertools
import os
import time

import pytest

from conftest import PROVIDERS, Provider
from graph_forwards import HOW, judge

SECONDS = float(os.environ.get("DYNSWAP_PROGRAMS_SECONDS", "0"))
#: Some seconds of a CPU each. Without Note [Lifted masters] they differ where strict=False exports them.
SHORT = (0, 5, 6, 7)
RECORDERS = [how for how in HOW if how != "eager"]


@pytest.mark.slow
@pytest.mark.parametrize("how", RECORDERS)
def test_as_a_moved_model(provider: Provider, how: str) -> None:
    if provider.device.type != "cpu":
        pytest.skip("compiles for minutes; the run on the CPU has it")
    end = time.monotonic() + SECONDS / len(RECORDERS) / len(PROVIDERS)
    seeds = itertools.count(time.time_ns() // 1_000_000) if SECONDS else iter(SHORT)
    done = compared = 0
    for seed in seeds:
        judged = judge(seed, how, provider)
        assert not judged.failure, f"{how}, {judged.failure}"
        done += 1
        compared += judged.compared
        if SECONDS and done >= len(SHORT) and time.monotonic() > end:
            break
    assert compared >= done // 3, (compared, done)
