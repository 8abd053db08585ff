"""Random programs under a cap on memory: what runs with the minimum runs with an automatic budget.

The test runs a short, fixed set; `make programs SECONDS=600` runs new ones until the time is over.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings

import pytest

from gpu_under_test import Gpu

pretend_cuda = pytest.importorskip("pretend_cuda")
pytestmark = pytest.mark.skipif(
    not pretend_cuda.active() or pretend_cuda.device_type() != "cuda",
    reason="needs a CUDA device whose memory is capped: the pretend one",
)

SECONDS = float(os.environ.get("DYNSWAP_PROGRAMS_SECONDS", "0"))
#: Residents give way in most of these.
SHORT = (1, 2, 0, 5, 17, 27, 30, 34, 35, 40, 41, 43)


def test_what_runs_with_the_minimum_runs_with_an_automatic_budget(gpu: Gpu) -> None:
    if not gpu.native:
        pytest.skip("the pure-Python provider's residents do not give way")
    from memory_programs import judge

    end = time.monotonic() + SECONDS
    seeds = itertools.count(time.time_ns() // 1_000_000) if SECONDS else iter(SHORT)
    minimum_ran = gave_way = done = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            verdict = judge(seed)
            assert not verdict.failure, f"seed {seed}: {verdict.failure}"
            done += 1
            minimum_ran += verdict.minimum_ran
            gave_way += verdict.gave_way > 0
            if SECONDS and done >= len(SHORT) and time.monotonic() > end:
                break
    pretend_cuda.reset()
    often = done // 8 if SECONDS else done // 2
    assert minimum_ran > done // 2 and gave_way > often, (done, minimum_ran, gave_way)
