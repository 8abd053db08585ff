"""Which programs a test of random programs runs: a short, fixed set; new ones for some time; or one.

`make programs SECONDS=600` sets DYNSWAP_PROGRAMS_SECONDS, and new programs run until the time is over. A
failure names its seed; DYNSWAP_PROGRAMS_SEED=7 runs that program alone.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence

#: For how long each test runs new programs; 0: it runs its fixed ones.
SECONDS = float(os.environ.get("DYNSWAP_PROGRAMS_SECONDS", "0"))
_ONE = os.environ.get("DYNSWAP_PROGRAMS_SEED")


def seeds(short: Sequence[int], share: float = 1) -> Iterator[int]:
    """Yield the seeds that a test runs, which has this share of the time; no fewer than it has fixed ones."""
    if _ONE or not SECONDS:
        yield from [int(_ONE)] if _ONE else short
        return
    end = time.monotonic() + SECONDS * share
    first = time.time_ns() // 1_000_000
    for seed in itertools.count(first):
        if seed >= first + len(short) and time.monotonic() > end:
            return
        yield seed
