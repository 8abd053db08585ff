"""Where the time goes and what would help, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.units import show_ns
from dynswap_ext.profile.recording import GroupFigures
from dynswap_ext.profile.stats import Stats

__all__ = ["diagnose"]

_MIB: Final = 1 << 20
#: If the first use has more than this share of the stalls, it is named as the main cause.
_MOSTLY: Final = 0.9
_FIRST: Final = "weights that had never been copied before; it does not come again"
#: For each cause, what the stall was for, and what would help.
_CAUSES: Final = {
    "bus-bound": (
        "for the bus, which was busy with other copies",
        "keeping more weights on the device would help: {budget}",
    ),
    "late prefetch": (
        "for copies that were issued too late, while the bus was idle",
        "a deeper prefetch would help: prefetch={prefetch}",
    ),
    "not predicted": (
        "for weights that nothing had fetched ahead",
        "the order of use differs from pass to pass (branches, experts); keeping more weights on the device "
        "would help: {budget}",
    ),
    "arena full": (
        "for room in the arena, which was full of what had been fetched ahead",
        "a larger budget would help: {budget}",
    ),
    "slot held": (
        "for slots that handed-out tensors held",
        "drop tensors{holder} that your code keeps in a list or a graph, or give a larger budget: {budget}",
    ),
    "master changed": (
        "for masters that had changed, and were copied again",
        "that is what training costs; if nothing trains, look for what writes to the masters",
    ),
}
_PURE_PYTHON: Final = (
    "the pure-Python provider fetches nothing ahead, the native one does; keeping more weights on the device "
    "helps both: {budget}"
)


def diagnose(
    rows: Sequence[GroupFigures],
    stats: Stats,
    causes: Mapping[str, int],
    budget: int | None,
    prefetch: int,
) -> str:
    """Return what most of the stalled time is due to, and what would help.

    Parameters
    ----------
    rows
        Figures of each group.
    stats
        Their sums, and the plan.
    causes
        Nanoseconds of stall by cause.
    budget, prefetch
        As given to the install.
    """
    whole = sum(row.stall_ns for row in rows)
    if not rows:
        return "no weight has to be moved: every master is already where and what it should be"
    if not any(row.hits or row.misses or row.copies for row in rows):
        return "nothing has been used yet: run the model, then ask again"
    if not whole:
        return _without_stall(rows)
    if all(row.resident for row in rows) and not causes.get("master changed"):
        return (
            f"every weight stays on the device now: the {show_ns(whole)} of waiting were for their copies "
            "so far, and a larger budget changes nothing"
        )
    first = causes.get("first use", 0)
    rest = {cause: ns for cause, ns in causes.items() if cause != "first use" and ns}
    if not rest:
        return f"first use: all of {show_ns(whole)} of waiting was for {_FIRST}"
    cause = max(rest, key=lambda name: rest[name])
    meaning, advice = _CAUSES[cause]
    if cause == "not predicted" and stats.provider == "python":
        advice = _PURE_PYTHON
    holders = sorted({row.held_by for row in rows if row.held_by})
    advice = advice.format(
        budget=_larger_budget(rest[cause], rows, stats, budget),
        prefetch=max(2, 2 * prefetch),
        holder=f" of {holders[0]}" if holders else "",
    )
    if first > _MOSTLY * whole:
        return (
            f"first use: {_share(first, whole)} of {show_ns(whole)} of waiting was for {_FIRST}. Of the "
            f"rest, {show_ns(rest[cause])} was {meaning} ({cause}): {advice}"
        )
    text = f"{cause}: {_share(rest[cause], whole)} of {show_ns(whole)} of waiting was {meaning}"
    if first:
        text += f" ({_share(first, whole)} was for the first use, which does not come again)"
    return f"{text}; {advice}"


def _without_stall(rows: Sequence[GroupFigures]) -> str:
    waited_for = sum(row.misses + row.late_hits for row in rows)
    if waited_for and any(row.copies and row.copy_ns is None for row in rows):
        uses = sum(row.hits + row.misses for row in rows)
        return (
            f"{waited_for} of {uses} uses waited for a copy; how long is timed on this device only while it "
            "is recorded: run the model in `with handle.record():`, then ask again"
        )
    return "no time was lost: all weights were there when they were needed"


def _larger_budget(stalled: int, rows: Sequence[GroupFigures], stats: Stats, budget: int | None) -> str:
    """Return the option for the budget with which the bus would have kept up.

    A pass that stalls for s of the b that its copies take keeps up when it copies b - s: that share of the
    streamed bytes has to stay on the device. With evenly paced compute that is enough, else a little less.
    """
    streamed = sum(row.bytes for row in rows if not row.resident)
    copying = sum((row.copy_ns or 0) - row.causes.get("first use", 0) for row in rows)
    share = min(1.0, stalled / copying) if copying > 0 else 1.0
    used = stats.resident_bytes + stats.arena_bytes
    # All of them resident need no arena.
    wanted = min(stats.weight_bytes, max(used, budget or 0) + int(streamed * share))
    unit, name = (_MIB, "MiB") if wanted > 16 * _MIB else (1 << 10, "KiB")
    now = f" (now {format_bytes(budget)})" if budget is not None else ""
    return f'budget="{max(1, -(-wanted // unit))}{name}"{now}'


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 else "less than 1 %"
