"""The counters and recordings of a session of the pure-Python provider (native: csrc/core).

Each weight is a group by itself. Copies are synchronous, so the time of a copy is also a stall.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

#: The most spans that one recording holds, which take some 60 MB.
_MOST_SPANS: Final = 1 << 18


@dataclass(slots=True, eq=False)
class Counts:
    """The counters of one weight, and what reports say about it."""

    name: str = "?"
    source: str = "RAM"
    bytes: int = 0
    resident: bool = False
    copied_before: bool = False
    #: Whether the next copy is needed because the master has changed or was replaced.
    changed: bool = False
    #: "hits", "copies", "bytes_moved", "copy_ns".
    counters: Counter[str] = field(default_factory=Counter)
    #: Nanoseconds of stalls by their cause.
    causes: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        self.counters, self.causes = Counter(), Counter()

    def figures(self) -> dict[str, Any]:
        """Return the figures of this weight, named as in `GroupFigures`."""
        counted = {name: self.counters[name] for name in ("hits", "copies", "bytes_moved", "copy_ns")}
        return {
            **counted,
            "names": [self.name],
            "bytes": self.bytes,
            "source": self.source,
            "resident": self.resident,
            "late_hits": 0,
            "misses": self.counters["copies"],
            "causes": dict(self.causes),
            "by_use": False,
            "held_by": "",
        }


class Statistics:
    """The part of a session that has its counters, those of its weights, and what was recorded."""

    #: LOCK: guards everything here.
    _exclusive: AbstractContextManager[None]

    def __init__(self) -> None:
        #: By their names in `Stats`. One that is missing is 0.
        self._counters: Counter[str] = Counter()
        #: The figures of the plan, by their names in `Stats`, which `reset_stats` does not reset.
        self._plan: dict[str, int] = {}
        self._counts: dict[Counts, None] = {}  # in the order of definition
        self._used: dict[Counts, None] = {}  # in the order of first use
        self._recording = False
        self._spans: list[tuple[str, Counts | None, int, int, str, int, int]] = []
        self._dropped = 0

    def record(self, on: bool) -> None:
        with self._exclusive:
            if on:
                self._spans, self._dropped = [], 0
            self._recording = on

    def shared_out(self) -> dict[str, Any] | None:
        return None

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
        """Return figures of the recorded passes, named as in `Tuning`.

        They include what lies between the beginnings of the first and the last pass.
        """
        spans = self.timeline()["spans"]
        begins = [(span[2], span[6]) for span in spans if span[0] == "pass"]
        passes = max(0, len(begins) - 1)
        first, last = (begins[0][0], begins[-1][0]) if passes else (0, 0)
        copies = [span for span in spans if span[0] == "copy" and first <= span[2] < last]
        waited = sum(min(span[3], last) - span[2] for span in copies) / 1e9
        # Copies take turns. So if several threads call the model, at least one computes during each copy.
        all_waited = waited if len({thread for _, thread in begins}) == 1 else 0.0
        return {
            "passes": passes,
            "compute_seconds": ((last - first) / 1e9 - all_waited) / max(1, passes),
            "wait_seconds": waited / max(1, passes),
            "bytes_per_second": sum(span[5] for span in copies) / waited if waited else 0.0,
            "seconds_before": None,
            "seconds_after": None,
        }

    # With the session's lock --------------------------------------------------------------------------

    def _count_hit(self, counts: Counts) -> None:
        self._counters["hits"] += 1
        counts.counters["hits"] += 1
        if counts not in self._used:
            self._used[counts] = None

    def _count_copy(self, counts: Counts, begin: int, end: int, nbytes: int, decoded: int) -> None:
        """Count a copy of a weight, and its time as a stall. Times are those of ``time.monotonic_ns``."""
        took = end - begin
        sizes = ("bytes_moved", nbytes), ("bytes_decoded", decoded)
        for name, more in (("stall_ns", took), ("misses", 1), ("copies", 1), *sizes):
            self._counters[name] += more
        for name, more in (("copies", 1), ("bytes_moved", nbytes), ("copy_ns", took)):
            counts.counters[name] += more
        if not counts.copied_before:
            cause = "first use"
        else:
            cause = "master changed" if counts.changed else "not predicted"
        counts.copied_before, counts.changed = True, False
        counts.causes[cause] += took
        if self._recording:
            self._add("copy", counts, begin, end, "demanded", nbytes, 0)
            self._add("wait", counts, begin, end, cause, nbytes, threading.get_native_id())
        self._used.setdefault(counts)

    def _record_use(self, counts: Counts, held: int) -> None:
        """Record that a weight is used from now on, while `held` bytes of weights are on the device."""
        now = time.monotonic_ns()
        self._add("use", counts, now, now, "", held, threading.get_native_id())

    def _in_order(self) -> list[Counts]:
        """Return the weights in the order of use; those never used come last."""
        return list({**self._used, **self._counts})

    def _add(self, *span: Any) -> None:
        if len(self._spans) < _MOST_SPANS:
            self._spans.append(span)
        else:
            self._dropped += 1
