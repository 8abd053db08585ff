"""Which weights stay on the device, for the pure-Python provider (native: csrc/core/residency.cpp)."""

from __future__ import annotations

from collections.abc import Sequence


def choose_residents(
    sizes: Sequence[int],
    budget: int | None,
    together: int,
    at_once: int = 0,
    keep: Sequence[bool] | None = None,
) -> list[bool]:
    """Choose residents for weights that are used in this order, again and again: a bool for each.

    All of them if they fit the budget; else as many bytes as fit in addition to those in use at one time,
    spread evenly over the order, so that the weights that stream come at an even pace. Without a budget
    nothing stays. `sizes` are device bytes, `together` the bytes that a module may use at one time, `at_once`
    those that a call certainly uses at one time. Weights of `keep` stay in any case, and the others have the
    rest of the budget, which holds the largest of them and `at_once`.
    """
    if keep is not None and any(keep):
        others = [size for size, kept in zip(sizes, keep, strict=True) if not kept]
        rest = None if budget is None else budget - (sum(sizes) - sum(others))
        chosen_of_others = iter(choose_residents(others, rest, min(together, sum(others)), at_once))
        return [kept or next(chosen_of_others) for kept in keep]
    if budget is None or not sizes:
        return [False] * len(sizes)
    total, needed = sum(sizes), max(*sizes, at_once)
    if total <= budget:
        return [True] * len(sizes)
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
