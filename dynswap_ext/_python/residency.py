"""Which weights stay on the device, for the pure-Python provider (native: csrc/core/residency.cpp)."""

from __future__ import annotations

from collections.abc import Sequence


def choose_residents(
    sizes: Sequence[int], budget: int | None, in_use: int, keep: Sequence[bool] | None = None
) -> list[bool]:
    """Return for each weight, given by its device bytes, whether it stays on the device.

    If the budget does not hold all weights, room is left for the largest one, or for `in_use` bytes if these
    are more: the most that a call may have on the device at one time. The first weights that leave this room
    stay. Weights of `keep` stay in any case, and without a budget only these do. Which weights stay does not
    matter for speed, as this provider fetches nothing ahead.
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
