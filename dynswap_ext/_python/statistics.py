"""What a session of the pure-Python provider counts and records (native: csrc/core).

Each weight is a group. Copies are synchronous: a copy and the wait for it are one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

#: Spans that one recording holds, some 60 MB of them.
_MOST_SPANS: Final = 1 << 18


@dataclass(slots=True, eq=False)
class Counts:
    """The counters of one weight, and what reports say about it."""

    name: str = "?"
    source: str = "RAM"
    bytes: int = 0
    resident: bool = False
    #: When it was first used, counted over the session's weights; None: not yet.
    first_use: int | None = None
    copied_before: bool = False
    #: Whether the next copy is made because the master is another.
    changed: bool = False
    hits: int = 0
    copies: int = 0
    bytes_moved: int = 0
    copy_ns: int = 0
    causes: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        self.hits = self.copies = self.bytes_moved = self.copy_ns = 0
        self.causes = {}

    def figures(self) -> dict[str, Any]:
        """Return the figures of this weight as `Session.groups` gives them."""
        same = ("bytes", "source", "resident", "hits", "copies", "bytes_moved", "copy_ns")
        return {
            **{name: getattr(self, name) for name in same},
            "names": [self.name],
            "late_hits": 0,
            "misses": self.copies,
            "causes": dict(self.causes),
            "by_use": False,
            "held_by": "",
        }


def _time_of(at_least: int, spans: Sequence[tuple[int, int]]) -> int:
    """Return the time in which as many of these spans, each a beginning and an end, went on together."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    time_of = going_on = before = 0
    for now, change in changes:
        if going_on >= at_least:
            time_of += now - before
        going_on += change
        before = now
    return time_of


class Statistics:
    """The counters of a session and of its weights, and what was recorded."""

    #: LOCK: guards everything here.
    _exclusive: AbstractContextManager[None]

    def __init__(self) -> None:
        #: By their names in `Stats`, of which a missing one is 0. The plan stays when counting begins again.
        self._counters: Counter[str] = Counter()
        self._plan: dict[str, int] = {}
        self._counts: dict[Counts, None] = {}  # in the order of definition
        self._used = 0
        self._recording = False
        self._spans: list[tuple[str, Counts | None, int, int, str, int, int]] = []
        self._dropped = 0

    def record(self, on: bool) -> None:
        with self._exclusive:
            if on:
                self._spans, self._dropped = [], 0
            self._recording = on

    def note_pass(self) -> None:
        if self._recording:
            with self._exclusive:
                now = time.monotonic_ns()
                self._add("pass", None, now, now, "", 0, threading.get_native_id())

    def timeline(self) -> dict[str, Any]:
        with self._exclusive:
            index = {counts: i for i, counts in enumerate(self._in_order())}
            spans = [
                (kind, -1 if counts is None else index[counts], *rest)
                for kind, counts, *rest in sorted(self._spans, key=lambda span: span[2])
                if counts is None or counts in index  # else its weight has left the model
            ]
            return {"spans": spans, "dropped": self._dropped, "clock": "monotonic"}

    def _seen(self) -> dict[str, Any]:
        """What the recorded passes took, as `Tuning` has it: from the first one's beginning to the last's."""
        spans = self.timeline()["spans"]
        begins = [(span[2], span[6]) for span in spans if span[0] == "pass"]
        passes = max(0, len(begins) - 1)
        first, last = (begins[0][0], begins[-1][0]) if passes else (0, 0)
        inside = [span for span in spans if first <= span[2] < last]
        waits, copies = (
            [(span[2], min(span[3], last)) for span in inside if span[0] == kind] for kind in ("wait", "copy")
        )
        moved = sum(span[5] for span in inside if span[0] == "copy")
        copying = _time_of(1, copies)
        # As long as one of the threads that call the model goes on, they compute.
        waited = _time_of(len({thread for _, thread in begins}), waits)
        return {
            "passes": passes,
            "compute_seconds": (last - first - waited) / 1e9 / max(1, passes),
            "wait_seconds": sum(end - begin for begin, end in waits) / 1e9 / max(1, passes),
            "bytes_per_second": moved / (copying / 1e9) if copying else 0.0,
            "seconds_before": None,
            "seconds_after": None,
        }

    # With the session's lock --------------------------------------------------------------------------

    def _count_hit(self, counts: Counts) -> None:
        self._counters["hits"] += 1
        counts.hits += 1
        if counts.first_use is None:
            self._note_first_use(counts)

    def _count_copy(self, counts: Counts, begin: int, end: int, nbytes: int) -> None:
        """Count a copy of the weight, for which its consumer waited; times are of ``time.monotonic_ns``."""
        took = end - begin
        for name, more in (("stall_ns", took), ("misses", 1), ("copies", 1), ("bytes_moved", nbytes)):
            self._counters[name] += more
        if not counts.copied_before:
            cause = "first use"
        else:
            cause = "master changed" if counts.changed else "not predicted"
        counts.copied_before, counts.changed = True, False
        counts.copies += 1
        counts.bytes_moved += nbytes
        counts.copy_ns += took
        counts.causes[cause] = counts.causes.get(cause, 0) + took
        if self._recording:
            self._add("copy", counts, begin, end, "demanded", nbytes, 0)
            self._add("wait", counts, begin, end, cause, nbytes, threading.get_native_id())
        if counts.first_use is None:
            self._note_first_use(counts)

    def _record_use(self, counts: Counts, held: int) -> None:
        """Record that a computation uses the weight from now on; `held` bytes are on the device."""
        now = time.monotonic_ns()
        self._add("use", counts, now, now, "", held, threading.get_native_id())

    def _in_order(self) -> list[Counts]:
        """Return the weights in the order of use; those never used come last."""
        last = self._used
        return sorted(self._counts, key=lambda counts: last if counts.first_use is None else counts.first_use)

    def _note_first_use(self, counts: Counts) -> None:
        counts.first_use = self._used
        self._used += 1
        self._counts.setdefault(counts)

    def _add(self, *span: Any) -> None:
        if len(self._spans) < _MOST_SPANS:
            self._spans.append(span)
        else:
            self._dropped += 1
