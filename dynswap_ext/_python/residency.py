"""Which weights stay on the device, for the pure-Python provider (native: csrc/core/residency.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

from dynswap_ext._util.memory import format_bytes
from dynswap_ext.errors import BudgetError

__all__ = ["choose_residents"]


def choose_residents(sizes: Sequence[int], budget: int | None, together: int, at_once: int = 0) -> list[bool]:
    """Choose residents for weights that are used in this order, again and again.

    All of them if they fit; else as many bytes as fit beside the weights in use at one time, spread evenly
    over the order, so that whatever consumes the stream meets it at an even pace.

    Parameters
    ----------
    sizes : sequence of int
        Device bytes of each weight, in the order of use.
    budget : int or None
        Bytes for residents and the weights in use, in sum. None: no residents.
    together : int
        Device bytes that are in use at one time, as the weights of one module may be.
    at_once : int
        Device bytes that are certainly in use at one time.

    Returns
    -------
    list of bool
        One per weight.

    Raises
    ------
    BudgetError
        If the largest weight does not fit, or what is in use at one time.
    """
    if budget is None or not sizes:
        return [False] * len(sizes)
    largest, total = max(sizes), sum(sizes)
    if total <= budget:
        return [True] * len(sizes)
    needed = max(largest, at_once)
    if needed > budget:
        raise BudgetError(
            f"budget is {format_bytes(budget)} ({budget} bytes), but the largest weight, or the weights that "
            f"one call needs at once, take {needed} bytes on the device; the smallest budget that works is "
            f"{needed}",
            smallest_bytes=needed,
        )
    room = max(0, budget - max(needed, together))
    share = room / total
    chosen, credit = [], 0.0
    for size in sizes:
        credit += share * size
        # Taken once its share is saved up: every 1/share-th weight where all are of one size.
        take = credit >= size and size <= room
        if take:
            credit -= size
            room -= size
        chosen.append(take)
    return chosen
