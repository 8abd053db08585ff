"""Random programs over the public API: a plain model does the same, and every difference is a failure.

The tests run a short, fixed set; `make programs SECONDS=600` runs new ones until the time is over.
DYNSWAP_PROGRAMS_LOG=file writes each step down before it is done, for programs that end in a crash.
"""

from __future__ import annotations

import gc
import os
import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from conftest import PROVIDERS, Provider
from program_machine import Programs

SECONDS = float(os.environ.get("DYNSWAP_PROGRAMS_SECONDS", "0"))
COMMON = settings(
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
SHORT = settings(COMMON, derandomize=True, max_examples=50, stateful_step_count=15)
LONG = settings(COMMON, derandomize=False, max_examples=100, stateful_step_count=40)


def test_random_programs(provider: Provider) -> None:
    machine = type("Programs", (Programs,), {"provider": provider})
    gc.collect()
    gc.freeze()  # programs collect garbage, and need not look at what was there before
    try:
        if not SECONDS:
            return run_state_machine_as_test(machine, settings=SHORT)
        end = time.monotonic() + SECONDS / len(PROVIDERS)
        while time.monotonic() < end:
            run_state_machine_as_test(machine, settings=LONG)
    finally:
        gc.unfreeze()
