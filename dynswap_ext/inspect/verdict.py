"""Where the time goes and what would help, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynswap_ext._memory import format_bytes
from dynswap_ext._recording import GroupFigures
from dynswap_ext._stats import Stats

__all__ = ["show_ns", "verdict_of"]

_MiB = 1 << 20
#: The share of the first pass from which on there is little else to say.
_MOSTLY = 0.9


def verdict_of(
    rows: Sequence[GroupFigures],
    stats: Stats,
    causes: Mapping[str, int],
    budget: int | None,
    prefetch: int,
) -> str:
    """Say what most of the stall is due to, and what would help.

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
    if not any(row.hits or row.misses or row.copies for row in rows):
        return (
            "nothing has been used yet: run the model, then ask again"
            if rows
            else "no weight has to be moved: every master is already where and what it should be"
        )
    waited_for = sum(row.misses + row.late_hits for row in rows)
    if not whole and waited_for and any(row.copies and row.copy_ns is None for row in rows):
        uses = sum(row.hits + row.misses for row in rows)
        return (
            f"{waited_for} of {uses} uses waited for a copy; how long is timed on this device only while it "
            "is recorded: run the model in `with handle.record():`, then ask again"
        )
    if not whole:
        return "no time was lost: all weights were there when they were needed"
    first = causes.get("first use", 0)
    rest = {cause: ns for cause, ns in causes.items() if cause != "first use" and ns}
    if not rest:
        return (
            f"first use: all of {show_ns(whole)} stalled was for weights that had never been copied before; "
            "it does not come again"
        )
    cause = max(rest, key=lambda name: rest[name])
    advice = _advice(cause, rest[cause], rows, stats, budget, prefetch)
    if first > _MOSTLY * whole:
        return (
            f"first use: {_share(first, whole)} of {show_ns(whole)} stalled was for weights that had never "
            "been copied before; it does not come again. Of the rest, "
            f"{show_ns(rest[cause])} was {_MEANING[cause]} ({cause}): {advice}"
        )
    said = f"{cause}: {_share(rest[cause], whole)} of {show_ns(whole)} stalled was {_MEANING[cause]}"
    if first:
        said += f" ({_share(first, whole)} was for the first use, which does not come again)"
    return f"{said}; {advice}"


def show_ns(ns: int) -> str:
    """1.3 s, 12 ms, 830 us; a dash for nothing."""
    if ns <= 0:
        return "-"
    for unit, size in (("s", 10**9), ("ms", 10**6)):
        if ns >= size * 0.9995:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns / 1000:.3g} us"


_MEANING = {
    "bus-bound": "the bus, busy with other copies all the time",
    "late prefetch": "for copies that were issued too late, while the bus was idle",
    "not predicted": "for weights that nothing had fetched ahead",
    "arena full": "for room in the arena, which was full of what had been fetched ahead",
    "slot held": "for slots that handed-out tensors held",
    "master changed": "for masters that had changed, and were copied again",
}


def _advice(
    cause: str,
    stalled: int,
    rows: Sequence[GroupFigures],
    stats: Stats,
    budget: int | None,
    prefetch: int,
) -> str:
    more = _more_residents(stalled, rows, stats, budget)
    if cause == "late prefetch":
        return f"a deeper prefetch would help: prefetch={max(2, 2 * prefetch)}"
    if cause == "master changed":
        return "that is what training costs; if nothing trains, look for what writes to the masters"
    if cause == "slot held":
        holders = sorted({row.held_by for row in rows if row.held_by})
        which = f" of {holders[0]}" if holders else ""
        return f"let go of tensors{which} that are kept in a list or a graph, or give more room: {more}"
    if cause == "not predicted" and stats.provider == "python":
        return (
            "the pure-Python provider fetches nothing ahead, the native one does; more residents help both: "
            f"{more}"
        )
    if cause == "not predicted":
        return (
            f"the order of use is another from pass to pass (branches, experts); residents would help: {more}"
        )
    if cause == "arena full":
        return f"more room would help: {more}"
    return f"more residents would help: {more}"


def _more_residents(stalled: int, rows: Sequence[GroupFigures], stats: Stats, budget: int | None) -> str:
    """The budget with which the bus would have kept up.

    A pass that stalls for s of the b that its copies take keeps up when it copies b - s: that share of the
    streamed bytes has to stay on the device. With evenly paced compute that is enough, else a little less.
    """
    streamed = sum(row.bytes for row in rows if not row.resident)
    copying = sum(row.copy_ns or 0 for row in rows) - sum(row.causes.get("first use", 0) for row in rows)
    share = min(1.0, stalled / copying) if copying > 0 else 1.0
    used = stats.resident_bytes + stats.arena_bytes
    # All of them resident need no arena.
    wanted = min(stats.weight_bytes, max(used, budget or 0) + int(streamed * share))
    rounded = -(-wanted // _MiB) * _MiB if wanted > 16 * _MiB else wanted
    now = f" (now {format_bytes(budget)})" if budget is not None else ""
    text = f'"{rounded // _MiB}MiB"' if rounded % _MiB == 0 and rounded else str(rounded)
    return f"budget={text}{now}"


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 else "less than 1 %"
