"""A script of benchmarks/ runs its jobs in processes of their own, and learns why one ended."""

from __future__ import annotations

import time

import pytest

import benchmark_scripts  # noqa: F401  (lets benchmarks be imported)
from dynswap_ext.errors import BudgetError, DynswapError
from isolated import Isolated

pytestmark = pytest.mark.alone


def _raise(job: str) -> None:
    print("about to fail")
    if job == "wait":
        time.sleep(60)
    raise BudgetError("too small", 7) if job == "budget" else ZeroDivisionError("on purpose")


def test_an_error_of_the_package_arrives_as_it_is() -> None:
    with pytest.raises(BudgetError, match="too small") as caught:
        Isolated().run(_raise, "budget")
    assert caught.value.smallest_bytes == 7


def test_another_one_is_told_with_what_was_written() -> None:
    with pytest.raises(DynswapError, match=r"(?s)ended with status 1.*about to fail.*on purpose"):
        Isolated().run(_raise, "")


def test_a_process_that_is_late_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="was not done after 1 s"):
        Isolated("forkserver", ["dynswap_ext"]).run(_raise, "wait", limit=1)
    assert time.monotonic() - began < 50
