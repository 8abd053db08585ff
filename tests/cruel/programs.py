"""The programs of tests/cruel by name, scenarios and random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import scenarios
import scenarios_of_training
import scenarios_of_writes
import world
from random_program import random_program
from world import World

PROGRAMS: dict[str, Callable[[World], None]] = {
    each.__name__: each
    for each in (
        random_program,
        *scenarios.SCENARIOS,
        *scenarios_of_writes.SCENARIOS,
        *scenarios_of_training.SCENARIOS,
    )
}


def each_run(orders: Sequence[str], only: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield what runs with each seed: the name of a program and an order."""
    for order in orders:
        yield from ((name, order) for name in PROGRAMS if only in (None, name))


def run(name: str, seed: int, order: str) -> World:
    """Run the program of that name once."""
    return world.run(PROGRAMS[name], seed, order)
