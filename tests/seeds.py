"""Chooses the programs that a test of random programs runs: a short, fixed set, new ones, or a single one.

`make programs SECONDS=600` sets DYNSWAP_PROGRAMS_SECONDS, and new programs run until the time is over. A
failure names its seed; DYNSWAP_PROGRAMS_SEED=7 runs that program alone.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence

#: How many seconds the tests run new programs; 0: they run their fixed ones.
SECONDS = float(os.environ.get("DYNSWAP_PROGRAMS_SECONDS", "0"))
_ONE = os.environ.get("DYNSWAP_PROGRAMS_SEED")


def seeds(short: Sequence[int], share: float = 1) -> Iterator[int]:
    """Yield the seeds of the programs that a test runs.

    By default these are the seeds in `short`. With new programs, the test has `share` of the time, and runs
    at least as many programs as `short` has.
    """
    if _ONE or not SECONDS:
        yield from [int(_ONE)] if _ONE else short
        return
    end = time.monotonic() + SECONDS * share
    first = time.time_ns() // 1_000_000
    for seed in itertools.count(first):
        if seed >= first + len(short) and time.monotonic() > end:
            return
        yield seed
