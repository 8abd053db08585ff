"""Random programs over the public API: a plain model does the same, and every difference is a failure.

The tests run a short, fixed set; `make programs SECONDS=600` runs new ones until the time is over.
DYNSWAP_PROGRAMS_LOG=file writes each step down before it is done, for programs that end in a crash.
"""

from __future__ import annotations

import gc
import random
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from architectures import ARCHITECTURES, NARROW
from beside_calls import ACTIONS, Callers
from conftest import PROVIDERS, Provider
from master_writes import Dice
from program_machine import Programs
from seeds import SECONDS, seeds
from twins import OPTIONS
from twins_written import WrittenTwins

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
        for _ in seeds([0], 1 / len(PROVIDERS)):
            run_state_machine_as_test(machine, settings=LONG if SECONDS else SHORT)
    finally:
        gc.unfreeze()


def test_calls_of_other_threads_are_as_if_nothing_was_done(provider: Provider, tmp_path: Path) -> None:
    """Calls on other threads give the right result while the model is changed.

    `Programs` has this as one rule; here it is run by itself, since threads meet differently each time.
    """
    kinds = [name for name, kind in ARCHITECTURES.items() if not (kind.writes or kind.sparse)]
    for seed in seeds(range(4 if provider.device.type == "cpu" else 1), 1 / len(PROVIDERS)):
        draw = random.Random(seed)
        twins = WrittenTwins(provider, kinds[seed % len(kinds)], NARROW, "torch", seed, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twins.install(**drawn_options(draw))
            names = draw.choices(list(ACTIONS), k=24)
            actions = [(name, Dice(draw.randrange(1000)), drawn_options(draw)) for name in names]
            try:
                Callers(twins, seed).meanwhile(actions)
                twins.close()
            except Exception as error:
                raise AssertionError(f"seed {seed}: {', '.join(names)}") from error


def drawn_options(draw: random.Random) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in OPTIONS.items()}
