"""Runs functions on several threads at once, and raises an error that any of them raises."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

THREADS = 4


@contextmanager
def _changing_often() -> Iterator[None]:
    """Let Python switch between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def at_once(*works: Callable[[], object]) -> None:
    """Run each function on a thread of its own. All threads begin together."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        barrier.wait()
        work()

    with _changing_often(), ThreadPoolExecutor(len(works)) as pool:
        for result in [pool.submit(run, work) for work in works]:
            result.result(timeout=120)


def in_threads(work: Callable[[int], object], count: int = THREADS) -> None:
    """Run `work` on `count` threads, each with its number. All threads begin together."""
    at_once(*(partial(work, index) for index in range(count)))


@contextmanager
def repeated(work: Callable[[int], object], count: int = 2) -> Iterator[None]:
    """Run `work` again and again on `count` threads, each with its number, until the block ends."""
    over = threading.Event()

    def run(index: int) -> None:
        while not over.is_set():
            work(index)

    with _changing_often(), ThreadPoolExecutor(count) as pool:
        running = [pool.submit(run, index) for index in range(count)]
        try:
            yield
        finally:
            over.set()
    for each in running:
        each.result()
