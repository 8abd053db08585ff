"""Which weights stay on the device, for the pure-Python provider (native: csrc/core/residency.cpp)."""

from __future__ import annotations

from collections.abc import Sequence


def choose_residents(
    sizes: Sequence[int], budget: int | None, in_use: int, keep: Sequence[bool] | None = None
) -> list[bool]:
    """Choose the weights that stay on the device, by their device bytes: a bool for each.

    All of them if they fit the budget; else the first that leave room for `in_use`, the bytes that a call may
    have on the device at one time, and for the largest. Weights of `keep` stay in any case. Without a budget
    no others do. Nothing is fetched ahead here, so it makes no difference where those are that stream.
    """
    chosen = [False] * len(sizes) if keep is None else list(keep)
    if budget is None:
        return chosen
    room = budget - sum(size for size, stays in zip(sizes, chosen, strict=True) if stays)
    others = [size for size, stays in zip(sizes, chosen, strict=True) if not stays]
    if sum(others) > room:
        room -= max([*others, min(in_use, sum(others))])
    for place, size in enumerate(sizes):
        if not chosen[place] and size <= room:
            chosen[place] = True
            room -= size
    return chosen
